"""Layers of one kind share one cache of the library: on one device, rows of one shape, one window, and queries that turn alike where a
method asks."""
import contextlib
import dataclasses
import weakref

import torch

from .. import build
from ..facts import rope
from . import rotation


@dataclasses.dataclass
class Request:
    """What all kinds of a batch are made of, by the names of the operator `create`."""
    longest: int
    budget: int | None
    budgets: list
    shares: list
    settings: list
    profile: list
    step_tokens: int
    first: int  # tokens of a first prompt that comes whole
    answer: int  # and behind it


class Kind:
    """One cache of the library. layers: those of the model, by their numbers; window: of those in `sliding`; turn: how RoPE turns
    their queries, a rope.Turn, where the method asks for it; device: where their rows are."""

    def __init__(self, layers, sliding, window, turn, device):
        self.layers, self.sliding, self.window, self.turn, self.device = layers, sliding, window, turn, device
        self.handle = self._free = self._made_of = None

    def index(self, layer):
        return self.layers.index(layer)

    def check_device(self, layer, *rows):
        """Errors: ValueError for rows on another device than the layer's."""
        for x in rows:
            if x.device != self.device:
                raise ValueError(f"device of layer {layer} is {x.device}; expected {self.device}, where the cache has it; make the cache "
                                 "with devices=layer_devices(model) where layers of the model are on several devices")

    def open(self, cache, q, k, v, scaling, softcap, sinks):
        """Makes the library's cache for rows of these shapes, behind a TesseraCache."""
        q_heads, dim, v_dim = q.shape[1], q.shape[-1], v.shape[-1]
        self.scale, self.softcap, self._dims = scaling or dim ** -0.5, softcap or 0.0, (dim, v_dim)
        # A logit of minus infinity is no sink: so are those of layers without one.
        self.sinks = None if sinks is None else torch.full((len(self.layers), q_heads), -torch.inf, device=self.device)
        speeds = [] if self.turn is None else self.turn.speeds_of(dim)
        order = None if self.turn is None else self.turn.order_of(dim)
        self.order = None if order is None else order.to(self.device)
        # Queries and keys turn by the one, values and, back again, outputs by the other.
        self._rotations = None if cache._rotate == "none" else tuple(rotation.hadamard(of, self.device) for of in (dim, v_dim))
        sliding = [self.index(layer) for layer in self.sliding]
        request = cache._request
        self._made_of = [len(self.layers), q_heads, k.shape[1], sliding, self.window, self.scale, self.softcap, request.budget,
                         self._settings(request.settings, cache._stored), q.shape[0], request.longest, self.sinks, self.device,
                         speeds, request.profile,
                         request.step_tokens, request.budgets, request.shares]
        self._create(cache, request.first, request.answer)

    def _settings(self, given, stored):
        """The method's parameters. `dense_layers` counts the model's first layers: of these the kind has some, its own first ones."""
        words = list(given)
        for place in range(0, len(words), 2):
            if words[place] == "dense_layers" and words[place + 1].isdigit():
                words[place + 1] = str(len({*self.layers} & {*stored[:int(words[place + 1])]}))
        return words

    def path(self, cache):
        """The method's library for rows of this shape."""
        return cache._library(cache._made_for[0], self._dims[0], self.device.type, self._dims[1])

    def _create(self, cache, first=0, answer=0):
        """The library's cache, by what `open` noted."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            self.own(build.operators().create(str(self.path(cache)), *self._made_of, first, answer))

    def own(self, handle):
        self.handle = handle
        self._free = weakref.finalize(self, build.operators().destroy, handle.item())

    def free(self):
        if self._free is not None:
            self._free()

    def clone(self):
        twin = object.__new__(Kind)
        twin.__dict__.update(self.__dict__, handle=None, _free=None)
        if self.handle is not None:
            twin.own(build.operators().clone(self.handle))
        return twin

    def __getstate__(self):
        saved = None if self.handle is None else build.operators().save(self.handle)
        return {**self.__dict__, "handle": None, "_free": None, "saved": saved}

    def load(self, cache):
        """After unpickling: the sequences as they were. Errors: ValueError for bytes of another library or recipe."""
        saved = self.__dict__.pop("saved")
        self._create(cache)
        build.operators().load(self.handle, saved)

    def queries(self, q, scaling, softcap):
        """Queries as the cache takes them: its scale is its first layer's, and pairs of RoPE are halves of a head."""
        scale = scaling or q.shape[-1] ** -0.5
        if (softcap or 0.0) != self.softcap:
            raise ValueError(f"soft cap of a layer is {softcap}; expected {self.softcap}, that of the first layer of its kind; "
                             "use transformers' own cache for this model")
        q = q if scale == self.scale else q * (scale / self.scale)
        return self.keys(q)

    def keys(self, k):
        k = k if self.order is None else k[..., self.order]
        return k if self._rotations is None else rotation.rotated(k, self._rotations[0])

    def values(self, v):
        """Values as the cache takes them. The matrix is its own inverse: so are outputs as the model takes them."""
        return v if self._rotations is None else rotation.rotated(v, self._rotations[1])

    outputs = values

    def prompt(self, layer, q, k, v, rows, flags, is_last):
        """A layer of a chunk of a prompt; rows: which of its tokens are real."""
        q, k, v = map(rows.forward, (q, k, v))
        out = build.operators().prompt(self.handle, self.index(layer), q, k, v, rows.first, rows.last, flags, is_last)
        return self.outputs(rows.back(out))

    def step(self, layer, q, k, v):
        return self.outputs(build.operators().step(self.handle, self.index(layer), q, k, v))

    def reread(self, layer, q, k, v, scaling, softcap, parts):
        q, k, v = self.queries(q, scaling, softcap), self.keys(k), self.values(v)
        return self.outputs(build.operators().reread(self.handle, self.index(layer), q, k, v, *parts))

    def prompt_again(self, layer, q, rows):
        """Other queries over a layer's rows, in the call that stored the newest of them."""
        rows = rows.newest(q.shape[2])
        out = build.operators().attend_prompt(self.handle, self.index(layer), rows.forward(q), rows.first, rows.last)
        return self.outputs(rows.back(out))

    def step_again(self, layer, q):
        return self.outputs(build.operators().attend_step(self.handle, self.index(layer), q))

    def positions(self, layer):
        return build.operators().positions(self.handle, self.index(layer))

    def note_sinks(self, layer, sinks):
        """Before a layer stores its first rows."""
        if sinks is None:
            return
        if self.sinks is None:
            raise ValueError(f"layer {layer} has sink logits; expected none: the first layer of its kind has none; "
                             "use transformers' own cache for this model")
        self.sinks[self.index(layer)].copy_(sinks)


