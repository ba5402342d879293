#!/usr/bin/env python3
"""Runs the command-line tool as a person does: what works prints, what is wrong is told in one line with exit code 2.

Usage: command_line.py TOOL TOKENIZER
"""
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

TOOL, TOKENIZER = (str(pathlib.Path(name).resolve()) for name in sys.argv[1:3])
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

    def run(self, arguments, **how):
        """`how` goes to subprocess.run: input, stdout, preexec_fn and the like."""
        self.count += 1
        how.setdefault("stdout", subprocess.PIPE)
        words = arguments if isinstance(arguments, list) else arguments.split()
        return subprocess.run([TOOL, *words], cwd=self.folder, stderr=subprocess.PIPE, text=True, timeout=300,
                              check=False, **how)

    def complain(self, arguments, result, why):
        self.failures += 1
        print(f"FAILED tessera {arguments}\n  {why}\n  exit {result.returncode}\n  stdout: {result.stdout}"
              f"\n  stderr: {result.stderr}")

    def works(self, arguments, *expected, **how):
        result = self.run(arguments, **how)
        missing = [text for text in expected if text not in result.stdout]
        if result.returncode != 0 or missing:
            self.complain(arguments, result, f"expected exit 0 and {missing} on stdout")
        return result.stdout

    def notes(self, arguments, *expected, **how):
        """Works, and says each text in a note on stderr."""
        result = self.run(arguments, **how)
        missing = [text for text in expected if text not in result.stderr]
        if result.returncode != 0 or missing or "tessera: note: " not in result.stderr:
            self.complain(arguments, result, f"expected exit 0 and a note with {missing}")

    def require(self, holds, arguments, why):
        if not holds:
            self.failures += 1
            print(f"FAILED tessera {arguments}\n  {why}")

    def refuses(self, arguments, *expected, **how):
        """Exit code 2, one line on stderr that holds every text, nothing written."""
        before = sorted(self.folder.rglob("*"))
        result = self.run(arguments, **how)
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
    checks.refuses("", "command is missing", "list, run, eval, compress")
    checks.refuses("lists", "command is 'lists'", "did you mean list?")
    checks.refuses(["\x1b[2J"], "command is '\\x1b[2J'")
    checks.refuses(["x" * 5000], "x...'")
    checks.works("--version", "tessera ")
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
    checks.refuses(f"{base} --budget 40 --set window=0", "window is 0", "1 to 32768")
    checks.refuses(f"{base} --budget 40 --set window=41", "window is 41")
    checks.refuses(f"{base} --budget 40 --set window=8 --set window=9", "every parameter once")
    checks.refuses("compress --in layer --out kept --method pyramidkv --budget 40 --set layer=-2", "layer is -2")
    checks.refuses(f"{base} --budget 40 --set window=x", "'x'")
    checks.refuses(f"{base} --budget 40 --set window", "name=value")
    checks.refuses(f"{base} --budget 40 --set winow=8", "did you mean window?")
    checks.refuses(f"{base} --budget 40 --set pool=4", "pool is 4")
    check_cuda(checks, f"{base} --budget 40 --backend cuda")
    checks.refuses(f"{base} --budget 40 --backend tpu", "tpu")
    checks.refuses(f"{base} --budget 40 --threads -1", "--threads")
    checks.refuses("compress --in layer --out kept --method snapvk --budget 40", "did you mean snapkv?")
    checks.refuses("compress --in absent --out kept --method full", "absent")
    checks.refuses("compress --in . --out kept --method full", "a folder")
    checks.refuses("compress --in layer --out absent/kept --method full", "absent/kept")
    checks.refuses("compress --in layer --method full", "--out")
    checks.refuses("compress --in layer --out kept --method h2o --budget 20", "n_q", "60")
    checks.works("compress --in layer --out kept --method full", "60.0 of 60")
    checks.notes("compress --in layer --out kept --method full --budget 40", "--budget has no effect")
    (folder / "more").write_bytes(safetensors({**layer(), "boundaries": ("U8", [60], bytes(60)), "w": floats(2)}))
    checks.notes("compress --in more --out kept --method snapkv --budget 40", "not used by snapkv: tensor boundaries, w")
    checks.notes("compress --in layer --out kept --method streaming_llm --budget 40", "not used by streaming_llm: tensor q")
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


