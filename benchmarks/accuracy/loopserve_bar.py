#!/usr/bin/env python3
"""LoopServe's answers against the full cache's: how many points each method loses, cell by cell.

    benchmarks/accuracy/loopserve_bar.py FOLDER --tool TESSERA [--backend cpu|cuda] [--set alpha=0.995 ...] [--count 100]
        [--contexts 2048,4096] [--chunks 512,2048,whole] [--turns 1,3,5,9] [--families NAME,...] [--processes 1] [--seconds 540]

A cell is a family of questions at a context, handed over in chunks of a size; the budget is a sixteenth of the context. The families ask at
the beginning, in the middle and at the end; dialogues bring new text in every turn, and each of their turns is a cell. A report of
`tessera eval` lies in FOLDER for each run: runs whose report is there are not asked again, so that a run which was stopped goes on. A folder
is for one --set, --count and --backend. Long answers are asked over `observed` and the budget and only reported, but for one: `observed` 96, pooled, 12 % of
the tokens, 75 % right.

Ends with 0 if every cell that was asked is within 3 points of `full`, with 1 if one is not, and with 2 if runs are missing.
"""
import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
METHODS = ("loopserve", "loopserve_prefill", "loopserve_decode")
FAMILIES = ("single", "single_first", "single_middle", "multi_key", "multi_value", "multi_query", "variable_tracking", "frequent_words",
            "conversation")
DIALOGUES = tuple(f"{kind}_{place}" for kind in ("passages", "fragments", "examples") for place in ("first", "middle", "last"))
POINTS = 3


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    arguments: tuple
    context: int
    chunk: str
    turns: int = 0       # of a dialogue
    reported: bool = False  # and not judged


