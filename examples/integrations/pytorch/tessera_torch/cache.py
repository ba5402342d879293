"""TesseraCache: what goes into generate(past_key_values=...), and the attention function that reads it.

transformers hands new keys and values to `Cache.update` and what that returns to the model's attention function. Here
`update` stores nothing: it writes on the keys whose they are, and the attention function `tessera` does the whole layer in
one operator: store, choose, attend.
"""
import contextlib
import copy

import torch
import transformers

from . import build, drafts, generation, opening, rereading
from .attention import NAME
from .facts import layer_plan, model_facts
from .kinds import devices as layer_places, rotation
from .layers import handed, layer_for, refuse, restored, saved_states
from .rows import Rows, changed_budget, checked_budget


class TesseraCache(transformers.Cache):
    """The cache of a batch of conversations under one method, for a model whose attention is "tessera".

    config:      the model's, model.config
    method:      a name of tessera_torch.methods(), or a Policy
    budget:      what the method keeps, or reads in a step, of each kv_head: tokens, or a share of the conversation's as a float, or
                 a list of such, one for each row; None: the method's default
    max_length:  most tokens of a conversation; CUDA takes memory for them, or for less where the first prompt comes in one call; the CPU
                 as they come (None: the model's)
    rows:        how K and V are stored: "given"; "fp8" or "int8", a byte an element and a scale for each row; "int4" or "int2",
                 in groups of 64 channels; "tailed", element="int4" behind `tail` whole tokens. rotate: "hadamard", channels are mixed before they are stored. Answers may differ
    draft_tokens: of a draft that a step may check, 0 to 7; CUDA takes scratch memory for them, the CPU takes 7. None: 7 if generate
                 with an assistant or prompt lookup makes the first call, else 0
    profile:     what was found once for the heads of this model, for a method that goes by it: the file of `tessera calibrate`
                 or `tessera heads`, or its numbers, [layers][kv_heads]
    devices:     layer_devices(model), where the model's layers are on several; each then has a store of its own. None: all are on one
    parameters:  the method's own, by the names that tessera_torch.parameters(method) shows
    """

    def __init__(self, config, method="full", budget=None, max_length=None, profile=None, draft_tokens=None, rows="given", rotate="none",
                 devices=None, **parameters):
        text = config.get_text_config(decoder=True)
        if text._attn_implementation != NAME:
            raise ValueError(f"attention of the model is '{text._attn_implementation}'; expected '{NAME}'; load the model "
                             f"with attn_implementation='{NAME}' or call model.set_attn_implementation('{NAME}')")
        self.method, self.budget = method, checked_budget(budget)
        self.settings = [word for name, value in parameters.items() for word in (name, str(value))]
        self._profile = model_facts.profile_table(profile)
        self._text_config, self._sees_text_alone = text, text is config
        self.plan = layer_plan.layers_of(text)
        self.layer_count = len(self.plan)
        self._devices = layer_places.checked(devices, self.layer_count)
        self._stored = [number for number, layer in enumerate(self.plan) if layer.stores]  # layers that keep keys and values
        super().__init__(layers=self._layers())
        self.max_length = max_length
        if draft_tokens not in (None, *range(generation.STEP_TOKENS)):
            raise ValueError(f"draft_tokens is {draft_tokens}; expected 0 to {generation.STEP_TOKENS - 1}; check longer drafts in parts")
        self._draft_tokens = draft_tokens
        self._longest = max_length or getattr(text, "max_position_embeddings", None) or layer_plan.NO_LENGTH
        self._operators = build.operators()
        build.check_rows(method, rows)
        rotation.check(method, rotate)
        self._row_format, self._rotate = rows, rotate
        if isinstance(method, str):
            build.source_of(method, "fp32", 64)  # an unknown method is known now
        self._reading_prompt = False  # see prompt()
        self._announced = 0           # tokens of a prompt that prompt() announced and that have not come
        self._has_begun = False       # the first of them have
        self._marks = None            # which tokens end a segment of the text: see read_text
        self._repeated = None         # how a prompt is said again, and to which model
        self._model = None
        self._text = None             # of the call that is coming, [batch, tokens]
        self._forget()

    def _forget(self):
        self._kinds = None     # the library's caches; made when layers show shapes and types
        self.tokens = 0        # columns of the batch, padding included: what transformers calls the cache's length
        self._padding = None   # which of the first columns are no padding: see Rows
        self._next_layer = 0   # of those that are stored
        self._in_prompt = False
        self._like = None      # an empty tensor of the model's device
        self._prepared = False  # the host's part of the next step is done: see CapturedStep
        self._room = None       # tokens that memory is there for; None: max_length
        self._is_last = False   # the call is a prompt's last one, which ends it layer by layer
        self._has_ended = False  # that has been so: the next call is another turn's
        self._rereads = False   # the method wants prompts to pass through the model once more before they end
        self._turn = None       # then the tokens of this turn's prompt, by sequence
        self._again = None      # while that happens: of each sequence what is read again
        self._path = None       # of the method's library
        self._drops = False     # the method drops tokens layer by layer
        self._began = 0         # columns when the prompt began that has not ended
        self._ended = 0         # columns when the last prompt ended
        self._is_cut = False    # a prompt that had ended was cut: the next call is a prompt's
        self._rehearsal = self._recorded = None  # of a call with a draft: see drafts.py
        self.memory_of = None   # another object whenever what a captured step would read has moved

    # --- what transformers asks -----------------------------------------------------------------------------------------

    def _layers(self):
        return [layer_for(self, layer) for layer in self.plan]

    def update(self, key_states, value_states, layer_idx, *_, **__):
        return handed(self, layer_idx, key_states, value_states)

    @property
    def is_initialized(self):
        return self.tokens > 0

    @property
    def sequences(self):
        """Sequences of the batch; -1 before the first call."""
        return -1 if self._kinds is None else self._made_for[2]

    def reset(self):
        """Empties the cache and frees its memory."""
        if self._kinds is not None:
            self._kinds.free()
        self._forget()
        self.layers = self._layers()  # recurrent ones begin anew

    def __deepcopy__(self, memo):
        """An independent copy: answer several questions about one prompt, or keep a state to go back to."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.layers, twin._recorded = restored(twin, saved_states(self.layers)), None
        if self._kinds is not None:
            twin._own(self._kinds.clone())
            twin._turn = copy.deepcopy(self._turn)
        return twin

    def __copy__(self):
        raise NotImplementedError("copy.copy of a TesseraCache would share what is stored with it; "
                                  "call copy.deepcopy, whose copy is independent")

    def __getstate__(self):
        """For pickle and torch.save: what is stored, as bytes. A conversation goes on in another process with another cache."""
        return opening.saved_state(self)

    def __setstate__(self, state):
        opening.restore(self, state)

    def _library(self, dtype, dim, device="cpu", v_dim=None):
        return build.library(self.method, dtype, dim, device, rows=self._row_format, v_dim=v_dim)

    def __repr__(self):
        name = self.method if isinstance(self.method, str) else "a policy of one's own"
        return f"TesseraCache({name}, budget={self.budget}, {self.tokens} tokens)"

    # --- one layer of a call --------------------------------------------------------------------------------------------

    def attend(self, layer, q, k, v, mask, scaling, softcap, sliding_window, sinks):
        position = self._stored.index(layer)
        if self._again is not None:
            return self._kinds.of_layer(layer).reread(layer, q, k, v, scaling, softcap, self._again)
        if position == 0:
            self._begin(q, k, v, mask)
        elif position != self._next_layer:
            raise ValueError(f"layer is {layer}; expected {self._stored[self._next_layer or 0]}; run every layer, in order, in every call")
        if self._rehearsal is not None and not self._rehearsal.runs:
            return self._rehearsal.reply(layer, q)
        kind = self._checked_kind(layer, sliding_window, q, k, v)
        if kind.handle is None:
            kind.open(self, q, k, v, scaling, softcap, sinks)
        if self.tokens == 0:
            kind.note_sinks(layer, sinks)
        q, k, v = kind.queries(q, scaling, softcap), kind.keys(k), kind.values(v)
        self._next_layer = None  # until this layer is done: see _begin
        try:
            if self._in_prompt:
                out = kind.prompt(layer, q, k, v, self._rows, self._flags, self._is_last)
            else:
                out = kind.step(layer, q, k, v)
                if self._recorded is not None:
                    self._recorded.note(layer, self._flags, q, k, v)
        except ValueError:
            if position == 0:
                self._next_layer = 0  # the library checks before it changes anything
            raise
        self._next_layer = position + 1
        if self._rehearsal is not None:
            self._rehearsal.note(layer, out)
        if position + 1 == len(self._stored):
            self._next_layer = 0
            self.tokens += q.shape[2]
            self._padding = self._rows.past
            self._has_ended = self._in_prompt and self._is_last
        return out

    def attend_again(self, layer, q, scaling, softcap, sliding_window):
        """Attention of another layer's queries over the keys and values of `layer`, which has had the call's. A model may ask for the
        call's last tokens alone."""
        kind = self._checked_kind(layer, sliding_window, q)
        q = kind.queries(q, scaling, softcap)
        return kind.prompt_again(layer, q, self._rows) if self._in_prompt else kind.step_again(layer, q)

    def fail_call(self):
        """A call of the model was refused, or broke off: nothing of a first one stays, and recurrent layers have had another."""
        if self.tokens == 0:
            self.reset()
        elif any(layer.states for layer in self.plan):
            self._next_layer = None

    def _checked_kind(self, layer, window, *rows):
        """The layer's kind. Errors: ValueError for another window than the config's, and for rows on another device."""
        if (window or 0) != self.plan[layer].window:
            raise ValueError(f"sliding window of layer {layer} is {window}; expected {self.plan[layer].window or None}; "
                             "pass the cache this model's config")
        kind = self._kinds.of_layer(layer)
        kind.check_device(layer, *rows)
        return kind

    def _begin(self, q, k, v, mask):
        """Before a call's first layer: what the call is, a chunk of a prompt or a step."""
        if self._next_layer != 0:
            if self.tokens > 0:
                raise ValueError("the cache is half way through a call that failed; expected the end of that call; "
                                 "call reset() and give it the conversation again")
            self.reset()
        batch, _, tokens, dim = q.shape
        if self._kinds is not None and (q.dtype, q.device, batch) != self._made_for:
            raise ValueError(f"dtype, device and batch are {q.dtype}, {q.device}, {batch}; expected those that the cache "
                             f"was made for, {self._made_for}; make a cache for each")
        self._check_length(self.tokens + tokens)
        request = generation.request_for(self)
        draft = None if request is None else request.draft
        if self._rehearsal is None:
            self._recorded = None  # whoever goes on takes the whole draft
        if request is not None and self._rehearsal is None:
            opening.check(self, request, q)
            if draft is not None and not drafts.is_step(self, draft, tokens):
                self._rehearsal = drafts.Rehearsal(self)
                return self._rehearsal.run(draft, tokens)
        rows = Rows(mask, batch, tokens, self.tokens, self._padding)
        text = rereading.take_text(self, rows, (batch, tokens))
        flags = None if text is None else self._marks(text)
        goes_on = self._reading_prompt or self._is_cut or request is not None and request.prompt_goes_on
        is_step = tokens == 1 and self.tokens > 0 and not goes_on
        if draft is not None:
            is_step = self._rehearsal is None or self._rehearsal.is_step
        if self._kinds is None:
            self._path = self._library(q.dtype, dim, q.device.type, v.shape[-1])
            # Where a later layer reads the rows of one, they stay until the prompt has passed through all.
            self._drops = self._operators.fact(str(self._path), "drops_by_layer") and not any(layer.reads for layer in self.plan)
        is_last = not is_step and self._drops and opening.ends_prompt(self, request, tokens)
        if self._kinds is None:
            opening.open_cache(self, q, draft is not None, is_last, request)
        elif self._has_ended:
            self.end_prompt()
        self._make_room(tokens)
        like = q.new_empty((0, 1, tokens))
        if is_step:
            opening.check_step(self, tokens, rows)
            self.end_prompt()
            if not self._prepared:
                self._kinds.each("prepare_step", like, flags)
            self._prepared = False
            self._kinds.each("begin_step", like)
        elif self._announced:
            if not (is_last or self._has_begun):
                self._kinds.each("reserve", self._announced)
            self._announced, self._has_begun = max(0, self._announced - tokens), True
        if self._rereads and not is_step:
            rereading.note_turn(self, text, rows)
        if not (is_step or self._in_prompt):
            self._began = self.tokens
        self._in_prompt, self._rows, self._flags, self._is_last = not is_step, rows, flags, is_last

    def _check_length(self, tokens):
        if tokens > self._longest:
            raise ValueError(f"tokens of the conversation are {tokens}; expected at most {self._longest}; "
                             "shorten the prompt or raise max_length")

    def _make_room(self, tokens):
        """After fit_memory: takes more where it was made for less, for a while at once."""
        if self._room is not None and not self._prepared:
            if tokens > self._room:
                self.fit_memory(min(max(tokens, 256), self._longest - self.tokens))
            self._room -= tokens

    @property
    def takes_back(self):
        """Whether tokens of an answer can be taken back at any time under the method, and not only those of a draft: see crop."""
        return self._operators.fact(str(self._path or self._library(torch.float32, 64)), "takes_back")

    def crop(self, tokens):
        """Takes back the newest -tokens columns of the batch; above 0, all but so many (transformers 4). What follows has the bits
        of a cache that never had them. Errors: ValueError where the method has settled one of them: under one that chooses in every step all
        but a draft's that generate has just checked."""
        tokens = int(tokens)  # a tensor, of some versions of transformers
        drafts.crop(self, -tokens if tokens <= 0 else max(0, self.tokens - tokens))

    def _own(self, kinds):
        self._kinds, self.memory_of = kinds, object()

    # --- the text -------------------------------------------------------------------------------------------------------

    def read_text(self, model, tokenizer):
        """Lets a method that goes by sentences, or reads prompts again (kvzip), see the text: from now on the cache looks at
        the input_ids of calls of this model.

        A call's last token ends its segment if it is a delimiter, whatever comes in the next call. What is read again passes
        through the model when the prompt ends: before the first step, or in end_prompt.
        """
        rereading.follow_text(self, model, tokenizer)
        return self

    # --- a step in two parts: see CapturedStep --------------------------------------------------------------------------

    def prepare_step(self, tokens):
        """The host's part of a step of tokens [batch, 1]; the model's next call is its other part. Returns what it does."""
        if any(layer.states for layer in self.plan) or len({*(self._devices or ())}) > 1:
            refuse("capturing steps of layers with states of their own, or on several devices,", "one graph holds neither; call the model")
        if self._next_layer != 0 or self.tokens == 0:
            raise ValueError(f"the cache is {'empty' if self._next_layer == 0 else 'half way through a call that failed'}; "
                             "expected a prompt in it; call the model with one before a step")
        if tokens.shape != (self._made_for[2], 1):
            raise ValueError(f"shape of a step's tokens is {tuple(tokens.shape)}; expected {(self._made_for[2], 1)}; "
                             "make a cache for each batch")
        self._check_length(self.tokens + 1)
        self._recorded = None
        self._make_room(1)
        self.end_prompt()
        self._kinds.each("prepare_step", self._like, self._marks(tokens.cpu()) if self._marks else None)
        self._prepared = True
        return tuple(self._kinds.each("actions"))

    def took_captured_step(self):
        """A replayed graph is the other part."""
        self._prepared = False
        self.tokens += 1

    def fail_step(self):
        """The other part has failed."""
        self._next_layer = None

    # --- what people ask ------------------------------------------------------------------------------------------------

    def end_prompt(self):
        """Ends a turn's prompt now, so that its figures can be seen; the first step does it otherwise."""
        if self._in_prompt:
            if self._rereads:
                rereading.read_again(self)
            self._kinds.each("end_prompt", self._like)
            self._in_prompt = self._is_cut = self._has_ended = False
            self._ended = self.tokens

    @contextlib.contextmanager
    def prompt(self, tokens=0):
        """Calls of the model within are chunks of one prompt, also those of a single token.

        tokens: how many will come, if that is known. CUDA then makes room for them once; and if they come in one call, methods that
                drop tokens do so layer by layer, so that one layer's rows are whole at a time. What comes behind them is another turn.
        """
        self._reading_prompt, self._announced, self._has_begun = True, tokens, False
        try:
            yield
        finally:
            self._reading_prompt, self._announced = False, 0

    def set_budget(self, tokens):
        """Changes the budget; it counts from the next time the method chooses what stays or what is read."""
        self.budget = changed_budget(self.budget, tokens)
        if self._kinds is not None:
            for kinds, _ in drafts.both(self):
                kinds.each("set_budget", tokens)
            self.memory_of = object()

    def fit_memory(self, tokens=256):
        """Gives PyTorch back, on a GPU, what the cache has beyond what it stores and `tokens` more of each sequence.

        Call it when a prompt has ended: the method's choice then becomes free memory. Later calls take more as they need.
        """
        if self._kinds is not None:
            for kinds, behind in drafts.both(self):
                kinds.each("fit_memory", tokens + behind)
            self._room, self.memory_of = tokens, object()

    def _figure(self, column):
        return 0 if self._kinds is None else int(self._kinds.figures()[:, column].sum())

    def bytes(self):
        """Bytes that are held for all sequences and layers, slack included."""
        return self._figure(0)

    def bytes_read(self):
        """Distinct bytes that the last step read of what is stored, over all sequences and layers."""
        return self._figure(1)

    def full_bytes(self):
        """Bytes that keys and values would take if nothing were dropped."""
        return self._figure(2)

    def kept_positions(self, layer):
        """[sequence][kv_head]: the positions that a layer stores, ascending; a sequence's first token is 0. [] of a layer without keys of
        its own."""
        if self._kinds is None or layer not in self._stored:
            return []
        rows = self._kinds.of_layer(layer).positions(layer)
        heads = len(rows) // self._made_for[2]
        return [rows[begin:begin + heads] for begin in range(0, len(rows), heads)]