def check_compress_more(checks):
    folder = checks.folder
    for method, budget, expected in (("hsa", 16, {"page": "2", "channels": "32"}), ("quest", 16, {"page": "16"}),
                                     ("rocketkv", 16, {"split": "adaptive"})):
        checks.works(f"compress --in layer --out kept --method {method} --budget {budget} --set "
                     + ("max_new=4" if method != "rocketkv" else "window=2"))
        written = read_safetensors(folder / "kept")["__metadata__"]
        for name, value in expected.items():
            planned = written[name] == value if value != "adaptive" else 0 < float(written[name]) < 1
            checks.require(planned, method, f"{name} is written as {written[name]}")
        checks.require(written.get("page", "1") != "0" and written.get("channels", "1") != "0", method, written)
    checks.notes("compress --in layer --out kept --method pyramidkv --budget 40", "as snapkv")

    def with_turns(turns, dtype="I64", **more):
        content = struct.pack(f"<{len(turns)}{'q' if dtype == 'I64' else 'i'}", *turns)
        (folder / "turns").write_bytes(safetensors({**layer(n_q=60), "turns": (dtype, [len(turns)], content), **more}))

    def attended(method, turns):
        random.seed(7)
        with_turns(turns)
        checks.works(f"compress --in turns --out kept --method {method} --budget 16 --set window=2 --set max_new=4 --set split=1 --set pool=1")
        content = (folder / "kept").read_bytes()
        header = read_safetensors(folder / "kept")
        start = 8 + struct.unpack("<Q", content[:8])[0]
        begin, end = header["attend.indices"]["data_offsets"]
        return content[start + begin:start + end]

    checks.require(attended("rocketkv", []) == attended("rocketkv", [0]), "turns", "a leading 0 makes a difference")
    checks.require(attended("rocketkv_mt", [30, 50]) != attended("rocketkv", [30, 50]), "turns", "no difference")
    base = "compress --in turns --out kept --method full"
    for turns in ([30, 30], [40, 20], [60], [-1], [5, 2**40]):
        with_turns(turns)
        (folder / "kept").unlink(missing_ok=True)
        checks.refuses(base, "tensor turns")
    with_turns([30], dtype="I32")
    checks.refuses(base, "I64")

    huge = layer(dtype="F32")
    huge["q"] = ("F32", [40, 4, 64], struct.pack("<f", 1.9e19) * (40 * 4 * 64))
    huge["k"] = ("F32", [2, 60, 64], struct.pack("<f", 1.9e19) * (2 * 60 * 64))
    (folder / "huge").write_bytes(safetensors(huge))
    checks.refuses("compress --in huge --out kept --method snapkv --budget 40", "layer 0, query head 0", "token 0")
    huge["q_decode"] = ("F32", [3, 4, 64], struct.pack("<f", 1.9e19) * (3 * 4 * 64))
    (folder / "huge").write_bytes(safetensors(huge))
    checks.refuses("compress --in huge --out kept --method streaming_llm --budget 40", "layer 0, query head 0, step 0")

    many = {f"tensor.with.a.long.name.{i}": ("U8", [0], b"") for i in range(300_000)}
    (folder / "many").write_bytes(safetensors({**layer(), **many}))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    checks.notes("compress --in many --out kept --method full", "more")
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    checks.require(seconds < 8, "compress --in many", f"took {seconds:.1f} s of a core")  # a quadratic reader: 25
    (folder / "many").unlink()
    (folder / "kept").unlink()


def check_model(checks):
    """A config or tokenizer of another model is named."""
    folder = checks.folder
    config = json.loads((folder / "model" / "config.json").read_text())
    for name, value, expected in (("num_key_value_heads", None, "num_key_value_heads is 2"),
                                  ("num_hidden_layers", 0, "num_hidden_layers"), ("vocab_size", 2000, "vocab_size is 2000")):
        shutil.copytree(folder / "model", folder / "other")
        (folder / "other" / "config.json").write_text(
            json.dumps({key: value if key == name else old for key, old in config.items()}))
        for command in ("run --model other --prompt prompt --method full",
                        "eval --model other --methods full --questions questions"):
            checks.refuses(command, "other/config.json", expected)
        shutil.rmtree(folder / "other")
    tensors = {}
    content = (folder / "model" / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    for name, entry in read_safetensors(folder / "model" / "model.safetensors").items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], content[start + begin:start + end])
    shutil.copytree(folder / "model", folder / "other")
    layers = {name.replace("layers.0", "layers.1"): tensor for name, tensor in tensors.items() if "layers.0" in name}
    (folder / "other" / "model.safetensors").write_bytes(safetensors({**tensors, **layers}))
    checks.refuses("run --model other --prompt prompt --method full", "config.json", "num_hidden_layers is 1; expected 2")
    dtype, shape, rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = (dtype, [2000, 16], rows[:2000 * 64])
    (folder / "other" / "model.safetensors").write_bytes(safetensors(tensors))
    (folder / "other" / "config.json").write_text(json.dumps({**config, "vocab_size": 2000}))
    checks.refuses("run --model other --prompt prompt --method full", "tokenizer.model", "2048 tokens; expected 2000")
    shutil.rmtree(folder / "other")


