"""Before a call's first layer: whether generate can come to its end with a cache, and the library's cache behind a TesseraCache."""
import contextlib

import torch

from . import build, generation, rereading
from .facts import rope
from .layers import refuse
from .rows import budgets_by_row

ROOM = 1024  # tokens behind a first prompt that there is memory for, where nobody says how many will come


def check(cache, request, q):
    """Before anything is stored: whether generate will come to its end with this cache."""
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


def open_cache(cache, q, k, scaling, softcap, sinks, checks_drafts, is_last, request):
    """The library's cache for a batch of these shapes. is_last: the call is all of the first prompt, and the method drops tokens layer
    by layer: then CUDA takes memory for one whole layer and for what stays, and fit_memory takes more when the room is used up."""
    batch, q_heads, tokens, dim = q.shape
    if sinks is not None:
        cache._sinks = torch.zeros(cache.layer_count, q_heads, device=q.device)
    path, operators = str(cache._path), cache._operators
    if operators.fact(path, "takes_scores"):
        name = cache.method if isinstance(cache.method, str) else "a policy of one's own"
        raise ValueError(f"method is {name!r}; expected one that scores tokens by itself, as a cache of transformers sees no hidden "
                         "states, from which a gate scores; take another method, or any_cache::set_scores of the C++ library")
    cache._rereads = operators.fact(path, "rereads")
    if cache._rereads and cache._repeated is None:
        raise ValueError(rereading.NO_TEXT)
    longest = cache._longest + (cache._repeated.longest if cache._rereads else 0)
    budget, budgets, shares = budgets_by_row(cache.budget, batch, longest)
    first, answer, most = 0, 0, generation.STEP_TOKENS
    if is_last:
        first, answer = tokens, min(ROOM if request is None else max(request.longest - tokens, 0), longest - tokens)
    if q.is_cuda and cache._draft_tokens is not None:
        most = 1 + cache._draft_tokens
    elif q.is_cuda and not checks_drafts:
        most = 1
    speeds = rope.speeds(cache._text_config, dim) if operators.fact(path, "turns_queries") else []
    cache._made_of = [cache.layer_count, q_heads, k.shape[1], cache.sliding_layers, cache.window, scaling or 0.0, softcap or 0.0, budget,
                      cache.settings, batch, longest, cache._sinks, q.device, speeds, cache._profile, most, budgets, shares]
    cache._made_for, cache._dim = (q.dtype, q.device, batch), dim
    create(cache, first, answer)
    cache._step_tokens, cache._room = most, first + answer if is_last else None


def create(cache, first=0, answer=0):
    """The library's cache, by what `open_cache` noted. first, answer: tokens of a first prompt that comes whole, and behind it."""
    dtype, device, _ = cache._made_for
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        cache._own(cache._operators.create(str(cache._path), *cache._made_of, first, answer))
    cache._like = torch.empty((0, 1, 1), dtype=dtype, device=device)


# What belongs to a process, a model or a call, and is made anew where a cache is loaded.
UNSAVED = {"_operators", "_handle", "_free", "_path", "_like", "layers", "memory_of", "_model", "_marks", "_repeated", "_rows", "_flags", "_text",
           "_again", "_rehearsal", "_recorded"}


def saved_state(cache):
    """A cache for pickle, between two calls of the model. Errors: ValueError in the middle of a call, or before its prompt has ended."""
    if cache._next_layer != 0 or cache._prepared:
        raise ValueError("the cache is half way through a call; expected one between two calls; save it behind the call")
    if cache._in_prompt:
        raise ValueError("the prompt has not ended; expected an ended one; call end_prompt() before the cache is saved")
    state = {name: value for name, value in cache.__dict__.items() if name not in UNSAVED}
    state["sequences"] = None if cache._handle is None else cache._operators.save(cache._handle)
    return state


def restore(cache, state):
    """Makes a new object the cache that `saved_state` was called for. Errors: ValueError for bytes of another library or recipe."""
    sequences = state.pop("sequences")
    cache.__dict__.update(dict.fromkeys(UNSAVED), **state)
    cache.layers, cache._operators = cache._layers(), build.operators()
    cache.memory_of = None
    if sequences is None:
        return
    dtype, device, _ = cache._made_for
    cache._path = cache._library(dtype, cache._dim, device.type)
    create(cache)
    cache._operators.load(cache._handle, sequences)
    if cache._room is not None:  # memory was made for less than max_length
        cache._operators.fit_memory(cache._handle, cache._room)
