"""Drafts of assisted generation and of prompt lookup: calls that check one, and tokens that are taken back."""
import weakref

import torch

from .generation import STEP_TOKENS


def longest_step(cache):
    """Tokens of a step that checks a draft. Tokens of one step share a choice of what it reads or of what stays: then they go alone."""
    return 1 if cache._operators.fact(str(cache._path), "retrieves") or not cache.takes_back else STEP_TOKENS


def is_step(cache, draft, tokens):
    """Whether a call that checks a draft can be one step: a token behind what is stored, and the draft."""
    return cache.tokens > 0 and not cache._is_cut and tokens == draft.tokens + 1 and tokens <= longest_step(cache)


def both(cache):
    """The cache's kinds and 0; and those of the copy from before a draft that is not judged yet, and how many columns it is behind."""
    copy = cache._recorded
    return [(cache._kinds, 0)] + ([] if copy is None else [(copy.kinds, cache.tokens - copy.begin)])


def crop(cache, removed):
    """Takes back the newest `removed` columns of the batch."""
    recorded = cache._recorded
    if removed > 0 and any(layer.states for layer in cache.plan):
        raise ValueError(f"tokens to take back are {removed}; expected 0: layers of the model have states of their own, which go on alone; "
                         "call reset(), or keep a copy.deepcopy of the cache to go back to")
    if removed == 0 or cache._kinds is None:
        cache._recorded = None
        return
    if cache._next_layer != 0:
        raise ValueError("the cache is half way through a call that failed; expected the end of that call; call reset() and give it "
                         "the conversation again")
    left = cache.tokens - removed
    if left < 0:
        raise ValueError(f"tokens to take back are {removed}; expected at most {cache.tokens}; call reset() for an empty cache")
    padding = cache._padding
    known = 0 if padding is None else padding.shape[1]
    if recorded is not None and recorded.begin <= left:
        cache._recorded = None
        recorded.go_back(left - recorded.begin)
        _note(cache, left, removed)
        return
    empty = (~padding[:, left:]).sum(-1).tolist() if left < known else [0] * cache.sequences
    counts = [removed - columns for columns in empty]
    prompt_is_gone = cache._in_prompt and left == cache._began
    cache._kinds.each("crop", cache._like, counts, prompt_is_gone)
    if cache._in_prompt:
        for text, count in zip(cache._turn or (), counts):
            del text[max(0, len(text) - count):]
        cache._in_prompt = not prompt_is_gone
    else:
        cache._is_cut = cache._is_cut or left < cache._ended
    _note(cache, left, removed)


def _note(cache, left, removed):
    """The cache has `left` columns, `removed` fewer than before."""
    if cache._padding is not None:
        cache._padding = cache._padding[:, :left]
    cache.tokens = left
    if cache._room is not None:
        cache._room += removed


class Recorded:
    """The steps of a draft under a method that chooses in every step: what they drop cannot be brought back. So a copy of the cache
    waits from before them, and q, k and v of every step. go_back puts the copy in the cache's place and takes the accepted steps once
    more, without the model: the bits of a cache that never had the draft. Memory: the cache's once more, until the draft is judged."""

    def __init__(self, cache):
        self.kinds = cache._kinds.clone()
        self._cache, self._steps = weakref.proxy(cache), []  # of each step what its tokens end, and rows by layer
        self.begin = cache.tokens

    def note(self, layer, flags, *rows):
        if layer == 0:
            self._steps.append((flags, []))
        self._steps[-1][1].append(rows)

    def go_back(self, accepted):
        cache, kinds, like = self._cache, self.kinds, self._cache._like
        cache._kinds.free()
        cache._own(kinds)
        try:
            for flags, layers in self._steps[:accepted]:
                kinds.each("prepare_step", like, flags)
                kinds.each("begin_step", like)
                for layer, rows in enumerate(layers):
                    kinds.of_layer(layer).step(layer, *rows)
        except BaseException:
            cache.fail_step()  # some of the accepted tokens are stored
            raise


class Rehearsal:
    """A call that checks a draft and cannot be one step: a prompt with a draft behind it, or a long draft.

    It runs in parts, as calls of the model within the call: the prompt, which then ends, and steps. The call itself gives what they
    gave; of the prompt, its last token's. So a prompt that comes with a draft is computed twice. Where a method chooses in every step
    the draft's are recorded.
    """

    def __init__(self, cache):
        self._cache, self._given = cache, [[] for _ in range(cache.layer_count)]
        self.runs = True        # the parts do
        self.is_step = False    # the part that runs is one
        self._wanted = 0        # columns of it whose results count

    def run(self, draft, tokens):
        cache, given, stored = self._cache, draft.inputs, self._cache.tokens
        known = max(0, stored + tokens - draft.columns)  # transformers 5 hands over once more what a cache has that was filled before
        has_prompt = stored == 0 or cache._is_cut or tokens - known > draft.tokens + 1
        ends = [known, tokens - draft.tokens] if has_prompt else [known]
        most = longest_step(cache)
        while ends[-1] < tokens:
            ends.append(min(tokens, ends[-1] + most))
        text, model = cache._text, draft.model
        name = next(key for key in ("cache", "past_key_values") if key in given)
        try:
            for first, last in zip(ends, ends[1:]):
                self.is_step = first > known or not has_prompt
                if cache._recorded is None and first >= tokens - draft.tokens and not cache.takes_back:
                    cache.end_prompt()
                    cache._recorded = Recorded(cache)
                self._wanted = last - first if self.is_step else 1
                cache._text = None if text is None else text[:, first:last]
                columns = {key: given[key][:, first:last] for key in ("input_ids", "inputs_embeds", "position_ids")
                           if given.get(key) is not None}
                if given.get("attention_mask") is not None:
                    columns["attention_mask"] = given["attention_mask"][:, :stored + last - known]
                model.base_model(**columns, use_cache=True, **{name: cache})
        except BaseException:
            cache._rehearsal = cache._recorded = None
            if cache.tokens > stored:
                cache.fail_step()  # a part is stored
            raise
        self.runs = False

    def note(self, layer, out):
        """What a part gave in this layer."""
        self._given[layer].append(out[:, -self._wanted:])

    def reply(self, layer, q):
        """[batch, tokens, heads, dim]: what the call gives in this layer. Columns that no part was asked for matter to nobody."""
        parts = torch.cat(self._given[layer], dim=1)
        out = parts.new_zeros((q.shape[0], q.shape[2], *parts.shape[2:]))
        out[:, -parts.shape[1]:] = parts
        self._cache._next_layer = (layer + 1) % self._cache.layer_count
        if self._cache._next_layer == 0:
            self._cache._rehearsal = None
        return out
