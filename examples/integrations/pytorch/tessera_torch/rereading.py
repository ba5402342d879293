"""Prompts that pass through the model once more before they end (kvzip)."""
import torch

from .generation import cache_keyword

NO_TEXT = ("text of the prompt is not known; expected it, as the method reads prompts again before they end; "
           "call read_text(model, tokenizer) on the cache, and the model with input_ids")


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
