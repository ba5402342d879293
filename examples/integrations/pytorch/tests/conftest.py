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

import tessera_torch  # noqa: E402  registers the attention "tessera"

TASKS = json.loads((ROOT / "examples" / "data" / "tasks.json").read_text())
LINES = (ROOT / "examples" / "data" / "opticks.txt").read_text().split("\n")


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true",
                     help="all 50 prompts and 60 conversations against transformers and the tool, where a few are the default")
    parser.addoption("--models-table", help="the page of tests/models, whose section for this transformers is written anew")
    parser.addoption("--methods", help="of the tests that run for every method, only those for METHOD,METHOD,...")


def pytest_generate_tests(metafunc):
    if "method" not in metafunc.fixturenames or any(
            "method" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return
    named = metafunc.config.getoption("methods")
    methods = tessera_torch.methods()
    unknown = set(named.split(",")) - set(methods) if named else None
    if unknown:
        raise pytest.UsageError(f"--methods names {sorted(unknown)[0]}; expected some of {', '.join(methods)}")
    metafunc.parametrize("method", named.split(",") if named else methods)


@pytest.fixture(scope="session")
def whole(request):
    """Whether bars are tested at their whole size."""
    return request.config.getoption("whole")


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
def conversations(whole):
    """60 conversations as `tessera eval --questions` reads them, or 6: one needle, eight, and three turns about eight."""
    rng = random.Random(16)
    made = []
    for family, needles, turns in (("single", 1, 1), ("multi_key", 8, 1), ("conversation", 8, 3)):
        for i in range(20):
            text, hidden = document(rng, needles, 36)
            asked = rng.sample(hidden, turns)
            prompts = [(text if turn == 0 else "\n") + question(name) for turn, (name, _) in enumerate(asked)]
            if i < (20 if whole else 2):
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


def profile_of(method, layers, kv_heads):
    """What a profile's file holds, made up so that heads differ much; None for a method without one."""
    numbers = random.Random(3)
    draw = lambda: [[round(numbers.uniform(0.05, 0.6), 3) for _ in range(kv_heads)] for _ in range(layers)]
    if method == "duo_attention":
        return {"kind": "tessera head gates", "version": 1, "model": "shipped", "sinks": 4, "recent": 60, "questions": 1,
                "gates": draw()}
    if method == "tangram":
        shares, spread = draw(), [[0.0] * kv_heads for _ in range(layers)]
        return {"version": 1, "model": "shipped", "method": "tangram", "share": 0.3, "samples": 1, "alpha": 2, "mean": shares,
                "deviation": spread, "budget": shares}
    return None


def padded(rows, side="left"):
    """input_ids and attention_mask of a batch; padding is token 0."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}
