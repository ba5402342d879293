#!/usr/bin/env python3
"""Asks the example model what its methods are worth: one report of `tessera eval` a cell, as many cells at once as asked for.

    benchmarks/experiments.py FOLDER --tool TESSERA [--ablations TESSERA] [--fp8 TESSERA] [--lines LINE_PROFILE]
                              [--only sablock,loopserve,...] [--backend cpu|cuda] [--processes 16] [--seconds 540]

Cells whose report lies in FOLDER are not asked again, so that a run which was stopped goes on. The most important cells come first, those of
all experiments in turn.
--ablations is a tool built with -DTESSERA_MORE_METHODS=benchmarks/ablations, --fp8 one built with
-DTESSERA_TOOL_LAYOUT='tessera::stored<tessera::fp8_rows<T, D>, tessera::runs>'; without them their cells are left out.
--backend cuda asks a GPU, where it can: methods that are the host's alone, profiles and lines stay on the CPU.
benchmarks/plots/plot_experiments.py makes tables and pictures of FOLDER.
"""
import argparse
import dataclasses
import json
import pathlib
import random
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples/model"
FAMILIES = ("single", "single_first", "single_middle", "multi_key", "multi_value", "multi_query", "variable_tracking",
            "frequent_words", "long_answer", "conversation")
HARD = ("multi_key", "multi_value", "multi_query", "variable_tracking", "frequent_words", "long_answer")  # what methods lose first
WALKS = ("single_first", "single_middle", "single", "long_answer", "conversation", "conversation_9")
SHARES = (0.7, 0.5, 0.3, 0.1, 0.05)
CROSSED, SOURCES = (0.1, 0.05), ("single", "frequent_words", "long_answer")  # shares and families of profiles that serve all families
LENGTHS = (1024, 2048, 4096, 8000)
DEPTHS = (0, 25, 50, 75, 100)
SHAPES = [word for setting in ("a_shape.init=16", "a_shape.local=256", "tri_shape.init=16", "tri_shape.local=256",
                               "tri_shape.dense_rows=64", "minference.vertical=128", "minference.slash=384")
          for word in ("--set", setting)]  # for the 2,048 tokens here as published ones are for 32,768
WHOLE = "16384"  # no prompt here is longer: one chunk


@dataclasses.dataclass
class Cell:
    name: str
    arguments: list
    tool: str = "tool"
    needs: tuple = ()  # files of other cells
    rank: int = 0  # cells of a lower one come first
    host_only: bool = False


def evaluation(name, families, context, count, methods, *more, seed=1, **others):
    return Cell(name, ["eval", "--families", families, "--context", context, "--count", count, "--seed", seed,
                       "--methods", methods, *more], **others)


def vary(**values):
    return [word for name, list_ in values.items() for word in ("--vary", f"{name.replace('__', '.')}={list_}")]


