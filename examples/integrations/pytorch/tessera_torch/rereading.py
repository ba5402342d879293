"""The text of a cache's calls, and prompts that pass through the model once more before they end (kvzip)."""
import weakref

import torch

from .facts import model_facts
from .generation import cache_keyword

NO_TEXT = ("text of the prompt is not known; expected it, as the method reads prompts again before they end; "
           "call read_text(model, tokenizer) on the cache, and the model with input_ids")


def follow_text(cache, model, tokenizer):
    """From now on the cache looks at the input_ids of calls of this model."""
    if cache._marks is None:
        cache._marks, cache._repeated = model_facts.SegmentEnds(tokenizer), model_facts.Repeated(tokenizer)
    cache._model = weakref.ref(model)
    owner = weakref.ref(cache)

    def look(_, arguments, named):
        cache = owner()
        if cache is None:
            hook.remove()
        elif cache in (named.get("cache"), named.get("past_key_values")) and not cache._prepared:
            cache._text = named.get("input_ids", arguments[0] if arguments else None)

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    weakref.finalize(cache, hook.remove)


def take_text(cache, rows, shape):
    """The call's tokens as `rows` has them, [batch, tokens]; None where the text is not known."""
    tokens, cache._text = cache._text, None
    if tokens is None or tuple(tokens.shape) != shape:
        return None
    tokens = tokens.cpu()
    return tokens if rows.order is None else tokens.gather(1, rows.order.cpu())


def note_turn(cache, text, rows):
    """The tokens of a chunk, by sequence."""
    if text is None:
        raise ValueError(NO_TEXT)
    if not cache._in_prompt:
        cache._turn = [[] for _ in rows.first]
    for tokens, row, first, last in zip(cache._turn, text.tolist(), rows.first, rows.last):
        tokens += row[first:last]


@torch.no_grad()
def read_again(cache):
    """This turn's prompts pass through the model once more, in parts, behind themselves; nothing of it stays."""
    ends = cache._kinds.figures()[:, 3].tolist()
    parts = [cache._repeated(tokens) for tokens in cache._turn]
    for i in range(max(map(len, parts))):
        now = [of[i] if i < len(of) else (0, 0, []) for of in parts]
        longest = max(len(text) for *_, text in now)
        if cache._room is not None:
            cache._kinds.each("fit_memory", longest)
        ids = torch.tensor([text + [0] * (longest - len(text)) for *_, text in now], device=cache._like.device)
        place = torch.tensor(ends, device=ids.device)[:, None] + torch.arange(longest, device=ids.device)
        begins = [end - len(tokens) + done for end, tokens, (done, *_) in zip(ends, cache._turn, now)]
        cache._again = begins, [count for _, count, _ in now], [len(text) for *_, text in now]
        try:
            model = cache._model().base_model
            model(input_ids=ids, position_ids=place, use_cache=True, **{cache_keyword(model): cache})
        finally:
            cache._again = None
    if cache._room is not None:
        cache._kinds.each("fit_memory", cache._room)
