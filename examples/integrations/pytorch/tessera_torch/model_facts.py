"""What methods must know of a model besides its shape: how RoPE turns, where sentences end, what was calibrated for its heads."""
import json
import os
import pathlib

import torch
from transformers import PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

DELIMITERS = tuple(".,;:!?\n\r\u3002\uff0c\uff1b\uff1a\uff01\uff1f\u3001")
STEADY = ("linear", "llama3", "yarn")  # kinds of RoPE whose speeds do not change with the length of the text


def rope_frequencies(config, dim):
    """Radians per position of each pair of elements, [dim / 2]; none where the library cannot express how the model turns.

    config: of the model's text part. Layers that slide may turn otherwise: methods choose in the others.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = {} if "full_attention" not in rope else {"layer_type": "full_attention"}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if theta is None or part not in (None, 1, 1.0):
        return []
    if kind == "default":
        return [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if kind not in STEADY:
        return []
    speeds = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **by_layer)[0].tolist()
    return speeds if len(speeds) == dim // 2 else []


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


def sliding_of(config):
    """The window of sliding layers, and which layers slide."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # Mistral of transformers 4: all of them or none
        return (window, list(range(config.num_hidden_layers))) if window else (0, [])
    strange = set(kinds) - {"full_attention", "sliding_attention"}
    if strange:
        raise ValueError(f"layer type is {sorted(strange)[0]}; expected full_attention or sliding_attention; "
                         "the library expresses no other")
    return window or 0, [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
