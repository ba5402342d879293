"""Before a call's first layer: whether generate can come to its end with a cache, and the library's cache behind a TesseraCache."""
import functools

import torch

from . import build, generation, rereading
from .facts import rope
from .kinds import layer_kinds
from .layers import refuse, restored, saved_states
from .rows import budgets_by_row

ROOM = 1024  # tokens behind a first prompt that there is memory for, where nobody says how many will come


def check(cache, request, q):
    """Before anything is stored: whether generate will come to its end with this cache."""
    if request.draft is not None and any(layer.reads or not layer.stores or layer.states for layer in cache.plan):
        refuse("checking drafts in a model whose layers share keys, or have states of their own,")
    if request.draft is not None:
        cache._path = cache._library(q.dtype, q.shape[-1], q.device.type)
    elif request.mode not in generation.ONE_BY_ONE:
        refuse(request.mode.value.replace("_", " "))
    if request.needs:
        raise NotImplementedError(request.needs)
    if request.longest > cache._longest:
        raise ValueError(f"tokens of the conversation may become {request.longest}; expected at most {cache._longest}; "
                         "lower max_new_tokens or raise the cache's max_length")
    if request.chunk_begins not in (None, cache.tokens):
        raise ValueError(f"a chunk of generate begins at token {request.chunk_begins} and the cache has {cache.tokens}; "
                         "expected that it goes on where the cache ends; call generate without prefill_chunk_size")


def ends_prompt(cache, request, tokens):
    """Whether a prompt's call of so many tokens is known to be its last: by what prompt() announced, or by generate."""
    if cache._reading_prompt:
        return cache._announced == tokens
    return request is not None and request.draft is None and not request.prompt_goes_on


def open_cache(cache, q, checks_drafts, is_last, request):
    """What the library's caches are made of, for a batch of q's type; each is opened when a layer of its kind shows its shape.

    is_last: the call is all of the first prompt, and the method drops tokens layer by layer: then CUDA takes memory for one whole layer
    and for what stays, and fit_memory takes more when the room is used up."""
    batch, _, tokens, _ = q.shape
    fact = functools.partial(cache._operators.fact, str(cache._path))
    name = cache.method if isinstance(cache.method, str) else "a policy of one's own"
    if fact("takes_scores"):
        raise ValueError(f"method is {name!r}; expected one that scores tokens by itself, as a cache of transformers sees no hidden "
                         "states, from which a gate scores; take another method, or any_cache::set_scores of the C++ library")
    if fact("turns_queries") and not cache._sees_text_alone:
        rope.check_places(cache._text_config)
    kinds = layer_kinds.Kinds.of(cache.plan, cache._text_config, fact("turns_queries"),
                                 cache._devices or [q.device] * cache.layer_count)
    check_layers(cache.plan, kinds, name, fact)
    cache._rereads = fact("rereads")
    if cache._rereads and cache._repeated is None:
        raise ValueError(rereading.NO_TEXT)
    longest = cache._longest + (cache._repeated.longest if cache._rereads else 0)
    budget, budgets, shares = budgets_by_row(cache.budget, batch, longest)
    first, answer, most = 0, 0, generation.STEP_TOKENS
    if is_last:
        first, answer = tokens, min(ROOM if request is None else max(request.longest - tokens, 0), longest - tokens)
    on_cuda = any(kind.device.type == "cuda" for kind in kinds.all)
    if on_cuda and cache._draft_tokens is not None:
        most = 1 + cache._draft_tokens
    elif on_cuda and not checks_drafts:
        most = 1
    cache._request = layer_kinds.Request(longest, budget, budgets, shares, cache.settings, cache._profile, most, first, answer)
    cache._made_for = (q.dtype, q.device, batch)
    cache._like = torch.empty((0, 1, 1), dtype=q.dtype, device=q.device)
    cache._own(kinds)
    cache._step_tokens, cache._room = most, first + answer if is_last else None


def check_step(cache, tokens, rows):
    """Whether a call can be a step of so many tokens."""
    if tokens > cache._step_tokens:
        raise ValueError(f"tokens of a step are {tokens}; expected at most {cache._step_tokens}; make the cache with "
                         f"draft_tokens={tokens - 1}, at most {generation.STEP_TOKENS - 1}")
    if 0 in rows.last:
        raise ValueError("a step's token is masked; expected one token of every sequence; pad prompts, not answers")


def check_layers(plan, kinds, name, fact):
    """Whether a method can work in a model's layers. Errors: ValueError where it would mix what it must not."""
    if len(kinds.choosing) > 1 and fact("looks_over_layers"):
        raise ValueError(f"method is {name!r}, which looks over all layers; expected one that chooses layer by layer, as layers of the "
                         "model are on several devices, have rows of several shapes, or queries that turn in several ways; take another "
                         "method")
    others = "read the keys of another" if any(layer.reads for layer in plan) else "have states of their own"
    if any(layer.reads or layer.states for layer in plan) and fact("rereads"):
        raise ValueError(f"method is {name!r}, which passes prompts through the model once more; expected another one, as some layers "
                         f"of the model {others}; take another method")
    if any(layer.reads for layer in plan) and fact("adds_up"):
        raise ValueError(f"method is {name!r}, whose steps add up queries or values; expected another one, as some layers of the model "
                         f"{others}; take another method")


# What belongs to a process, a model or a call, and is made anew where a cache is loaded.
UNSAVED = {"_operators", "_path", "_like", "layers", "memory_of", "_model", "_marks", "_repeated", "_rows", "_flags", "_text",
           "_again", "_rehearsal", "_recorded"}


def saved_state(cache):
    """A cache for pickle, between two calls of the model. Errors: ValueError in the middle of a call, or before its prompt has ended."""
    if cache._next_layer != 0 or cache._prepared:
        raise ValueError("the cache is half way through a call; expected one between two calls; save it behind the call")
    if cache._in_prompt:
        raise ValueError("the prompt has not ended; expected an ended one; call end_prompt() before the cache is saved")
    state = {name: value for name, value in cache.__dict__.items() if name not in UNSAVED}
    return {**state, "states": saved_states(cache.layers)}


def restore(cache, state):
    """Makes a new object the cache that `saved_state` was called for. Errors: ValueError for bytes of another library or recipe."""
    states = state.pop("states")
    cache.__dict__.update(dict.fromkeys(UNSAVED), **state)
    cache.layers, cache._operators = restored(cache, states), build.operators()
    cache.memory_of = None
    if cache._kinds is None:
        return
    dtype, device, _ = cache._made_for
    cache._like = torch.empty((0, 1, 1), dtype=dtype, device=device)
    cache._kinds.load(cache)
    cache._path = cache._kinds.all[0].path(cache)
    if cache._room is not None:  # memory was made for less than max_length
        cache._kinds.each("fit_memory", cache._room)