def check_signs_of_life(checks):
    """Something appears on stderr within three seconds of a long command's start."""
    folder = checks.folder
    rows = 16_000
    row = struct.pack("<64f", *(random.gauss(0, 1) for _ in range(64)))
    (folder / "slow").write_bytes(safetensors({"k": ("F32", [2, rows, 64], row * (2 * rows)),
                                               "v": ("F32", [2, rows, 64], row * (2 * rows)),
                                               "q": ("F32", [rows, 8, 64], row * (8 * rows))}))
    for command in ("compress --in slow --out kept --method h2o --budget 100 --threads 1",
                    "eval --model model --methods full --context 400 --families single --count 200000"):
        start = time.time()
        with subprocess.Popen([TOOL, *command.split()], cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            line = process.stderr.readline()
            waited = time.time() - start
            process.terminate()
            process.communicate(timeout=30)
        checks.count += 1
        checks.require(b"so far" in line and waited < 3, command, f"{waited:.1f} s until {line}")
    (folder / "slow").unlink()


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
    checks.refuses(f"{base} --method full --budget 40", "--budget", "full keeps everything")
    prompt = (folder / "prompt").read_text()
    from_file = json.loads(checks.works(f"{base} --method full --json"))
    from_stdin = json.loads(checks.works("run --model model --prompt - --max-new 5 --method full --json", input=prompt))
    checks.require(from_file["text"] == from_stdin["text"], base, "standard input gives another answer than the file")
    checks.refuses("run --model model --prompt - --method full", "standard input", "empty", input="")


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
                              "bytes_full", "bytes_read_per_step", "answers", "verdicts"}, report[0]
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
    checks.refuses("eval --model model --methods snapkv --budgets 64,064", "every budget once")
    checks.refuses("eval --model model --methods full --budgets 64", "--budgets", "no method here has a budget")
    checks.refuses(["eval", "--model", "model", "--methods", "full", "--families", ""], "--families", "empty")
    checks.refuses(["eval", "--model", "model", "--methods", "full", "--json", ""], "--json", "empty")
    for unused in ("--families single", "--count 3", "--context 200", "--seed 2", "--text prompt", "--tasks prompt"):
        checks.refuses(f"{base} --questions questions {unused}", "--questions", unused.split()[0])
    tasks = json.loads((pathlib.Path(TOKENIZER).parents[1] / "data" / "tasks.json").read_text())
    for name, change in (("question", None), ("families", 3), ("value_words", -1), ("value_words", 10**9), ("nouns", [])):
        (folder / "tasks").write_text(json.dumps({key: change if key == name else value for key, value in tasks.items()
                                                  if key != name or change is not None}))
        checks.refuses(f"{base} --context 300 --tasks tasks", "tasks")
    tasks["families"]["frequent_words"]["others_max"] = 0
    (folder / "tasks").write_text(json.dumps(tasks))
    checks.refuses(f"{base} --context 300 --tasks tasks", "others_max is 0")
    both = "eval --model model --methods snapkv,ada_snapkv --budgets 64 --questions questions --json report"
    checks.works(f"{both} --set pool=5 --set ada_snapkv.pool=9 --set snapkv.window=16")
    report = {cell["method"]: cell["parameters"] for cell in json.loads((folder / "report").read_text())}
    checks.require(report["snapkv"]["pool"] == 5 and report["ada_snapkv"]["pool"] == 9 and
                   report["snapkv"]["window"] == 16 and report["ada_snapkv"]["window"] == 32, both, report)
    (folder / "report").unlink()
    checks.refuses(f"{both} --set h2o.pool=9", "'h2o.pool'")
    checks.refuses(f"{base} --context 4096", "512")
    checks.refuses(f"{base} --context 100 --families long_answer", "long_answer")
    checks.refuses(f"{base} --context 300 --families singel", "did you mean single?")
    checks.refuses(f"{base} --context 300 --set sinks=2", "sinks")
    check_cuda(checks, f"{base} --context 300 --backend cuda")


