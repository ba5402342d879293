#!/usr/bin/env python3
"""Runs the command-line tool as a person does: what works prints, what is wrong is told in one line with exit code 2.

Usage: command_line.py TOOL TOKENIZER
"""
import json
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile

TOOL, TOKENIZER = sys.argv[1:3]
random.seed(1)


def floats(*shape, spread=1.0, dtype="F32"):
    count = 1
    for size in shape:
        count *= size
    values = [random.gauss(0, spread) for _ in range(count)]
    if dtype == "F32":
        return dtype, list(shape), struct.pack(f"<{count}f", *values)
    return dtype, list(shape), b"".join(struct.pack("<f", value)[2:] for value in values)


def safetensors(tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def read_safetensors(path):
    """Header of a file, metadata included."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8:8 + length])


def layer(n_q=40, dtype="BF16"):
    return {"k": floats(2, 60, 64, dtype=dtype), "v": floats(2, 60, 64, dtype=dtype),
            "q": floats(n_q, 4, 64, dtype=dtype), "q_decode": floats(3, 4, 64, dtype=dtype),
            "k_decode": floats(3, 2, 64, dtype=dtype), "v_decode": floats(3, 2, 64, dtype=dtype)}


def write_model(folder):
    folder.mkdir()
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 512,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1,
              "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes(pathlib.Path(TOKENIZER).read_bytes())
    prefix = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (2048, 16), "model.norm.weight": (16,),
              prefix + "input_layernorm.weight": (16,), prefix + "post_attention_layernorm.weight": (16,),
              prefix + "self_attn.q_proj.weight": (128, 16), prefix + "self_attn.k_proj.weight": (64, 16),
              prefix + "self_attn.v_proj.weight": (64, 16), prefix + "self_attn.o_proj.weight": (16, 128),
              prefix + "mlp.gate_proj.weight": (16, 16), prefix + "mlp.up_proj.weight": (16, 16),
              prefix + "mlp.down_proj.weight": (16, 16)}
    (folder / "model.safetensors").write_bytes(
        safetensors({name: floats(*shape, spread=0.3) for name, shape in shapes.items()}))


class Checks:
    """Runs commands in a folder and counts what went wrong."""

    def __init__(self, folder):
        self.folder, self.count, self.failures = folder, 0, 0

    def run(self, arguments):
        self.count += 1
        return subprocess.run([TOOL, *arguments.split()], cwd=self.folder, capture_output=True, text=True, timeout=300,
                              check=False)

    def complain(self, arguments, result, why):
        self.failures += 1
        print(f"FAILED tessera {arguments}\n  {why}\n  exit {result.returncode}\n  stdout: {result.stdout}"
              f"\n  stderr: {result.stderr}")

    def works(self, arguments, *expected):
        result = self.run(arguments)
        missing = [text for text in expected if text not in result.stdout]
        if result.returncode != 0 or missing:
            self.complain(arguments, result, f"expected exit 0 and {missing} on stdout")
        return result.stdout

    def refuses(self, arguments, *expected):
        """Exit code 2, one line on stderr that holds every text, nothing written."""
        before = sorted(self.folder.rglob("*"))
        result = self.run(arguments)
        missing = [text for text in expected if text not in result.stderr]
        one_line = result.stderr.count("\n") == 1 and result.stderr.startswith("tessera: ")
        if result.returncode != 2 or missing or not one_line or result.stdout:
            self.complain(arguments, result, f"expected exit 2, one line on stderr and in it {missing}")
        if sorted(self.folder.rglob("*")) != before:
            self.complain(arguments, result, "left a file behind")


def check_help(checks):
    checks.works("--help", "list", "run", "eval", "compress")
    for command in ("list", "run", "eval", "compress"):
        checks.works(f"{command} --help", "Example:", f"tessera {command}")
    checks.works("list", "snapkv", "arXiv:2404.14469", "window=32", "cpu")
    listed = json.loads(checks.works("list --json"))
    assert listed["backends"] in (["cpu"], ["cpu", "cuda"]) and len(listed["methods"]) >= 7, listed
    checks.has_cuda = "cuda" in listed["backends"]
    checks.refuses("", "subcommand")
    checks.refuses("lists")
    checks.refuses("list --nonsense", "--nonsense")


def check_cuda(checks, arguments):
    """Never a silent fallback: a build without CUDA and a machine without a device each say so."""
    if not checks.has_cuda:
        checks.refuses(arguments, "no CUDA backend")
    elif shutil.which("nvidia-smi") is None:
        checks.refuses(arguments, "number of CUDA devices is 0", "--backend cpu")


def check_compress(checks):
    folder = checks.folder
    (folder / "layer").write_bytes(safetensors(layer()))
    base = "compress --in layer --out kept"
    checks.works(f"{base} --method snapkv --budget 40 --set window=16 --set pool=3", "40.0 of 60 tokens")
    written = read_safetensors(folder / "kept")
    metadata = written["__metadata__"]
    assert metadata["method"] == "snapkv" and metadata["window"] == "16" and metadata["pool"] == "3", metadata
    assert written["keep.indptr"]["dtype"] == "I64" and written["keep.indptr"]["shape"] == [3], written
    assert written["keep.indices"]["dtype"] == "I32" and written["keep.indices"]["shape"] == [80], written
    assert written["attend.indptr"]["shape"] == [7] and written["out"]["shape"] == [3, 4, 64], written
    assert written["lse"]["shape"] == [3, 4] and written["lse"]["dtype"] == "F32", written
    (folder / "kept").unlink()

    base += " --method snapkv"
    for budget in ("0", "-5", "1.5", "many", "99999999999"):
        checks.refuses(f"{base} --budget {budget}", "--budget", budget, "whole number")
    checks.refuses(base, "--budget is missing")
    checks.refuses(f"{base} --budget 16", "window is 32", "budget")
    checks.refuses(f"{base} --budget 40 --set window=0", "window is 0")
    checks.refuses(f"{base} --budget 40 --set window=41", "window is 41")
    checks.refuses(f"{base} --budget 40 --set window=x", "'x'")
    checks.refuses(f"{base} --budget 40 --set window", "name=value")
    checks.refuses(f"{base} --budget 40 --set winow=8", "did you mean window?")
    checks.refuses(f"{base} --budget 40 --set pool=4", "pool is 4")
    check_cuda(checks, f"{base} --budget 40 --backend cuda")
    checks.refuses(f"{base} --budget 40 --backend tpu", "tpu")
    checks.refuses(f"{base} --budget 40 --threads -1", "--threads")
    checks.refuses("compress --in layer --out kept --method snapvk --budget 40", "did you mean snapkv?")
    checks.refuses("compress --in absent --out kept --method full", "absent")
    checks.refuses("compress --in . --out kept --method full")
    checks.refuses("compress --in layer --out absent/kept --method full", "absent/kept")
    checks.refuses("compress --in layer --method full", "--out")
    checks.refuses("compress --in layer --out kept --method h2o --budget 20", "n_q", "60")
    checks.works("compress --in layer --out kept --method full", "60.0 of 60")
    (folder / "kept").unlink()

    whole = safetensors(layer())
    for cut in (0, 4, 8, 40, len(whole) - 1):
        (folder / "cut").write_bytes(whole[:cut])
        checks.refuses("compress --in cut --out kept --method full", "cut")
    for name, change, expected in (
            ("nan", {"k": ("F32", [2, 60, 64], b"\x00\x00\xc0\x7f" * 7680), "v": floats(2, 60, 64)}, "element 0"),
            ("type", {"k": ("U8", [2, 60, 64], bytes(7680))}, "tensor"),
            ("shape", {"v": floats(2, 59, 64, dtype="BF16")}, "shape of tensor v"),
            ("heads", {"k": floats(2, 60, 64), "v": floats(2, 60, 64), "q": floats(40, 3, 64)}, "multiple of kv_heads"),
            ("dim", {"k": floats(2, 60, 72), "v": floats(2, 60, 72), "q": floats(40, 4, 72)}, "72")):
        tensors = {} if name in ("heads", "dim") else layer()
        tensors.update(change)
        (folder / name).write_bytes(safetensors(tensors))
        checks.refuses(f"compress --in {name} --out kept --method full", expected)


def check_run(checks):
    folder = checks.folder
    write_model(folder / "model")
    (folder / "prompt").write_text("The rays of light which differ in colour\n" * 8 + "Question: why?\nAnswer:")
    (folder / "blank").write_text(" \n")
    (folder / "long").write_text("one two three four five six seven\n" * 200)
    base = "run --model model --prompt prompt --max-new 5"
    checks.works(f"{base} --method full", "kept per KV head", "full:")
    outcome = json.loads(checks.works(f"{base} --method streaming_llm --budget 16 --dtype fp32 --json"))
    assert outcome["kept_per_head"] == 16 and outcome["bytes_held"] < outcome["bytes_full"], outcome
    for method, extra, expected in (("rocketkv", "", "5"), ("rocketkv", " --set max_new=64", "64"), ("hsa", "", "5")):
        outcome = json.loads(checks.works(f"{base} --method {method} --budget 64{extra} --json"))
        assert outcome["parameters"]["max_new"] == expected, outcome
    outcome = json.loads(checks.works(f"{base} --method snapkv --budget 64 --json"))
    assert "max_new" not in outcome["parameters"], outcome
    checks.refuses("run --model model --prompt blank --method full", "blank", "empty")
    checks.refuses("run --model model --prompt long --method full", "512")
    checks.refuses("run --model model --prompt absent --method full", "absent")
    checks.refuses("run --model absent --prompt prompt --method full", "absent")
    checks.refuses(f"{base} --method full --dtype int8", "'int8'")
    checks.refuses("run --model model --prompt prompt --method full --max-new 0", "--max-new")
    checks.refuses(f"{base} --method snapkv", "--budget is missing")


def check_eval(checks):
    folder = checks.folder
    questions = [{"family": "mine", "turns": [{"prompt": "One two three.\nAnswer:", "answer": "x"},
                                              {"prompt": "\nAnswer:", "answer": "y"}]},
                 {"family": "yours", "turns": [{"prompt": "Four.\nAnswer:", "answer": "z"}]}]
    (folder / "questions").write_text("\n".join(json.dumps(line) for line in questions))
    (folder / "broken").write_text('{"family": "mine"}\n')
    (folder / "long").write_text(json.dumps(
        {"family": "mine", "turns": [{"prompt": "one two three four\n" * 300, "answer": "x"}]}))
    base = "eval --model model --methods full,snapkv,h2o --budgets 40,64"
    checks.works(f"{base} --questions questions --json report", "snapkv", "mine", "turn 2", "yours", "per step")
    report = json.loads((folder / "report").read_text())
    assert len(report) == 5 * 3, report
    assert set(report[0]) == {"method", "budget", "parameters", "family", "turn", "questions", "right", "bytes_held",
                              "bytes_full", "bytes_read_per_step", "answers"}, report[0]
    assert all(len(cell["answers"]) == cell["questions"] for cell in report), report
    made = f"{base} --context 300 --count 2 --families single,single_middle --json report --threads"
    tables = []
    for threads in (1, 2):
        checks.works(f"{made} {threads}", "single", "middle")
        tables.append((folder / "report").read_text())
    assert tables[0] == tables[1], "the number of threads changed a result"
    checks.works(f"{base} --context 300 --count 1 --suite multiturn --json report", "conversation", "turn 3")
    report = json.loads((folder / "report").read_text())
    assert {cell["family"] for cell in report} == {"conversation"}, report
    assert sorted(cell["turn"] for cell in report) == [turn for turn in (1, 2, 3) for _ in range(5)], report
    (folder / "report").unlink()
    both = "eval --model model --methods snapkv,rocketkv --budgets 64 --context 300 --count 1 --families single"
    checks.works(f"{both} --json report", "max_new of rocketkv: ")
    report = {cell["method"]: cell["parameters"] for cell in json.loads((folder / "report").read_text())}
    assert 1 < report["rocketkv"]["max_new"] < 64 and "max_new" not in report["snapkv"], report
    assert "max_new of" not in checks.works(f"{both} --set max_new=100 --json report")
    report = {cell["method"]: cell["parameters"] for cell in json.loads((folder / "report").read_text())}
    assert report["rocketkv"]["max_new"] == 100 and "max_new" not in report["snapkv"], report
    (folder / "report").unlink()
    checks.works("eval --help", "max_new", "--suite", "all", "singleturn", "multiturn")
    checks.refuses(f"{base} --context 300 --suite multitrun", "suite is 'multitrun'", "did you mean multiturn?")
    checks.refuses(f"{base} --context 300 --suite multiturn --families single", "--suite", "--families")
    checks.refuses(f"{base} --suite multiturn --questions questions", "--suite", "--questions")
    checks.refuses(f"{base} --questions broken --json report", "broken, line 1")
    checks.refuses(f"{base} --questions absent", "absent")
    checks.refuses(f"{base} --questions long --json report", "512")
    checks.refuses(f"{base} --questions questions --json absent/report", "absent/report")
    checks.refuses("eval --model model --methods full,snapvk --budgets 40", "did you mean snapkv?")
    checks.refuses("eval --model model --methods full, --budgets 40", "--methods")
    checks.refuses("eval --model model --methods snapkv", "--budgets is missing")
    checks.refuses("eval --model model --methods snapkv --budgets 40,0", "--budgets is '0'")
    checks.refuses(f"{base} --context 4096", "512")
    checks.refuses(f"{base} --context 100 --families long_answer", "long_answer")
    checks.refuses(f"{base} --context 300 --families singel", "did you mean single?")
    checks.refuses(f"{base} --context 300 --set sinks=2", "sinks")
    check_cuda(checks, f"{base} --context 300 --backend cuda")


def main():
    with tempfile.TemporaryDirectory() as name:
        checks = Checks(pathlib.Path(name))
        check_help(checks)
        check_compress(checks)
        check_run(checks)
        check_eval(checks)
    print(f"{checks.count} commands, {checks.failures} failures")
    return 1 if checks.failures else 0


if __name__ == "__main__":
    sys.exit(main())
