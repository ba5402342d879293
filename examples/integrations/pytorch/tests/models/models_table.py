"""The outcomes of every architecture as a section of MODELS.md."""
import collections
import re

import transformers

HEAD = """# Which models are right

Tiny random models of every causal architecture that transformers has, fp32, on the CPU. **Right** is: `full`, and `snapkv` and
`expected_attention` with a budget for everything, give eager attention's logits in prompt and steps; with a quarter of the tokens, the kept
positions are a double oracle's and steps are eager attention masked to them. All others are refused in a sentence before anything is
stored. `tests/models` has the tests, and writes this page: `pytest tests/models --models-table MODELS.md`, once with each transformers.
"""


def section(outcomes):
    right = [kind for kind, outcome in outcomes.items() if set(outcome.values()) == {"right"}]
    lines = [f"\n## transformers {transformers.__version__}\n", f"Right with all three, {len(right)} architectures: {_names(right)}.\n"]
    for title, key in (("Right but for `expected_attention`", "expected_attention"), ("Refused", "model"),
                              ("Without a cache", "no cache"),
                              ("No tiny model can be made", "not made")):
        by_sentence = collections.defaultdict(list)
        for kind, outcome in outcomes.items():
            if outcome.get(key, "right") != "right":
                by_sentence[_general(outcome[key], kind)].append(kind)
        if by_sentence:
            lines += [f"| {title}: {sum(map(len, by_sentence.values()))} | why |", "| --- | --- |"]
            lines += [f"| {_names(kinds)} | {sentence} |" for sentence, kinds in by_sentence.items()] + [""]
    return "\n".join(lines)


def _names(kinds):
    return ", ".join(f"`{kind}`" for kind in sorted(kinds))


def _general(sentence, kind):
    """The same for several architectures."""
    sentence = re.sub(r"of the architecture '[^']*'", "of the architecture", sentence).split("; expected")[0]
    return sentence.replace("|", "or")


def write(path, text):
    """Puts a section in the place of the version's own, newer versions first."""
    old = path.read_text(encoding="utf-8") if path.exists() else HEAD
    parts = [part for part in re.split(r"(?=\n## transformers )", old)[1:]
             if not part.startswith(f"\n## transformers {transformers.__version__}\n")]
    path.write_text(HEAD + "".join(sorted([*parts, text], reverse=True)).rstrip() + "\n", encoding="utf-8")