def over_seeds(name, families, context, count, *more, chunk=5, rank=0, **others):
    """`count` documents of each family, `chunk` a cell: another seed makes others, which come later."""
    for seed in range(1, count // chunk + 1):
        for family in families:
            yield evaluation(f"{name}-{context}-{family}-{seed}", family, context, chunk, *more, seed=seed,
                             rank=rank + (seed > 1), **others)


def sablock():
    keys = ("multi_key", "multi_key_first")
    small = "10,12,16,24,32"
    for context in (4096, 8192):
        yield from over_seeds("sablock-parts", keys, context, 20 if context == 4096 else 10, "full,snapkv,sablock", "--budgets", "48,96",
                              *vary(sablock__lambda="0", sablock__largest="1", snapkv__window="8"))
    yield from over_seeds("sablock-sweep", keys, 4096, 10, "sablock", "--budgets", "48", *vary(
        **{"lambda": "0,0.1,0.3,0.7,0.9", "alpha": "0.1,0.3,0.7,0.9", "coverage": "0.1,0.3,0.5,0.7,1"}), rank=1)
    yield from over_seeds("sablock-fixed", keys, 4096, 10, "sablock", "--budgets", f"{small},48,96,256", "--set", "coverage=0", "--set",
                          "largest=1", *vary(largest="3,5,7,9,10"), rank=1)
    yield from over_seeds("sablock-small", keys, 4096, 10, "snapkv,sablock", "--budgets", small, "--set", "window=8",
                          *vary(sablock__lambda="0", sablock__largest="1"), rank=1)
    for length in LENGTHS:
        yield Cell(f"sablock-map-{length}", ["eval", "--questions", f"needles-{length}.jsonl", "--methods",
                                             "full,streaming_llm,h2o,snapkv,chunkkv,sablock", "--budgets", "48,96"], rank=1)


def loopserve():
    """B is a sixteenth of the context."""
    yield from over_seeds("loopserve-decode", WALKS, 2048, 10, "full,snapkv,ada_snapkv,loopserve_decode", "--budgets", "128",
                          *vary(loopserve_decode__pool="7"))
    yield from over_seeds("loopserve-lines", WALKS, 2048, 10, "loopserve,loopserve_prefill,a_shape,tri_shape,minference",
                          "--budgets", "128", *vary(loopserve__pool="7"), *SHAPES)
    yield from over_seeds("loopserve-alpha", WALKS, 2048, 5, "loopserve,loopserve_prefill", "--budgets", "128", "--set",
                          "pool=7", *vary(alpha="0.9,0.98,0.99,0.995"), rank=1)
    yield Cell("lines-2048", [MODEL, ROOT / "examples/data/opticks.txt", 2048, 4], tool="lines", rank=1)
    for pool in (1, 7):
        yield from over_seeds(f"loopserve-steps-pool{pool}", WALKS, 2048, 5, "loopserve_decode", "--budgets", "128", "--set",
                              f"pool={pool}", *vary(every="1,4,32", observed="1,4,8,32", per="q_head"), rank=1)
        yield from over_seeds(f"loopserve-budgets-pool{pool}", WALKS, 2048, 5, "full,loopserve_decode,snapkv", "--budgets",
                              "32,64,128,256,512,1024", "--set", f"loopserve_decode.pool={pool}", rank=2)


def mosaickv():
    """A tenth of the tokens."""
    yield from over_seeds("mosaickv-bar", FAMILIES, 4096, 10, "full,mosaickv", "--budgets", "410")
    shares = "0.125,0.25,0.375,0.5,0.75"
    yield from over_seeds("mosaickv-ablation", HARD, 2048, 5, "full,mosaickv,mosaickv_plain,mosaickv_rotated,mosaickv_unrotated", "--budgets",
                          "205", *vary(mosaickv__strategy="searched", mosaickv_rotated__channels=shares,
                                       mosaickv_plain__channels=shares), tool="ablations", host_only=True)
    yield from over_seeds("mosaickv-table", HARD, 2048, 5, "mosaickv", "--budgets", "51,102,205,410", *vary(channels="0.125,0.5,0.75"), rank=2)
    yield from over_seeds("mosaickv-bar", (*HARD, "conversation"), 8192, 5, "full,mosaickv", "--budgets", "819", rank=2)
    yield from over_seeds("mosaickv-rows", FAMILIES, 2048, 10, "packed_snapkv,packed_rocketkv,think_snapkv",
                          "--budgets", "64,256", tool="ablations", rank=3, host_only=True)


def profile_name(share, family="all"):
    return f"profile-{family}-{share:g}"


def tangram():
    """Profiles are of other documents than those that are asked about; `even` gives every head the same share."""
    for share in SHARES:
        yield calibration(share)
    for share in CROSSED:
        for family in SOURCES:
            yield calibration(share, family)
    files = [f"{profile_name(share)}.json" for share in SHARES]
    even = [f"even-{share:g}.json" for share in SHARES]
    others = [f"{profile_name(share, family)}.json" for share in CROSSED for family in SOURCES]
    yield from over_seeds("tangram", FAMILIES, 2048, 10, "full,tangram", "--budgets", "205", "--set", f"chunk={WHOLE}",
                          *vary(profile=",".join(files + even + others)), needs=tuple(files + others))


def calibration(share, family=None):
    more = ["--families", family, "--samples", 10] if family else ["--samples", 30]
    name = profile_name(share, family or "all")
    return Cell(name, ["calibrate", "--share", share, "--context", 2048, "--seed", 7, "--renormalise", *more, "--out", f"{name}.json"])


FP8 = (("full,streaming_llm,random,knorm,keydiff,lagkv,h2o,tova,snapkv,pyramidkv,ada_snapkv,criticalkv,chunkkv,sablock",),
       ("hsa,quest,sparq,rocketkv,rocketkv_mt,exact_topk,sentencekv,expected_attention,tangram,loopserve_decode", "--set",
        f"chunk={WHOLE}"), ("mosaickv,think",), ("loopserve,loopserve_prefill",), ("kvzip",))


def fp8():
    for part, (methods, *more) in enumerate(FP8):
        yield from over_seeds(f"fp8-{part}", FAMILIES, 2048, 5, methods, "--budgets", "64,256", *more, tool="fp8", rank=2 if part < 2 else 4)


def rows():
    """Methods that the table at 2,048 tokens has not."""
    yield from over_seeds("rows-dense", FAMILIES, 2048, 20, "sentencekv,mosaickv,think,tangram,loopserve_decode,expected_attention",
                          "--budgets", "64,256", *vary(tangram__chunk=WHOLE, loopserve_decode__pool="7"), rank=3)
    yield Cell("heads", ["heads", "--context", 2048, "--count", 2, "--out", "heads.json"], rank=3)
    yield from over_seeds("rows-model", FAMILIES, 2048, 20, "kvzip,duo_attention", "--budgets", "64,256", "--set",
                          "duo_attention.profile=heads.json", needs=("heads.json",), rank=4)
    yield from over_seeds("rows-lines", FAMILIES, 2048, 20, "loopserve,loopserve_prefill,a_shape,tri_shape,minference", "--budgets",
                          "64,256", *vary(loopserve__pool="7"), *SHAPES, rank=4)


EXPERIMENTS = {one.__name__: one for one in (sablock, loopserve, mosaickv, tangram, fp8, rows)}


def needle_questions(tool, length, count):
    """One needle at each depth of texts of a length; the length in tokens follows from the tool's own count."""
    text = (ROOT / "examples/data/opticks.txt").read_text()
    tasks = json.loads((ROOT / "examples/data/tasks.json").read_text())
    probe = subprocess.run([tool, "run", "--model", MODEL, "--prompt", "-", "--method", "full", "--max-new", "1", "--json"],
                           input=text[:8000], check=True, capture_output=True, text=True).stdout
    per_token = 8000 / json.loads(probe)["prompt_tokens"]
    chance = random.Random(length)
    for depth in DEPTHS:
        for _ in range(count):
            size = int((length - 60) * per_token)
            begin = text.index("\n", chance.randrange(len(text) - size - 2000)) + 1
            lines = text[begin:begin + size].split("\n")
            name = f"{chance.choice(tasks['adjectives'])} {chance.choice(tasks['nouns'])}"
            value = " ".join(chance.sample(tasks["words"], tasks["value_words"]))
            lines.insert(round(depth / 100 * len(lines)), tasks["needle"].format(name=name, value=value))
            question = tasks["question"].format(question=tasks["ask_one"].format(name=name))
            yield {"family": f"{length} tokens, depth {depth}",
                   "turns": [{"prompt": "\n".join(lines) + "\n" + question + tasks["answer"], "answer": value}]}


def prepare(folder, tool):
    """What cells read beside the model: families of our own, questions of the needle map, profiles that give all heads the same."""
    tasks = json.loads((ROOT / "examples/data/tasks.json").read_text())
    tasks["families"]["multi_key_first"] = {"about": "eight needles; the question stands first", "needles": 8}
    (folder / "tasks.json").write_text(json.dumps(tasks))
    tasks["families"]["conversation"].update({"needles": 12, "turns": 9})
    (folder / "nine_turns.json").write_text(json.dumps(tasks))
    config = json.loads((MODEL / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    for share in SHARES:
        same = [[share] * heads] * layers
        (folder / f"even-{share:g}.json").write_text(json.dumps(
            {"version": 1, "model": "model", "method": "snapkv", "share": share, "samples": 1, "alpha": 2, "mean": same,
             "deviation": [[0.0] * heads] * layers, "budget": same}))
    for length in LENGTHS:
        file = folder / f"needles-{length}.jsonl"
        if not file.is_file():
            file.write_text("".join(json.dumps(one) + "\n" for one in needle_questions(tool, length, 2)))


def command_of(cell, tools, folder, backend):
    if cell.tool == "lines":
        return [tools[cell.tool], *map(str, cell.arguments)]
    command = [tools[cell.tool], cell.arguments[0], "--model", MODEL, *cell.arguments[1:], "--threads", 1]
    if cell.arguments[0] == "eval":
        command += ["--json", f"{cell.name}.part", "--backend", "cpu" if cell.host_only else backend]
        if "conversation_9" in cell.arguments:  # the family of conversations, of nine turns
            command[command.index("conversation_9")] = "conversation"
            command += ["--tasks", "nine_turns.json"]
        elif "--families" in cell.arguments:
            command += ["--tasks", "tasks.json"]
    if cell.arguments[0] != "eval" and "--text" not in cell.arguments:
        command += ["--text", ROOT / "examples/data/opticks.txt", "--tasks", ROOT / "examples/data/tasks.json"]
    elif "--families" in cell.arguments:
        command += ["--text", ROOT / "examples/data/opticks.txt"]
    return [str(word) for word in command]


def finish(cell, process, folder, began):
    name = folder / f"{cell.name}.json"
    part = folder / f"{cell.name}.part"
    if process.returncode == 0:
        if cell.tool == "lines":
            (folder / f"{cell.name}.out").rename(name)
        elif part.is_file():
            part.rename(name)
    said = "" if process.returncode == 0 else (folder / f"{cell.name}.err").read_text()[-300:]
    print(f"{time.time() - began:6.0f} s  {cell.name}: {process.returncode} {said}", flush=True)


def work(cells, tools, folder, backend, processes, seconds):
    began, running = time.time(), {}
    while True:
        for process in [one for one in running if one.poll() is not None]:
            finish(running.pop(process), process, folder, began)
        if time.time() - began > seconds:
            break
        ready = [cell for cell in cells if all((folder / file).is_file() for file in cell.needs)]
        while ready and len(running) < processes:
            cell = ready.pop(0)
            cells.remove(cell)
            with open(folder / f"{cell.name}.out", "w") as out, open(folder / f"{cell.name}.err", "w") as err:
                running[subprocess.Popen(command_of(cell, tools, folder, backend), cwd=folder, stdout=out, stderr=err)] = cell
        if not running:
            break
        time.sleep(0.2)
    for process, cell in running.items():
        process.kill()
        print(f"stopped: {cell.name}")
    print(f"{time.time() - began:.0f} s; {len(cells)} cells were not begun: {' '.join(cell.name for cell in cells[:20])}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    for name in ("tool", "ablations", "fp8", "lines"):
        parser.add_argument(f"--{name}", type=lambda path: str(pathlib.Path(path).resolve()), required=name == "tool")
    parser.add_argument("--only", default=",".join(EXPERIMENTS))
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tools = {name: getattr(given, name) for name in ("tool", "ablations", "fp8", "lines") if getattr(given, name)}
    prepare(folder, given.tool)
    lists = [sorted((cell for cell in EXPERIMENTS[name]() if cell.tool in tools), key=lambda cell: cell.rank)
             for name in given.only.split(",")]
    order = sorted(((cell.rank, place, cell) for cells in lists for place, cell in enumerate(cells)), key=lambda one: one[:2])
    cells = [cell for *_, cell in order if not (folder / f"{cell.name}.json").is_file()]
    work(cells, tools, folder, given.backend, given.processes, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
