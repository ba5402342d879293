"""The README's first snippet has at most 12 lines, and runs on the shipped model; so does the script that draws."""
import re
import subprocess
import sys

import sentencepiece
import transformers
from conftest import HERE, ROOT


def test_the_snippet_runs_and_answers():
    code = re.search(r"```python\n(.*?)```", (HERE.parent / "README.md").read_text(), flags=re.S).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = result.stdout.strip().splitlines()
    held, full, read = map(int, re.findall(r"\d+", lines[-1]))
    assert lines[0].strip() == "velvet walnut" and read < 0.15 * full and held < full


def test_the_script_draws(tmp_path):
    flags = "--method snapkv --budget 48 --set window=16 --prompt-tokens 200 --new-tokens 12".split()
    subprocess.run([sys.executable, HERE.parent / "show.py", *flags, "--out", tmp_path], check=True,
                   stdout=subprocess.DEVNULL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.png", "memory.png", "speed.png"]


def test_transformers_splits_text_as_the_engine_does():
    folder = ROOT / "examples" / "model"
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = (ROOT / "examples" / "data" / "opticks.txt").read_text()
    for part in (*(text[at:at + 1500] for at in range(0, len(text), 50000)), "", " a", "two  blanks\n\n\t", "\u00e9\u6f22 2,048"):
        pieces = own.encode(part)
        assert tokenizer(part).input_ids == [own.bos_id(), *pieces] and tokenizer.decode(pieces) == own.decode(pieces)
