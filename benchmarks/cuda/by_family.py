#!/usr/bin/env python3
"""Runs the benchmarks of a program, each family (what stands before the first '/') in a process of its own, and joins the reports.

    benchmarks/cuda/by_family.py PROGRAM OUT.json

What ran before in a process moves small kernels: on an H200, 2026-11-22, RocketKV's choice took 10.7 us alone and 13.6 after the 200
benchmarks that stand before it, kernels of 5 us took 0.4 us longer.
"""
import json
import subprocess
import sys
import tempfile


def main():
    program, out = sys.argv[1:]
    listed = subprocess.run([program, "--benchmark_list_tests=true"], check=True, capture_output=True, text=True).stdout
    families = dict.fromkeys(line.split("/")[0] for line in listed.splitlines())
    report, failed = {}, 0
    for family in families:
        with tempfile.NamedTemporaryFile(suffix=".json") as part:
            failed += subprocess.run([program, f"--benchmark_filter=^{family}(/|$)", f"--benchmark_out={part.name}",
                                      "--benchmark_out_format=json"]).returncode != 0
            try:
                one = json.load(part)
            except ValueError:
                print(f"by_family.py: {family} wrote no report", flush=True)
                continue
        report.setdefault("context", one["context"])
        report.setdefault("benchmarks", []).extend(one["benchmarks"])
    with open(out, "w") as file:
        json.dump(report, file, indent=1)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
