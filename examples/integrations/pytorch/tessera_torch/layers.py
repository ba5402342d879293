"""What transformers asks of a cache's layers, and new keys on their way from the cache to the attention function."""
import weakref

from transformers.cache_utils import CacheLayerMixin

READ_FREELY = ("device", "dim", "dtype", "is_cuda", "ndim", "requires_grad", "shape", "size", "stride")


def refuse(what):
    raise NotImplementedError(f"{what} is not possible with a TesseraCache: what a method has dropped for one "
                              "sequence cannot be given to another or brought back; sample, or decode greedily")


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
        refuse("storing keys and values outside of a call of the model")

    @property
    def is_initialized(self):
        return self.get_seq_length() > 0

    @property
    def keys(self):
        refuse("reading a layer's keys as a tensor")

    @property
    def values(self):
        refuse("reading a layer's values as a tensor")

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
        refuse("moving a layer to the CPU")

    def prefetch(self):
        refuse("moving a layer to the CPU")

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
