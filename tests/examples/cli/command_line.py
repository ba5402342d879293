#!/usr/bin/env python3
"""Runs the command-line tool as a person does: what works prints, what is wrong is told in one line with exit code 2.

Usage: command_line.py TOOL TOKENIZER
"""
import itertools
import json
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile

import compress
import shared_documents
import system
from checks import HANG, TOKENIZER, TOOL, Checks, layer, read_safetensors, without_progress
from small_files import safetensors, write_model


def check_help(checks):
    checks.works("--help", "list", "run", "eval", "agree", "compress")
    for command in ("list", "run", "eval", "agree", "compress", "calibrate", "heads", "strategies"):
        checks.works(f"{command} --help", "Example:", f"tessera {command}")
    checks.works("calibrate --help", "1..16777216")
    checks.works("list", "snapkv", "arXiv:2404.14469", "window=32", "cpu")
    listed = json.loads(checks.works("list --json"))
    assert listed["backends"] in (["cpu"], ["cpu", "cuda"]) and len(listed["methods"]) >= 7, listed
    checks.has_cuda = "cuda" in listed["backends"]
    for method in listed["methods"]:
        names = [parameter["name"] for parameter in method["parameters"]]
        checks.require(len(set(names)) == len(names), "list --json", f"{method['name']} has parameters twice: {names}")
    checks.refuses("", "command is missing", "list, run, eval, agree, compress, calibrate, heads, strategies")
    checks.refuses("lists", "command is 'lists'", "did you mean list?")
    checks.refuses(["\x1b[2J"], "command is '\\x1b[2J'")
    checks.refuses(["x" * 5000], "x...'")
    checks.works("--version", "tessera ")
    checks.refuses("list --nonsense", "--nonsense")


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
    """A long command says on stderr how far it is, before it ends."""
    folder = checks.folder
    rows = 16_000
    row = struct.pack("<64f", *(random.gauss(0, 1) for _ in range(64)))
    (folder / "slow").write_bytes(safetensors({"k": ("F32", [2, rows, 64], row * (2 * rows)),
                                               "v": ("F32", [2, rows, 64], row * (2 * rows)),
                                               "q": ("F32", [rows, 8, 64], row * (8 * rows))}))
    for command in ("compress --in slow --out kept --method h2o --budget 100 --threads 1",
                    "eval --model model --methods full --context 400 --families single --count 200000"):
        with subprocess.Popen([TOOL, *command.split()], cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            line = process.stderr.readline()
            process.terminate()
            process.communicate(timeout=HANG)
        checks.count += 1
        checks.require(b"so far" in line, command, f"the first line is {line}")
    (folder / "slow").unlink()


def check_run(checks):
    folder = checks.folder
    write_model(folder / "model", TOKENIZER)
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
    checks.refuses("run --model model --method full", "--prompt is missing", "no chat template", input="Hello\n")
    checks.refuses(f"{base} --prompt prompt --method full", "--prompt is given 2 times")
    checks.refuses(f"{base} --method full --system Hello", "--system", "none for plain text")
    checks.refuses(f"{base} --method full --template chat", "--template is 'chat'", "auto, none, chatml, llama3")
    checks.refuses(f"{base} --method full --template chatml", "control token <|im_end|> is missing")
    (folder / "model" / "chat_template.jinja").write_text("[INST] {{ message }} [/INST]")
    checks.refuses(f"{base} --method full", "chat template of the model", "ChatML's", "Llama 3's", "--template none")
    checks.works(f"{base} --method full --template none", "kept per KV head")
    (folder / "model" / "chat_template.jinja").unlink()


def documents_nobody_can_make():
    """Options of `eval`, `heads` and `calibrate`, and what their refusal says."""
    return (("--suite", "multitrun", "suite is 'multitrun'", "did you mean multiturn?"),
            ("--families", "single,singel --context 300", "did you mean single?"),
            ("--context", "0", "--context is '0'"), ("--context", "4096", "--context is 4096", "512"),
            ("--seed", "x", "--seed is 'x'"), ("--tasks", "absent", "absent"),
            ("--families", "single,long_answer --context 100", "long_answer"))


def check_agree(checks):
    base = "agree --model model --methods snapkv,h2o --budgets 40,64"
    checks.works(f"{base} --prompt 200 --steps 6 --count 2 --json report", "full", "snapkv/40", "perplexity", "KL mean", "2 pieces")
    report = json.loads((checks.folder / "report").read_text())
    assert [row["method"] for row in report] == ["full", "snapkv", "snapkv", "h2o", "h2o"], report
    assert report[0]["kl_mean"] == 0 and report[0]["same_top"] == 1 and all(row["steps"] == 12 for row in report), report
    assert all(len(row["kl_by_step"]) == 6 for row in report), report
    checks.works(f"{base} --prompt 200,100 --steps 6 --count 1 --json report", "prompts of 100 tokens", "prompts of 200 tokens")
    assert [row["prompt"] for row in json.loads((checks.folder / "report").read_text())] == 5 * [100] + 5 * [200]
    (checks.folder / "report").unlink()
    (checks.folder / "prompts").write_text('{"text": "%s"}\n{"prompt": "one two three", "continuation": " four five"}' % ("one two " * 60))
    checks.works(f"{base} --prompts prompts --prompt 50 --steps 4", "prompts of 50 tokens", "2 pieces")
    checks.refuses(f"{base} --prompts broken_prompts", "broken_prompts")
    checks.refuses(f"{base} --prompts prompts --count 2", "--prompts", "--count")
    checks.refuses(f"{base} --prompt 1", "--prompt is '1'")
    checks.refuses(f"{base} --prompt 16000 --steps 1", "the model's context")
    checks.refuses(f"{base} --text questions --prompt 400 --steps 10", "tokens of the text", "a smaller --prompt or --steps")
    (checks.folder / "bad.gguf").write_bytes(b"GGUF\x03\0\0\0")
    checks.refuses("agree --model bad.gguf --methods full", "bad.gguf", "rest of the file")


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
    assert set(report[0]) == {"method", "budget", "parameters", "family", "turn", "questions", "right", "metric", "score",
                              "bytes_held", "bytes_full", "bytes_read_per_step", "prompt_tokens", "prompt_tokens_reused", "prompt_pairs",
                              "answers", "verdicts"}, report[0]
    (folder / "ruler.jsonl").write_text(json.dumps({"input": "One two.", "outputs": ["x", "y"], "answer_prefix": " Three"}))
    checks.works(f"{base} --questions ruler.jsonl --metric contains_all --json report", "ruler", "average", "mean score in percent (contains_all)")
    assert all(len(cell["scores"]) == 1 for cell in json.loads((folder / "report").read_text()))
    checks.refuses(f"{base} --questions questions --metric rouge", "--metric is 'rouge'", "rouge_l")
    checks.refuses([*f"{base} --questions questions --question-template".split(), "{input}"], "--question-template is '{input}'")
    checks.refuses(f"{base} --families single --question-template x", "--question-template", "--questions")
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
    shared_documents.check(checks, base)
    both = "eval --model model --methods snapkv,rocketkv --budgets 64 --context 300 --count 1 --families single"
    checks.works(f"{both} --json report", "max_new of rocketkv: ")
    report = {cell["method"]: cell["parameters"] for cell in json.loads((folder / "report").read_text())}
    assert 1 < report["rocketkv"]["max_new"] < 64 and "max_new" not in report["snapkv"], report
    assert "max_new of" not in checks.works(f"{both} --set max_new=100 --json report")
    report = {cell["method"]: cell["parameters"] for cell in json.loads((folder / "report").read_text())}
    assert report["rocketkv"]["max_new"] == 100 and "max_new" not in report["snapkv"], report
    (folder / "report").unlink()
    checks.works("eval --help", "max_new", "--suite", "all", "singleturn", "multiturn")
    for option, value, *expected in documents_nobody_can_make():
        checks.refuses_at_once(f"{base} --json report {option} {value}", *expected)
    checks.refuses_at_once(f"{base} --context 300 --count 0", "--count is '0'")
    checks.refuses_at_once(f"{base} --context 300 --set window=64", "window is 64")
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
    for unused in ("--families single", "--count 3", "--context 200", "--seed 2", "--text prompt", "--tasks prompt",
                   "--turns 3", "--questions-per-document 3"):
        checks.refuses(f"{base} --questions questions {unused}", "--questions", unused.split()[0])
    tasks = json.loads((pathlib.Path(TOKENIZER).parents[1] / "data" / "tasks.json").read_text())
    for name, change in (("question", None), ("families", 3), ("value_words", -1), ("value_words", 10**9), ("nouns", [])):
        (folder / "tasks").write_text(json.dumps({key: change if key == name else value for key, value in tasks.items()
                                                  if key != name or change is not None}))
        checks.refuses(f"{base} --context 300 --tasks tasks", "tasks")
    tasks["families"]["frequent_words"]["others_max"] = 0
    (folder / "tasks").write_text(json.dumps(tasks))
    checks.refuses(f"{base} --context 300 --tasks tasks", "others_max is 0")
    checks.refuses(f"{base} --context 300 --turns 2", "--turns is 2", "--suite conversations")
    checks.refuses(f"{base} --suite conversations --turns 10", "--turns")
    for chunk in ("0", "many"):
        checks.refuses(f"{base} --questions questions --chunk {chunk}", "--chunk")
    checks.works(f"{base} --questions questions --chunk whole")
    varied = "eval --model model --methods full,snapkv,ada_snapkv --budgets 40,64 --questions questions --json report"
    checks.works(varied + " --vary pool=1,5 --vary snapkv.window=8", "snapkv pool=5", "ada_snapkv pool=1", "snapkv window=8")
    rows = [(cell["method"], cell["budget"], cell.get("differs", ""), cell["parameters"].get("pool"))
            for cell in json.loads((checks.folder / "report").read_text()) if cell["turn"] == 1]
    for method, budget in itertools.product(("snapkv", "ada_snapkv"), (40, 64)):
        assert {row[2:] for row in rows if row[:2] == (method, budget)} >= {("", 7), ("pool=1", 1), ("pool=5", 5)}, rows
    checks.refuses(varied + " --vary nonsense=1", "--vary is 'nonsense'", "a parameter of one of the methods")
    checks.refuses(varied + " --vary pool=1,many", "pool is 'many'")
    checks.refuses(varied + " --vary pool=1,1", "--vary pool")
    both = "eval --model model --methods snapkv,ada_snapkv --budgets 64 --questions questions --json report"
    checks.works(f"{both} --set pool=5 --set ada_snapkv.pool=9 --set snapkv.window=16")
    report = {cell["method"]: cell["parameters"] for cell in json.loads((folder / "report").read_text())}
    checks.require(report["snapkv"]["pool"] == 5 and report["ada_snapkv"]["pool"] == 9 and
                   report["snapkv"]["window"] == 16 and report["ada_snapkv"]["window"] == 32, both, report)
    (folder / "report").unlink()
    checks.refuses(f"{both} --set h2o.pool=9", "'h2o.pool'")
    checks.refuses(f"{base} --context 300 --set sinks=2", "sinks")
    compress.check_cuda(checks, f"{base} --context 300 --backend cuda")


def check_heads(checks):
    """The profile of a model's heads: found, read back, and refused when it is another model's or no profile."""
    folder = checks.folder
    base = "eval --model model --methods duo_attention --budgets 40 --questions questions"
    checks.refuses(base, "profile is missing", "tessera heads")
    find = "heads --model model --context 300 --count 1 --families single --out gates --recent 20"
    checks.works(find, "over 1 questions", "layer 0", "Wrote gates")
    found = json.loads((folder / "gates").read_text())
    config = json.loads((folder / "model" / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    checks.require(found["version"] == 1 and len(found["gates"]) == layers and found["sinks"] == 4 and
                   all(len(row) == heads and all(0 <= gate <= 1 for gate in row) for row in found["gates"]), find, found)
    checks.works(f"{find} --questions questions".replace("--context 300 --count 1 --families single ", ""))
    checks.refuses(find.replace("--recent 20", "--recent 0"), "--recent is '0'")
    for option, value, *expected in documents_nobody_can_make():
        checks.refuses_at_once(f"heads --model model --out other {option} {value}", *expected)
    checks.refuses(["heads", "--model", "", "--out", "gates"], "--model", "empty")
    checks.works(f"{base} --set profile=gates --json report")
    report = json.loads((folder / "report").read_text())
    checks.require(report[0]["parameters"]["profile"] == "gates", base, report[0])
    checks.works(f"{base} --set profile=gates --vary streaming=0,1", "duo_attention streaming=0")
    for change, *expected in (({"version": 2}, '"version" is 2', "newer"), ({"version": "1"}, '"version" is "1"'),
                              ({"kind": "another"}, "\"kind\" is 'another'"), ({"sinks": -1}, '"sinks" is -1'),
                              ({"gates": [[0.5] * heads, [0.5] * (heads + 1)]}, 'KV heads of profile wrong: "gates"'),
                              ({"gates": [[2.0] * heads] * layers}, '"gates", layer 0, KV head 0 is 2', "[0, 1]"),
                              ({"gates": [["x"] * heads] * layers}, '"gates", layer 0, KV head 0 is string'),
                              ({"gates": [[0.5] * heads] * (layers + 1)}, "of the profile", "of the model")):
        (folder / "wrong").write_text(json.dumps({**found, **change}))
        checks.refuses(f"{base} --set profile=wrong", *expected)
    (folder / "wrong").write_text("gates")
    checks.refuses(f"{base} --set profile=wrong", "profile wrong is no JSON")
    checks.refuses(f"{base} --set profile=absent", "absent")
    checks.refuses("eval --model model --methods snapkv --budgets 40 --questions questions --set profile=gates", "profile")


def check_strategies(checks):
    """What packing strategies lose on a model's rows; what nobody can search is refused at once."""
    base = "strategies --model model --context 300 --families single --samples 2"
    checks.works(base, "2 segments", "25 % in groups of 1", "blocks of 8", "channel_loss=", "block_spread=")
    checks.works(f"{base} --channels 0.375 --group 4 --block 16", "37.5 % of the channels in groups of 4", "blocks of 16 in")
    for option, value, expected in (("--channels", "0.3", "0.375"), ("--group", "3", "1, 2 or 4"), ("--block", "32", "4, 8 or 16")):
        checks.refuses_at_once(f"strategies --model model {option} {value}", option, expected)
    for option, value, *expected in documents_nobody_can_make():
        checks.refuses_at_once(f"strategies --model model {option} {value}", *expected)
    checks.refuses(base.replace("300", "250"), "--context is 250; expected at least 256, of which a segment's basis is made")


def check_calibrate(checks):
    """A profile of any method that ranks, and what becomes of it; wrong numbers are refused before the model has read anything."""
    folder = checks.folder
    base = "calibrate --model model --context 300 --families single --samples 2 --out profile"
    checks.works(base, "snapkv over 2 prompts of 1 families", "Wrote profile")
    text = (folder / "profile").read_text()
    for method in ("kvzip", "expected_attention", "loopserve", "tangram --set chunk=64", "sentencekv"):
        checks.works(f"{base.replace('300', '200')} --method {method}", "Wrote profile")
        (folder / "profile").unlink()
    checks.refuses(f"{base} --method loopserve --set per=q_head", "rankings of a layer is 2", "1")
    for option, values in (("--share", ("0", "1.00000000001", "1e-7", "x")), ("--alpha", ("-1", "1000000.0000001", "inf"))):
        for value in values:
            checks.refuses_at_once(f"{base} {option} {value}", option)
    for option, value, *expected in documents_nobody_can_make():
        checks.refuses_at_once(f"calibrate --model model --out other {option} {value}", *expected)
    (folder / "profile").write_text(text)
    (folder / "again").write_text(text.replace('"alpha": 2', '"alpha": 3'))
    ask = "eval --model model --methods tangram --questions questions --json report --set chunk=8 --set window=2 --set profile="
    held = []
    for name in ("profile", "-"):  # read once, though every question has a cache of its own
        checks.works(f"{ask}{name}", input=text)
        held.append([cell["bytes_held"] for cell in json.loads((folder / "report").read_text())])
    checks.require(held[0] == held[1], ask, f"standard input and the file make other caches: {held}")
    checks.refuses(f"{ask}profile --set alpha=1000000.0000001", "alpha is 1")
    varied = "eval --model model --methods tangram --questions questions --json report --budgets 40,64 --set window=4"
    checks.works(f"{varied} --vary profile=profile,again")
    rows = [(cell["budget"], cell.get("differs", "")) for cell in json.loads((folder / "report").read_text())
            if cell["turn"] == 1 and cell["family"] == "mine"]
    checks.require(rows == [(40, ""), (64, ""), (None, "profile=profile"), (None, "profile=again")], varied, rows)
    checks.refuses(f"{varied} --set profile=profile --vary profile=none".replace("--budgets 40,64 ", ""), "--vary profile is none")
    (folder / "report").unlink()


def check_ranges(checks):
    """Every number of every method at the ends of its range, and beyond."""
    (checks.folder / "all").write_bytes(safetensors({**layer(n_q=60), "boundaries": ("U8", [60], bytes(59) + b"\1"),
                                                      "boundaries_decode": ("U8", [3], bytes(3))}))
    (checks.folder / "all_gates").write_text(json.dumps(
        {"kind": "tessera head gates", "version": 1, "model": "", "sinks": 4, "recent": 8, "questions": 1, "gates": [[0.2, 0.7]]}))
    needed = {"expected_attention": "--set rope_theta=10000", "duo_attention": "--set profile=all_gates"}
    has_device = checks.has_cuda and shutil.which("nvidia-smi") is not None
    methods = json.loads(checks.works("list --json"))["methods"]
    for method, backend in ((one, name) for one in methods for name in ["cpu"] + ["cuda"] * has_device
                            if name in one["backends"]):
        budget = "--budget 40" if method["has_budget"] else ""
        for parameter in method["parameters"]:
            ends = re.fullmatch(r"(-?[\d.e+-]+) to ([\d.e+-]+)", parameter["allowed"])
            if not ends:
                continue
            command = (f"compress --in all --out kept --threads 1 --backend {backend} --method {method['name']} {budget} "
                       f"{needed.get(method['name'], '')} --set {parameter['name']}=")
            if all(re.fullmatch(r"-?\d+", end) for end in (*ends.groups(), parameter["default"])):
                least, most = (int(end) for end in ends.groups())
                inside, outside = (least, least + 1, most - 1, most), (least - 1, most + 1)
            else:
                least, most = (float(end) for end in ends.groups())
                inside, outside = (least, (least + most) / 2, most), (-1e-30, most * 1.001, "1e39", "nan", "-inf")
            for value in inside:
                result = checks.run(f"{command}{value}")
                fine = result.returncode == 0 or (result.returncode == 2 and without_progress(result.stderr).count("\n") == 1)
                if not fine or "internal" in result.stderr:
                    checks.complain(f"{command}{value}", result, "expected a result or a sentence")
                (checks.folder / "kept").unlink(missing_ok=True)
            for value in (*outside, 2147483548, 10**12):
                checks.refuses(f"{command}{value}", parameter["name"])


def main():
    with tempfile.TemporaryDirectory() as name:
        checks = Checks(pathlib.Path(name))
        check_help(checks)
        compress.check_compress(checks)
        compress.check_compress_more(checks)
        check_run(checks)
        check_eval(checks)
        check_agree(checks)
        check_heads(checks)
        check_calibrate(checks)
        check_strategies(checks)
        check_model(checks)
        check_signs_of_life(checks)
        check_ranges(checks)
        system.check_outputs(checks)
        system.check_inputs(checks)
        system.check_streams(checks)
        system.check_limits(checks)
        system.check_interruption(checks)
    print(f"{checks.count} commands, {checks.failures} failures")
    return 1 if checks.failures else 0


if __name__ == "__main__":
    sys.exit(main())