class Kinds:
    """All of them, as one cache. Operators go to every kind; those of one layer to the layer's."""

    def __init__(self, kinds):
        self.all = kinds

    @classmethod
    def of(cls, plan, config, turns_queries, devices):
        """By the layers' facts. turns_queries: whether the method does; devices: one for each layer. Errors: ValueError where it is not
        known how queries turn."""
        kinds, stored = {}, [(number, layer) for number, layer in enumerate(plan) if layer.stores]
        windows = {layer.window for _, layer in stored if layer.window}
        for number, layer in stored:
            turn = rope.turn_of(config, number) if turns_queries and not layer.window else None
            alike = devices[number], layer.shape, layer.window if len(windows) > 1 else 0
            kinds.setdefault(alike, {}).setdefault(turn, []).append(number)
        result = []
        for (device, *_), by_turn in kinds.items():
            free = by_turn.pop(None, [])  # layers that slide choose nothing: they go with any
            first = next(iter(by_turn), rope.Turn() if turns_queries else None)
            by_turn[first] = sorted(by_turn.get(first, []) + free)
            for turn, layers in by_turn.items():
                sliding = [number for number in layers if plan[number].window]
                result.append(Kind(layers, sliding, plan[sliding[0]].window if sliding else 0, turn, device))
        return cls(result)

    @property
    def choosing(self):
        """Kinds with a layer in which a method may choose."""
        return [kind for kind in self.all if len(kind.sliding) < len(kind.layers)]

    def of_layer(self, layer):
        return next(kind for kind in self.all if layer in kind.layers)

    def clone(self):
        return Kinds([kind.clone() for kind in self.all])

    def free(self):
        for kind in self.all:
            kind.free()

    def load(self, cache):
        for kind in self.all:
            kind.load(cache)

    def each(self, operator, *arguments):
        """What an operator answers for each kind that is open."""
        return [getattr(build.operators(), operator)(kind.handle, *arguments) for kind in self.all if kind.handle is not None]

    def figures(self):
        """[sequences, 4]: bytes held, bytes read by the last step, bytes of an uncompressed cache, the next position."""
        every = torch.stack(self.each("figures"))
        return torch.cat([every[..., :3].sum(0), every[0, :, 3:]], 1)

