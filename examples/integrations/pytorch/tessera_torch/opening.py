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
        cache._path = build.library(cache.method, q.dtype, q.shape[-1], q.device.type)
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
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        handle = operators.create(path, cache.layer_count, q_heads, k.shape[1], cache.sliding_layers, cache.window, scaling or 0.0,
                                  softcap or 0.0, budget, cache.settings, batch, longest, cache._sinks, q.device, speeds,
                                  cache._profile, most, budgets, shares, first, answer)
    cache._own(handle)
    cache._step_tokens, cache._room = most, first + answer if is_last else None
    cache._made_for, cache._like = (q.dtype, q.device, batch), q.new_empty((0, 1, 1))
