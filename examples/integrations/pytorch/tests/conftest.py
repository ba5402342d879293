"""The shipped model, its tokenizer, and documents with questions: what the tests and the tool are both asked."""
import json
import pathlib
import random
import sys

import pytest
import sentencepiece
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[3]
MODEL = ROOT / "examples" / "model"
sys.path.insert(0, str(HERE.parent))
transformers.logging.set_verbosity_error()

import tessera_torch  # noqa: E402, F401  registers the attention "tessera"

TASKS = json.loads((ROOT / "examples" / "data" / "tasks.json").read_text())
LINES = (ROOT / "examples" / "data" / "opticks.txt").read_text().split("\n")


@pytest.fixture(scope="session")
def tokenizer():
    return sentencepiece.SentencePieceProcessor(model_file=str(MODEL / "tokenizer.model"))


@pytest.fixture(scope="session")
def reference():
    """The shipped model with transformers' own attention and cache, fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def model():
    """The same with Tessera's attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="tessera").eval()


def document(rng, needles, lines):
    """Lines of the text with needles at random places, and the needles: [(name, value)]."""
    names = rng.sample([f"{a} {n}" for a in TASKS["adjectives"] for n in TASKS["nouns"]], needles)
    words = rng.sample(range(len(TASKS["words"]) - 1), needles)
    values = [" ".join(TASKS["words"][first:first + TASKS["value_words"]]) for first in words]
    begin = rng.randrange(1000, len(LINES) - lines)
    text = LINES[begin:begin + lines]
    for name, value in zip(names, values):
        text.insert(rng.randrange(len(text)), TASKS["needle"].format(name=name, value=value))
    return "\n".join(text) + "\n", list(zip(names, values))


def question(name):
    return TASKS["question"].format(question=TASKS["ask_one"].format(name=name)) + TASKS["answer"]


@pytest.fixture(scope="session")
def conversations():
    """60 conversations as `tessera eval --questions` reads them: one needle, eight, and three turns about eight."""
    rng = random.Random(16)
    made = []
    for family, needles, turns in (("single", 1, 1), ("multi_key", 8, 1), ("conversation", 8, 3)):
        for _ in range(20):
            text, hidden = document(rng, needles, 36)
            asked = rng.sample(hidden, turns)
            prompts = [(text if i == 0 else "\n") + question(name) for i, (name, _) in enumerate(asked)]
            made.append({"family": family, "turns": [{"prompt": p, "answer": v} for p, (_, v) in zip(prompts, asked)]})
    return made


@pytest.fixture(scope="session")
def prompts(tokenizer):
    """50 prompts of 40 to 400 tokens; half of them ask."""
    rng = random.Random(7)
    made = []
    for i in range(50):
        text, hidden = document(rng, 3, rng.randrange(4, 30))
        made.append([1] + tokenizer.encode(text + (question(hidden[0][0]) if i % 2 else "")))
    return made


def padded(rows, side="left"):
    """input_ids and attention_mask of a batch; padding is token 0."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}