def check_ranges(checks):
    """Every number of every method at the ends of its range, and beyond."""
    (checks.folder / "all").write_bytes(safetensors(layer(n_q=60)))
    has_device = checks.has_cuda and shutil.which("nvidia-smi") is not None
    methods = json.loads(checks.works("list --json"))["methods"]
    for method, backend in ((one, name) for one in methods for name in ["cpu"] + ["cuda"] * has_device):
        budget = "--budget 40" if method["has_budget"] else ""
        for parameter in method["parameters"]:
            ends = re.search(r"(-?\d+) to (\d+)$", parameter["allowed"])
            if not ends:
                continue
            least, most = (int(end) for end in ends.groups())
            command = (f"compress --in all --out kept --threads 1 --backend {backend} --method {method['name']} {budget} "
                       f"--set {parameter['name']}=")
            for value in (least, least + 1, most - 1, most):
                result = checks.run(f"{command}{value}")
                fine = result.returncode == 0 or (result.returncode == 2 and result.stderr.count("\n") == 1)
                if not fine or "internal" in result.stderr:
                    checks.complain(f"{command}{value}", result, "expected a result or a sentence")
                (checks.folder / "kept").unlink(missing_ok=True)
            for value in (least - 1, most + 1, 2147483548, 2147483647, -2147483648, 10**12):
                checks.refuses(f"{command}{value}", parameter["name"])


def check_outputs(checks):
    """Where a result may go: devices, FIFOs, links, names and rights."""
    folder = checks.folder
    base = "compress --in layer --method full --out"
    (folder / "wanted").unlink(missing_ok=True)
    checks.works(f"{base} wanted")
    wanted = (folder / "wanted").read_bytes()
    (folder / "link").symlink_to("target")
    for _ in range(2):  # to a missing target, then to an existing one
        checks.works(f"{base} link")
        checks.require((folder / "link").is_symlink() and (folder / "target").read_bytes() == wanted, base, "link lost")
    os.mkfifo(folder / "fifo")
    read = []
    reader = threading.Thread(target=lambda: read.append((folder / "fifo").read_bytes()))
    reader.start()
    checks.works(f"{base} fifo")
    reader.join(20)
    checks.require(read == [wanted] and (folder / "fifo").is_fifo(), base, "FIFO")
    checks.works(f"{base} /dev/null")
    checks.require(pathlib.Path("/dev/null").is_char_device(), base, "/dev/null is no device any more")
    checks.refuses(f"{base} /dev/full", "/dev/full", "No space left")
    (folder / "closed").write_text("precious")
    (folder / "closed").chmod(0o444)
    checks.refuses(f"{base} closed", "closed", "permission")
    checks.require((folder / "closed").read_text() == "precious", base, "a read-only file was overwritten")
    (folder / "target").chmod(0o640)
    checks.works(f"{base} target")
    checks.require((folder / "target").stat().st_mode & 0o777 == 0o640, base, "rights changed")
    longest = "n" * 255
    checks.works(f"{base} {longest}")
    checks.refuses(f"{base} {longest}n", "too long")
    checks.refuses(f"{base} {'d/' * 2500}x", "too long")
    checks.refuses(f"{base} layer/x", "layer/x")
    checks.refuses(f"{base} .", "a folder")
    for name in ("wanted", "link", "target", "fifo", "closed", longest):
        (folder / name).unlink()
    checks.refuses(f"{base} limited", "limited", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)))


