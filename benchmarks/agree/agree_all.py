#!/usr/bin/env python3
"""Asks every method that keeps or reads fewer tokens how far its predictions are from the full cache's.

    benchmarks/agree/agree_all.py --tool PATH --model MODEL --out RECORD.json [--backend cpu|cuda] [--budgets LIST]
                                  [--prompt LIST] [--steps N] [--count N] [--jobs N] [--threads N] [--methods LIST]

Methods are those of `tessera list` that have a budget and run on the backend. Each of `--jobs` processes of `tessera agree` takes
a part of them, and passes the text through the model once for all of its part. Apart from them run a method that needs gates of
heads (`tessera heads` finds them first, on the CPU), and one whose prompts pass through the model twice: it gets shorter prompts
where the model's context holds no two. The default of --jobs is 1 on the CPU, whose cores one process uses, and 4 on a GPU.

RECORD.json has the rows of `tessera agree --json`, without parameters and with numbers of five digits: plot_agree.py draws them, and
agree_table.py makes the tables of docs/results.md. A method that fails is named with its error, the others are written all the same,
and the exit status is 1.
"""
import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import sys
import tempfile
import time

DATA = pathlib.Path(__file__).resolve().parent.parent.parent / "examples" / "data"
TEXT = ["--text", DATA / "opticks.txt"]
BUDGETS = "64,128,256,512,1024"
LEFT_OUT = ("parameters",)


class Failure(Exception):
    pass


def said(command):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                          check=False)
    if done.returncode != 0:
        raise Failure(done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}")
    return done.stdout


def listed(given):
    methods = json.loads(said([given.tool, "list", "--json"]))["methods"]
    wanted = given.methods.split(",") if given.methods else None
    return [method for method in methods if method["has_budget"] and given.backend in method["backends"]
            and (wanted is None or method["name"] in wanted)]


def parts_of(methods, jobs):
    """[methods of one process]: plain ones dealt out, then each of those that need more, alone."""
    alone = [method for method in methods if method["needs_profile"] or method["needs_engine"]]
    plain = [method for method in methods if method not in alone]
    return [part for part in (plain[first::jobs] for first in range(jobs)) if part] + [[method] for method in alone]


def rows_of(given, part, folder, prompts):
    report = folder / f"{part[0]['name']}.json"
    command = [given.tool, "agree", "--model", given.model, "--methods", ",".join(method["name"] for method in part), "--budgets",
               given.budgets, "--prompt", ",".join(map(str, prompts)), "--steps", given.steps, "--count", given.count, "--backend",
               given.backend, "--threads", given.threads, "--json", report, *TEXT]
    if part[0]["needs_profile"]:
        gates = folder / "gates.json"
        said([given.tool, "heads", "--model", given.model, "--context", 2048, "--count", 1, "--families", "single,multi_key",
              "--tasks", DATA / "tasks.json", *TEXT, "--out", gates])
        command += ["--set", f"{part[0]['name']}.profile={gates}"]
    said(command)
    return json.loads(report.read_text())


def asked(given, part, folder):
    """(rows, errors). Where a part fails, its methods are asked one by one."""
    prompts = [int(length) for length in given.prompt.split(",")]
    try:
        try:
            return rows_of(given, part, folder, prompts), []
        except Failure:
            if not part[0]["needs_engine"]:
                raise
            return rows_of(given, part, folder, [length * 7 // 8 for length in prompts]), []
    except Failure as failure:
        if len(part) == 1:
            return [], [f"{part[0]['name']}: {failure}"]
        alone = [asked(given, [method], folder) for method in part]
        return [row for rows, _ in alone for row in rows], [error for _, errors in alone for error in errors]


def compact(row):
    digits = lambda value: float(f"{value:.5g}") if isinstance(value, float) else value
    kept = {key: digits(value) for key, value in row.items() if key not in LEFT_OUT}
    kept["kl_by_step"] = [digits(value) for value in row["kl_by_step"]]
    return kept


def written(rows, file):
    """One line a row; a row of the full cache for each length once."""
    once = {}
    for row in rows:
        once.setdefault((row["prompt"], row["method"] != "full", row["method"], row["budget"]), row)
    ordered = [once[key] for key in sorted(once, key=lambda key: (key[0], key[1], key[2], key[3] or 0))]
    file.write_text("[\n" + ",\n".join(json.dumps(compact(row)) for row in ordered) + "\n]\n")
    return len(ordered)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True, type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--prompt", default="4096")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--methods", default="", help="only these")
    parser.add_argument("--jobs", type=int)
    given = parser.parse_args()
    begin = time.monotonic()
    jobs = given.jobs or (4 if given.backend == "cuda" else 1)
    rows, errors = [], []
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        parts = parts_of(listed(given), jobs)
        waiting = {pool.submit(asked, given, part, pathlib.Path(folder)): part for part in parts}
        for done in concurrent.futures.as_completed(waiting):
            found, failed = done.result()
            rows += found
            errors += failed
            names = ", ".join(method["name"] for method in waiting[done])
            print(f"{time.monotonic() - begin:6.0f} s  {names}: {len(found)} rows", flush=True)
            written(rows, given.out)  # what is there stays, whatever happens to the rest
    for error in errors:
        print(f"FAILED {error}", file=sys.stderr)
    print(f"{written(rows, given.out)} rows in {given.out}, {time.monotonic() - begin:.0f} s")
    return 1 if errors or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
