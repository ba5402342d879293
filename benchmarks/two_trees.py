#!/usr/bin/env python3
"""Compares the benchmarks that two trees' bench_cuda have in common, on one machine.

    benchmarks/two_trees.py --old BENCH_CUDA --new BENCH_CUDA [--families a,b,...] [--rounds COUNT] [--limit SECONDS] [--out FILE]

Each family runs in a process of its own, old and new in turns, COUNT times (2 unless given): what runs before in a process
moves small kernels. A benchmark's figure is the median of its rounds' medians. Prints what the new tree takes more than 2 % longer
for, and how many benchmarks were compared; --out takes all of them as a table. Passes when nothing is worse.
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

WORSE = 1.02


def names(program):
    listed = subprocess.run([program, "--benchmark_list_tests=true"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return [re.sub("/iterations:.*", "", line) for line in listed.split("\n") if line]


def measured(program, family, limit):
    """{name: microseconds} of one process."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        try:
            subprocess.run([program, f"--benchmark_filter=^{family}(/|$)", f"--benchmark_out={report}",
                            "--benchmark_out_format=json"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           timeout=max(1.0, limit), check=False)
            runs = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
        except (subprocess.TimeoutExpired, OSError, ValueError):
            return {}
    return {re.sub("/iterations:.*", "", run["run_name"]): run["real_time"] for run in runs
            if run.get("aggregate_name") == "median" and not run.get("error_occurred")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True)
    parser.add_argument("--new", required=True)
    parser.add_argument("--families")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=3600)
    parser.add_argument("--out")
    given = parser.parse_args()
    deadline = time.monotonic() + given.limit

    common = set(names(given.old)) & set(names(given.new))
    families = given.families.split(",") if given.families else sorted({name.split("/")[0] for name in common})
    times = {name: ([], []) for name in common if name.split("/")[0] in families}
    for family in families:
        for _ in range(given.rounds):
            for which, program in enumerate((given.old, given.new)):
                for name, us in measured(program, family, deadline - time.monotonic()).items():
                    if name in times:
                        times[name][which].append(us)
        print(f"{family}: {sum(1 for name in times if name.split('/')[0] == family)} benchmarks", flush=True)

    rows = [(name, statistics.median(old), statistics.median(new)) for name, (old, new) in sorted(times.items()) if old and new]
    worse = [row for row in rows if row[2] > row[1] * WORSE]
    table = ["| benchmark | old, us | new, us | new / old |", "| --- | --- | --- | --- |"]
    table += [f"| `{name}` | {old:.4g} | {new:.4g} | {new / old:.3f} |" for name, old, new in rows]
    if given.out:
        pathlib.Path(given.out).write_text("\n".join(table) + "\n", encoding="utf-8")
    for name, old, new in worse:
        print(f"worse: {name} {old:.4g} to {new:.4g} us, {new / old:.3f}")
    unmeasured = len(times) - len(rows)
    print(f"{len(rows)} benchmarks compared, {len(worse)} more than 2 % slower, {unmeasured} not measured")
    return 1 if worse or unmeasured else 0


if __name__ == "__main__":
    sys.exit(main())
