"""What methods must know of a model besides its shape: kinds of layers, ends of sentences, what was calibrated for its heads."""
import json
import os
import pathlib

import torch
from transformers import PreTrainedTokenizerBase

DELIMITERS = tuple(".,;:!?\n\r\u3002\uff0c\uff1b\uff1a\uff01\uff1f\u3001")


def profile_table(profile):
    """The numbers of a profile, by layer and kv_head, in one list; none without a profile."""
    if profile is None:
        return []
    if isinstance(profile, (str, os.PathLike)):
        profile = json.loads(pathlib.Path(profile).read_text(encoding="utf-8"))
    if isinstance(profile, dict):
        names = [name for name in ("gates", "budget") if name in profile]
        if not names:
            raise ValueError(f"profile has {', '.join(profile) or 'nothing'}; expected gates or budget; "
                             "make one with `tessera heads` or `tessera calibrate`")
        profile = profile[names[0]]
    return [float(number) for layer in profile for number in layer]


class Repeated:
    """A prompt once more, in parts, as kvpress and the tool say it to a model."""

    PART, WORDS = 2048, 8  # tokens of a part, and of the words of the part before with which a later one begins

    def __init__(self, tokenizer):
        alone = {"add_special_tokens": False} if isinstance(tokenizer, PreTrainedTokenizerBase) else {}
        encode = lambda text: list(tokenizer.encode(text, **alone))
        self._first = encode("\n\nRepeat the previous context exactly.")
        self._next = encode("\n\nRepeat the part of the previous context exactly, starting with")
        self._behind = encode("\n")

    @property
    def longest(self):
        """Tokens of the longest part with what stands before it."""
        return self.PART + self.WORDS + max(len(self._first), len(self._next)) + len(self._behind)

    def __call__(self, prompt):
        """[(where the part begins in the prompt, how many tokens it has, the text to read)]."""
        parts = []
        for done in range(0, len(prompt), self.PART):
            part = prompt[done:done + self.PART]
            words = prompt[max(0, done - self.WORDS):done]
            parts.append((done, len(part), (self._next if done else self._first) + words + self._behind + part))
        return parts


class SegmentEnds:
    """Which tokens of a text end a segment: those whose text ends with a delimiter that no other one follows."""

    def __init__(self, tokenizer):
        self._tokenizer, self._known = tokenizer, {}

    def _kind(self, token):
        """Whether its text ends with a delimiter, and whether it is nothing else."""
        if token not in self._known:
            text = self._tokenizer.decode([token]).rstrip(" \t")
            ends = text.endswith(DELIMITERS)
            self._known[token] = ends, ends and not text.strip(" \t" + "".join(DELIMITERS))
        return self._known[token]

    def __call__(self, tokens):
        """tokens [batch, tokens] -> flags of torch.uint8, of the same shape."""
        flags = torch.zeros(tokens.shape, dtype=torch.uint8)
        for row, kinds in zip(flags, ([self._kind(token) for token in row] for row in tokens.tolist())):
            for i, (ends, _) in enumerate(kinds):
                row[i] = ends and not (i + 1 < len(kinds) and kinds[i + 1][1])
        return flags
