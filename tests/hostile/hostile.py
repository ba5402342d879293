#!/usr/bin/env python3
"""Runs the command-line tool with hostile arguments, files, streams, limits and signals.

Usage: hostile.py TOOL EXAMPLES RUNS [SEED]

Of every run:
- it ends by itself: exit code 0 or 2, or 128 + the signal that it was sent;
- it says why on standard error when the code is not 0;
- no file is changed, made or removed but the one that it was told to write;
- what it says is JSON is JSON.
A run that breaks a rule is printed with its number: the same number and seed make it again.
"""
import json
import multiprocessing
import os
import pathlib
import random
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time

from hostile_runs import AREAS, HANG, Run
from sandbox import write_sandbox


def parse_strictly(text):
    """As any reader of JSON would: Python's takes NaN and Infinity."""
    def refuse(name):
        raise ValueError(name)
    json.loads(text, parse_constant=refuse)


def snapshot(folder):
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[path.relative_to(folder).as_posix()] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
    return found


def start(run, tool):
    def prepare():
        for what, most in run.limits:
            resource.setrlimit(what, (most, most))
        for stream in run.closed or ():
            os.close(stream)

    stdout = subprocess.PIPE if run.stdout == "pipe" else open("/dev/full", "wb")
    process = subprocess.Popen([tool, *run.words], cwd=run.folder, stdin=subprocess.PIPE, stdout=stdout,
                               stderr=subprocess.PIPE, preexec_fn=prepare)
    if run.signal:
        time.sleep(run.signal[1])
        process.send_signal(run.signal[0])
    try:
        out, err = process.communicate(run.stdin, timeout=HANG)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "hang", b"", b""
    return process.returncode, out or b"", err or b""


def problems(run, code, out, err, before, after):
    """What rules a finished run broke."""
    if code == "hang":
        yield f"hangs"
        return
    allowed = {0, 2} | ({128 + run.signal[0], -run.signal[0]} if run.signal else set())
    # A process that may not map its own libraries never reaches main.
    if run.limits and b"error while loading shared libraries" in err:
        allowed.add(127)
    if code not in allowed:
        yield f"exit code {code}"
    silent = run.closed and 2 in run.closed
    # A signal may come before the tool has asked to hear it.
    if code != 0 and not err and not silent and not (run.signal and code == -run.signal[0]):
        yield "says nothing on standard error"
    if b"internal error" in err:
        yield "an internal error"
    if code == 0 and run.json_on_stdout and run.stdout == "pipe" and not (run.closed and 1 in run.closed):
        try:
            parse_strictly(out)
        except ValueError:
            yield "prints what is no JSON"
    for name in before.keys() | after.keys():
        if before.get(name) == after.get(name) or name in run.may_change or name == ".":
            continue
        if name not in before or name not in after or before[name][:3] != after[name][:3]:
            yield f"changed {name}"
    for device in ("/dev/null", "/dev/zero", "/dev/full"):
        if not stat.S_ISCHR(os.stat(device).st_mode):
            yield f"{device} is no device any more"
    written = run.folder / "out"
    writes_json = "--json" in run.words or run.words[:1] in (["calibrate"], ["heads"])
    if writes_json and code == 0 and "out" in run.may_change and written.is_file():
        try:
            parse_strictly(written.read_bytes())
        except ValueError:
            yield "wrote what is no JSON"


def work(task):
    tool, master, methods, seed, first, count = task
    failures = []
    with tempfile.TemporaryDirectory(prefix="tessera_hostile_") as name:
        folder = pathlib.Path(name) / "sandbox"
        copy_master(master, folder)
        untouched = snapshot(folder)
        for number in range(first, first + count):
            random.seed(seed * 1_000_003 + number)
            run = Run(folder, methods)
            area = AREAS[number % len(AREAS)]
            area(run)
            for changed, content in run.files.items():
                (folder / changed).write_bytes(content)
            before = snapshot(folder)
            code, out, err = start(run, tool)
            broken = list(problems(run, code, out, err, before, snapshot(folder)))
            if broken:
                failures.append(f"run {number} ({area.__name__}): {'; '.join(broken)}\n  tessera "
                                f"{' '.join(repr(word)[:200] for word in run.words)}\n  limits {run.limits} closed {run.closed}"
                                f" signal {run.signal}\n  stderr {err[:500]!r}")
            if run.files or run.may_change or broken:
                if {name: kept[:3] for name, kept in snapshot(folder).items()} != \
                        {name: kept[:3] for name, kept in untouched.items()}:
                    shutil.rmtree(folder)
                    copy_master(master, folder)
                    untouched = snapshot(folder)
    return failures


def copy_master(master, folder):
    """Links stay links, a FIFO is made anew."""
    folder.mkdir()
    for path in sorted(pathlib.Path(master).iterdir()):
        target = folder / path.name
        if path.is_symlink():
            target.symlink_to(os.readlink(path))
        elif path.is_dir():
            shutil.copytree(path, target)
        elif path.is_fifo():
            os.mkfifo(target)
        else:
            shutil.copy2(path, target)


def main():
    tool, examples = str(pathlib.Path(sys.argv[1]).resolve()), pathlib.Path(sys.argv[2]).resolve()
    runs, seed = int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 1
    methods = json.loads(subprocess.run([tool, "list", "--json"], capture_output=True, check=True).stdout)["methods"]
    Run.memory_limits = subprocess.run([tool, "--version"], capture_output=True, check=False, preexec_fn=lambda:
                                       resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))).returncode == 0
    Run.least_file = 1 if b"__tsan_init" in pathlib.Path(tool).read_bytes() else 0
    begin = time.time()
    with tempfile.TemporaryDirectory(prefix="tessera_hostile_") as name:
        master = pathlib.Path(name) / "master"
        master.mkdir()
        write_sandbox(master, examples)
        share = min(100, max(1, runs // (2 * (len(os.sched_getaffinity(0))))))
        tasks = [(tool, master, methods, seed, first, min(share, runs - first)) for first in range(0, runs, share)]
        failures = []
        with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
            for found in pool.imap_unordered(work, tasks):
                failures += found
                for failure in found:
                    print(f"FAILED {failure}", flush=True)
    print(f"{runs} runs, {len(failures)} failures, {time.time() - begin:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
