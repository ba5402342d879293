"""What transformers asks of a cache's layers, and new keys on their way from the cache to the attention function."""
import copy
import weakref

import torch
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin

READ_FREELY = ("device", "dim", "dtype", "is_cuda", "ndim", "requires_grad", "shape", "size", "stride")


DROPPED = "what a method has dropped for one sequence cannot be given to another or brought back; sample, or decode greedily"
STORED = "rows are in the library's store, which the attention 'tessera' alone reads; use transformers' own cache for this model"


def refuse(what, why=DROPPED):
    raise NotImplementedError(f"{what} is not possible with a TesseraCache: {why}")


class Handed:
    """A layer's new keys, and whose they are. The attention "tessera" alone may read them: what is stored is in the cache.

    Another attention would see the call's own tokens and nothing of the past. Its first operation on the keys is refused.
    """

    def __init__(self, rows, cache, layer):
        self.rows, self.cache, self.layer = rows, cache, layer

    def __getattr__(self, name):
        if name in READ_FREELY:
            return getattr(self.rows, name)
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    def __getitem__(self, _):
        self._refuse()

    @classmethod
    def __torch_function__(cls, *_):
        cls._refuse()

    @staticmethod
    def _refuse():
        raise ValueError("attention of the model is another than 'tessera'; expected 'tessera' wherever keys go into a "
                         "TesseraCache; call model.set_attn_implementation('tessera'), or pass another cache")


class Latents(torch.Tensor):
    """Latent rows from which a model makes its new keys and values (DeepSeek), and whatever it makes of them: all say whose they are.

    The model may shape them and pass them through layers; attention other than "tessera" would see nothing of the past, and its
    products are refused."""

    SHAPING = frozenset("""
        __get__ __getitem__ __setitem__ cat chunk clone contiguous copy_ dim expand flatten layer_norm linear mul narrow new_empty
        new_zeros numel pow repeat_interleave reshape rms_norm rsqrt size split stride sum to transpose type_as unsqueeze view add mean
        is_floating_point float permute unflatten split_with_sizes empty_like add_ mul_ __len__ is_complex""".split())

    @classmethod
    def of(cls, rows, cache, layer):
        marked = rows.as_subclass(cls)
        marked.cache, marked.layer = cache, layer
        return marked

    @property
    def rows(self):
        return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        if getattr(function, "__name__", "") not in cls.SHAPING:
            Handed._refuse()
        result = super().__torch_function__(function, types, arguments, named or {})
        mark = next(one for one in cls._within((arguments, named)) if hasattr(one, "cache"))
        for one in cls._within(result):
            one.cache, one.layer = mark.cache, mark.layer
        return result

    @classmethod
    def _within(cls, given):
        """Every marked tensor in nested arguments."""
        if isinstance(given, cls):
            yield given
        elif isinstance(given, (tuple, list)):
            for one in given:
                yield from cls._within(one)
        elif isinstance(given, dict):
            yield from cls._within(list(given.values()))


def handed(cache, layer, keys, values):
    """What `update` answers: new rows that say whose they are."""
    config = cache._text_config
    sizes = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    if keys.shape[1] == 1 and (keys.shape[-1], values.shape[-1]) == sizes:
        return Latents.of(keys, cache, layer), Latents.of(values, cache, layer)
    return Handed(keys, cache, layer), values


class Layer(CacheLayerMixin):
    """One layer as transformers sees it; it holds no rows. generate and the models decide by these answers."""

    is_compileable = False  # transformers would compile the model over tensors that the layer does not have
    supports_early_init = False
    is_croppable = True  # what a draft brought, under every method; more where TesseraCache.takes_back

    def __init__(self, cache, sliding):  # the base's attributes are answers here
        self._cache = weakref.ref(cache)
        self.is_sliding = sliding

    def lazy_initialization(self, *_):
        pass

    def update(self, *_, **__):
        refuse("storing keys and values outside of a call of the model", STORED)

    @property
    def is_initialized(self):
        return self.get_seq_length() > 0

    @property
    def keys(self):
        refuse("reading a layer's keys as a tensor", STORED)

    @property
    def values(self):
        refuse("reading a layer's values as a tensor", STORED)

    @property
    def batch_size(self):
        return self._cache().sequences

    max_batch_size = batch_size

    def get_seq_length(self):
        return self._cache().tokens

    def get_mask_sizes(self, query):
        """query: the number of new tokens, or their columns (transformers 4)."""
        return self.get_seq_length() + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self):
        return self._cache().max_length or -1

    get_max_cache_shape = get_max_length

    def offload(self):
        refuse("moving a layer to the CPU", STORED)

    def prefetch(self):
        refuse("moving a layer to the CPU", STORED)

    def reset(self):
        self._cache().reset()

    def reorder_cache(self, *_):
        refuse("beam search")

    def crop(self, *_):
        refuse("taking tokens back in one layer alone")

    def batch_repeat_interleave(self, *_):
        refuse("copying sequences within a batch")

    def batch_select_indices(self, *_):
        refuse("choosing sequences of a batch")


class NoStates:
    """transformers 4 has no layers with recurrent states."""


class HybridLayer(getattr(cache_utils, "LinearAttentionLayer", NoStates), Layer):
    """Keys and values are ours, a recurrent state beside them is transformers'."""

    is_compileable = False
    is_croppable = False

    def __init__(self, cache, sliding, states):
        super().__init__(number_of_states=states)
        Layer.__init__(self, cache, sliding)

    def reset(self):
        self._cache().reset()

    def crop(self, *_):
        Layer.crop(self)

    def reorder_cache(self, *_):
        Layer.reorder_cache(self)


def layer_for(cache, layer):
    """What transformers sees of a layer; layer: of layer_plan."""
    if layer.stores and layer.states:
        return HybridLayer(cache, bool(layer.window), layer.states)
    if layer.stores:
        return Layer(cache, bool(layer.window))
    return cache_utils.LinearAttentionLayer(number_of_states=layer.states) if layer.states else cache_utils.DummyLayer()


def saved_states(layers):
    """Of each layer its recurrent state, {} of one without."""
    return [copy.deepcopy({name: value for name, value in vars(layer).items() if name != "_cache"})
            if hasattr(layer, "recurrent_states") else {} for layer in layers]


def restored(cache, states):
    """New layers for a cache, with these recurrent states."""
    layers = cache._layers()
    for layer, state in zip(layers, states):
        vars(layer).update(state)
    return layers