def runs(given):
    """The runs in order: short ones, and those of chunks that differ most, first."""
    chosen = given.families.split(",") if given.families else [*FAMILIES, *DIALOGUES, "long_answer"]
    own = [word for one in given.set for word in ("--set", one)]
    for context in given.contexts:
        for chunk in given.chunks:
            base = ("--context", str(context), "--chunk", chunk, "--count", str(given.count))
            judged = ("--methods", ",".join(("full", *METHODS)), "--budgets", str(context // 16), *own)
            for family in chosen:
                if family in FAMILIES:
                    yield Run(f"{context}-{chunk}-{family}", (*base, "--families", family, *judged), context, chunk)
            for turns in given.turns:
                for family in chosen:
                    if family in DIALOGUES:
                        yield Run(f"{context}-{chunk}-{family}-{turns}", (*base, "--families", family, "--turns", str(turns), *judged),
                                  context, chunk, turns)
        if "long_answer" in chosen:
            budgets = sorted({context // 32, context // 16, context // 8, round(0.12 * context)})
            for observed in (16, 48, 96):
                taken = ",".join(str(budget) for budget in budgets if budget >= observed)
                yield Run(f"{context}-long_answer-{observed}",
                          ("--context", str(context), "--count", str(given.count), "--families", "long_answer", "--methods",
                           "full,loopserve_decode", "--budgets", taken, "--set", f"observed={observed}", "--vary",
                           "loopserve_decode.pool=7"), context, "2048", reported=True)


def work(waiting, given, folder):
    """Asks what has no report. As many processes at a time as were asked for."""
    began, running = time.monotonic(), {}
    waiting = [run for run in waiting if not (folder / f"{run.name}.json").is_file()]
    while True:
        for process in [one for one in running if one.poll() is not None]:
            run = running.pop(process)
            if process.returncode == 0:
                (folder / f"{run.name}.part").rename(folder / f"{run.name}.json")
            else:
                print(f"{run.name}: {(folder / f'{run.name}.err').read_text()[-300:]}", flush=True)
        if time.monotonic() - began > given.seconds:
            break
        while waiting and len(running) < given.processes:
            run = waiting.pop(0)
            command = [given.tool, "eval", "--model", str(ROOT / "examples/model"), *run.arguments, "--backend", given.backend, "--threads",
                       "1", "--text", str(ROOT / "examples/data/opticks.txt"), "--tasks", str(ROOT / "examples/data/tasks.json"), "--json",
                       f"{run.name}.part"]
            with open(folder / f"{run.name}.err", "w", encoding="utf-8") as err:
                running[subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=err)] = run
        if not running:
            break
        time.sleep(0.2)
    for process, run in running.items():
        process.kill()
        process.wait()
        print(f"stopped: {run.name}")


def percent(cell):
    return 100 * cell["right"] / cell["questions"]


def judge(run, cells):
    """Rows of the table, and whether each is within the points."""
    full = {(cell["family"], cell["turn"]): percent(cell) for cell in cells if cell["method"] == "full"}
    for cell in cells:
        if cell["method"] == "full":
            continue
        lost = full[cell["family"], cell["turn"]] - percent(cell)
        name = f"{cell['family']} {run.turns or ''}".strip() + (f", turn {cell['turn']}" if cell["turn"] > 1 or run.turns else "")
        row = (run.context, run.chunk, name, cell["questions"], full[cell["family"], cell["turn"]], cell["method"], cell["budget"] or "-",
               percent(cell), lost, 100 * cell.get("prompt_pairs", 1))
        if not run.reported:
            yield row, lost <= POINTS
            continue
        parameters = cell["parameters"]
        row = (*row[:5], f"{row[5]} observed={parameters['observed']} pool={parameters['pool']}", *row[6:])
        is_bar = parameters["observed"] == 96 and parameters["pool"] == 7 and cell["budget"] == round(0.12 * run.context)
        yield row, percent(cell) >= 75 if is_bar else None


def report(all_runs, folder):
    missing, misses, judged = 0, 0, 0
    print("| context | chunk | family | questions | `full` | method | budget | right % | points lost | pairs % | within |")
    print("|" + " --- |" * 11)
    for run in all_runs:
        file = folder / f"{run.name}.json"
        if not file.is_file():
            missing += 1
            continue
        for row, holds in judge(run, json.loads(file.read_text(encoding="utf-8"))):
            judged += holds is not None
            misses += holds is False
            said = {True: "yes", False: "**no**", None: ""}[holds]
            print("| " + " | ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row) + f" | {said} |")
    print(f"\n{judged - misses} of {judged} cells hold; {missing} of {len(all_runs)} runs are missing")
    return 1 if misses else 2 if missing else 0


def numbers(text):
    return [int(one) for one in text.split(",")]


def check(given):
    """Ends the script where a family is unknown, or the folder holds answers of other settings."""
    known = {*FAMILIES, *DIALOGUES, "long_answer"}
    for family in filter(None, given.families.split(",")):
        if family not in known:
            sys.exit(f"--families has '{family}'; expected some of {', '.join(sorted(known))}; take it out")
    asked = {"set": given.set, "count": given.count, "backend": given.backend}
    noted = given.folder / "asked"
    if not noted.is_file():
        noted.write_text(json.dumps(asked), encoding="utf-8")
    elif json.loads(noted.read_text(encoding="utf-8")) != asked:
        sys.exit(f"{given.folder} holds answers asked with {noted.read_text(encoding='utf-8')}; expected these; pass another folder")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--tool", type=lambda path: str(pathlib.Path(path).resolve()), required=True)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--set", action="append", default=[], help="a parameter of the methods, as tessera eval takes it")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--contexts", type=numbers, default=[2048, 4096])
    parser.add_argument("--chunks", type=lambda text: text.split(","), default=["512", "2048", "whole"])
    parser.add_argument("--turns", type=numbers, default=[1, 3, 5, 9])
    parser.add_argument("--families", default="")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    check(given)
    all_runs = list(runs(given))
    work(all_runs, given, given.folder.resolve())
    return report(all_runs, given.folder)


if __name__ == "__main__":
    sys.exit(main())