def check_inputs(checks):
    """What an input may be: told apart, and never a wait."""
    folder = checks.folder
    os.mkfifo(folder / "fifo")
    (folder / "alone").mkdir()
    compress, run = "compress --out kept --method full --in", "run --method full --model"
    evaluate = "eval --model model --methods full --questions"
    for command in (f"{compress}", f"{run} model --prompt", f"{evaluate}"):
        checks.refuses(f"{command} fifo", "fifo is a FIFO")
        checks.refuses(f"{command} alone", "alone is a folder")
        checks.refuses(f"{command} absent", "absent is missing")
        checks.refuses(f"{command} /dev/zero", "/dev/zero is a device")
        checks.refuses(f"{command} {'d/' * 2500}x", "too long")
    for name in ("config.json", "tokenizer.model", "model.safetensors"):
        shutil.copytree(folder / "model", folder / "copy")
        (folder / "copy" / name).unlink()
        os.mkfifo(folder / "copy" / name)
        checks.refuses(f"{run} copy --prompt prompt", name, "a FIFO")
        shutil.rmtree(folder / "copy")
    checks.refuses(f"{run} model --prompt /proc/self/mem", "/proc/self/mem")
    if os.getuid() == 0:
        (folder / "alone").chmod(0o600)
        (folder / "alone" / "text").write_text("text")

        def nobody():
            os.setuid(65534)
        folder.chmod(0o755)
        probe = subprocess.run([TOOL, "--version"], preexec_fn=nobody, capture_output=True, check=False)
        if probe.returncode == 0:
            checks.refuses(f"{run} model --prompt alone/text", "no permission", preexec_fn=nobody)
            checks.refuses(f"{run} alone --prompt prompt", "no permission", preexec_fn=nobody)
            checks.refuses(f"{evaluate} alone/text", "no permission", preexec_fn=nobody)
    (folder / "fifo").unlink()
    shutil.rmtree(folder / "alone")


def check_streams(checks):
    """Standard output that cannot be written, and signals."""
    for command in ("list", "list --json", "--help", "run --help", "--version",
                    "run --model model --prompt prompt --max-new 3 --method full"):
        with open("/dev/full", "w", encoding="utf-8") as full:
            result = checks.run(command, stdout=full)
        if result.returncode != 2 or "standard output is not writable (No space left" not in result.stderr:
            checks.complain(f"{command} > /dev/full", result, "expected exit 2 and a sentence")
        result = checks.run(command, preexec_fn=lambda: os.close(1))
        if result.returncode != 2 or "standard output is not writable" not in result.stderr:
            checks.complain(f"{command} >&-", result, "expected exit 2 and a sentence")


def check_limits(checks):
    """A container's limits: threads and memory."""
    def little(mebibytes):
        return lambda: resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))
    run = "run --model model --prompt prompt --max-new 3 --method full"
    if checks.run("--version", preexec_fn=little(1500)).returncode != 0:
        return  # a sanitized program needs more than any limit
    checks.notes(f"{run} --threads 1024", "of 1024 threads; working with these", preexec_fn=little(1500))
    # below the least the kernel itself ends a program that does not fit; above it the answer is the program's own
    least = next(size for size in range(8, 1500, 4) if checks.run("--version", preexec_fn=little(size)).returncode == 0)
    for mebibytes in (least, least + 4, least + 12, least + 32):
        result = checks.run(f"{run} --threads 1", preexec_fn=little(mebibytes))
        if result.returncode not in (0, 2, 127) or not (result.stdout or result.stderr):
            checks.complain(run, result, f"with {mebibytes} MiB")


def check_interruption(checks):
    """A signal ends a command without leaving anything behind; an evaluation keeps what it has finished."""
    folder = checks.folder
    before = sorted(folder.rglob("*"))
    command = "eval --model model --methods full,snapkv,h2o --budgets 40,64 --context 400 --families single --count 2000 --json report"
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        with subprocess.Popen([TOOL, *command.split()], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as process:
            for line in process.stderr:
                if line.startswith("documents"):
                    break
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=30)
        checks.count += 1
        told = re.search(r"interrupted after (\d+) of (\d+) documents", stderr)
        checks.require(process.returncode == code and told, command, f"exit {process.returncode}: {stderr}")
        if told and int(told[1]) > 0:
            report = json.loads((folder / "report").read_text())
            asked = sum(cell["questions"] for cell in report if cell["method"] == "full" and cell["turn"] == 1)
            checks.require(asked == int(told[1]) and "snapkv" in stdout, command, f"{asked} questions, {told[0]}")
        (folder / "report").unlink(missing_ok=True)
    checks.require(sorted(folder.rglob("*")) == before, command, "left a file behind")


def main():
    with tempfile.TemporaryDirectory() as name:
        checks = Checks(pathlib.Path(name))
        check_help(checks)
        check_compress(checks)
        check_compress_more(checks)
        check_run(checks)
        check_eval(checks)
        check_model(checks)
        check_signs_of_life(checks)
        check_ranges(checks)
        check_outputs(checks)
        check_inputs(checks)
        check_streams(checks)
        check_limits(checks)
        check_interruption(checks)
    print(f"{checks.count} commands, {checks.failures} failures")
    return 1 if checks.failures else 0


if __name__ == "__main__":
    sys.exit(main())
