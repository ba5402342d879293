#!/usr/bin/env python3
"""Asks the same questions on the GPU and on the CPU, through the tool, and compares the answers.

    benchmarks/gpu_tool.py --tool PATH [--out FILE] [--scale FRACTION] [--jobs COUNT] [--limit SECONDS]

Runs `tessera eval` on both backends over every method of `tessera list`, every budget, every family of tasks
(conversations among them) and several lengths of documents, and over questions from a file. A method that refuses a
budget on the CPU is left out at this budget, by name, and must be refused on the GPU in the same words. Passes when no
evaluation fails and at most 1 % of the answers differ. Prints one line for each failure and a verdict at the end;
--out takes the figures as JSON. --scale lowers the number of lengths and budgets.
"""
import argparse
import concurrent.futures
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "model"
TASKS = ROOT / "examples" / "data" / "tasks.json"
TEXT = ROOT / "examples" / "data" / "opticks.txt"
BUDGETS = (48, 64, 128, 256, 512, 1024)
CONTEXTS = (8192, 4096, 2048, 1024)  # the longest first: they decide when everything is done
MOST_DIFFERENT = 0.01
METHODS_A_RUN = 4  # of the CPU: a longer run would outlast the others


class Tool:
    def __init__(self, path, deadline):
        self.path = path
        self.deadline = deadline

    def run(self, *arguments):
        """(exit status, output and errors)"""
        seconds = max(1.0, self.deadline - time.monotonic())
        try:
            done = subprocess.run([self.path, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  errors="replace", timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return 124, "out of time"
        return done.returncode, (done.stdout if done.returncode == 0 else done.stderr).strip()

    def evaluate(self, backend, methods, budgets, asked):
        """({(method, budget, family, turn): answers}, error)"""
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.json"
            status, said = self.run(
                "eval", "--model", str(MODEL), "--tasks", str(TASKS), "--text", str(TEXT), "--backend", backend, "--threads",
                "1", "--methods", ",".join(methods), "--budgets", ",".join(map(str, budgets)), "--json", str(report), *asked)
            if status != 0:
                return {}, said or f"exit status {status}"
            cells = json.loads(report.read_text(encoding="utf-8"))
        return {(cell["method"], cell["budget"], cell["family"], cell["turn"]): (cell["answers"], cell["right"])
                for cell in cells}, None


def write_questions(path):
    """Questions that no generator made: text of the book and notes in it, in one turn and in three."""
    words = TEXT.read_text(encoding="utf-8").split()
    with open(path, "w", encoding="utf-8") as file:
        for number, length in enumerate((150, 400, 900, 1600)):
            begin = 5000 * (number + 1)
            note = lambda name, value: f"The secret code of {name} is {value}."
            text = words[begin:begin + length]
            text[length // 3:length // 3] = [note("amber anchor", "basket camel")]
            text[2 * length // 3:2 * length // 3] = [note("bold castle", "bottle candle")]
            ask = lambda name: f"\nQuestion: What is the secret code of {name}?\nAnswer:"
            turns = [{"prompt": " ".join(text) + ask("amber anchor"), "answer": "basket camel"}]
            if number % 2:
                turns += [{"prompt": ask("bold castle"), "answer": "bottle candle"},
                          {"prompt": ask("amber anchor"), "answer": "basket camel"}]
            file.write(json.dumps({"family": f"file_{length}", "turns": turns}) + "\n")


def find_refusals(tool, pool, methods, budgets, asked):
    """{(method, budget): sentence} of what the CPU refuses."""
    pairs = list(itertools.product(methods, budgets))
    outcomes = pool.map(lambda pair: tool.evaluate("cpu", [pair[0]], [pair[1]], asked), pairs)
    return {pair: error for pair, (_, error) in zip(pairs, outcomes) if error}


def grouped(methods, budgets, refusals):
    """[(methods, budgets)]: methods that take the same budgets together."""
    taken = {}
    for method in methods:
        accepted = tuple(budget for budget in budgets if (method, budget) not in refusals)
        if accepted:
            taken.setdefault(accepted, []).append(method)
    return [(names, accepted) for accepted, names in taken.items()]


def same_words(cpu, gpu):
    return cpu.splitlines()[-1:] == gpu.splitlines()[-1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True)
    parser.add_argument("--out")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=500)
    parser.add_argument("--backend", default="cuda", help="what is compared with the CPU")
    given = parser.parse_args()
    begin = time.monotonic()
    tool = Tool(str(pathlib.Path(given.tool).resolve()), begin + given.limit)

    status, listed = tool.run("list", "--json")
    if status != 0:
        sys.exit(f"gpu_tool.py: {listed}")
    methods = [method["name"] for method in json.loads(listed)["methods"]]
    families = list(json.loads(TASKS.read_text(encoding="utf-8"))["families"])
    budgets = BUDGETS[:max(1, round(len(BUDGETS) * given.scale))]
    contexts = CONTEXTS[len(CONTEXTS) - max(1, round(len(CONTEXTS) * given.scale)):]

    failures, cpu, gpu, gpu_seconds = [], {}, {}, 0.0
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        questions = str(pathlib.Path(folder) / "questions.jsonl")
        write_questions(questions)
        short = ["--context", "512", "--families", families[0], "--count", "1"]
        refusals = find_refusals(tool, pool, methods, budgets, short)
        groups = grouped(methods, budgets, refusals)

        # On the CPU every document and a few methods are a process; on the GPU everything of one length is.
        def on_cpu(names, taken, context, asked):
            answers, error = tool.evaluate("cpu", names, taken, asked)
            return context, answers, error and f"cpu, {context}, {','.join(names)}: {error}"

        waiting = []
        for context in contexts:
            for family in families:
                for names, taken in groups:
                    for first in range(0, len(names), METHODS_A_RUN):
                        waiting.append(pool.submit(on_cpu, names[first:first + METHODS_A_RUN], taken, context,
                                                   ["--context", str(context), "--families", family, "--count", "1"]))
        for names, taken in groups:
            waiting.append(pool.submit(on_cpu, names, taken, "file", ["--questions", questions]))

        gpu_begin = time.monotonic()
        for context in ("file", *contexts):
            asked = (["--questions", questions] if context == "file" else
                     ["--context", str(context), "--families", ",".join(families), "--count", "1"])
            for names, taken in groups:
                answers, error = tool.evaluate(given.backend, names, taken, asked)
                for name in names if error and len(names) > 1 else ():  # who was it?
                    alone, error_alone = tool.evaluate(given.backend, [name], taken, asked)
                    answers.update(alone)
                    if error_alone:
                        failures.append(f"{given.backend}, {context}, {name}: {error_alone}")
                    error = None
                if error:
                    failures.append(f"{given.backend}, {context}, {','.join(names)}: {error}")
                gpu.update({(context, *key): value for key, value in answers.items()})
        for (method, budget), words in refusals.items():
            _, error = tool.evaluate(given.backend, [method], [budget], short)
            if not error or not same_words(words, error):
                failures.append(f"{given.backend}, {method} at {budget}: {error or 'answers'}; the CPU refuses: {words}")
        gpu_seconds = time.monotonic() - gpu_begin
        for done in concurrent.futures.as_completed(waiting):
            context, answers, error = done.result()
            if error:
                failures.append(error)
            cpu.update({(context, *key): value for key, value in answers.items()})

    asked = different = other_verdict = 0
    worst, examples = {}, []
    for key in sorted(set(cpu) & set(gpu), key=str):
        (expected, right), (got, got_right) = cpu[key], gpu[key]
        asked += len(expected)
        count = sum(one != other for one, other in itertools.zip_longest(expected, got))
        different += count
        other_verdict += abs(right - got_right)
        if count:
            worst[key[1]] = worst.get(key[1], 0) + count
            examples.append({"where": [*key], "cpu": expected, "gpu": got})
    unmatched = len(set(cpu) ^ set(gpu))
    if unmatched and not failures:
        failures.append(f"{unmatched} answers were given by one backend only")

    for failure in failures:
        print(f"FAILED {failure}")
    for example in examples[:5]:
        print(f"differs {example['where']}: cpu {example['cpu']!r}, {given.backend} {example['gpu']!r}")
    skipped = {}
    for method, budget in refusals:
        skipped.setdefault(method, []).append(budget)
    left_out = ", ".join(f"{method} at {'/'.join(map(str, refused))}" for method, refused in skipped.items())
    good = not failures and asked > 0 and different <= MOST_DIFFERENT * asked
    seconds = time.monotonic() - begin
    verdict = (f"{different} of {asked} answers differ from the CPU's ({100 * different / max(asked, 1):.2f} %), "
               f"{other_verdict} of them in right or wrong; {len(failures)} evaluations failed; left out: {left_out or 'none'}")
    if given.out:
        pathlib.Path(given.out).write_text(json.dumps({
            "asked": asked, "different": different, "other_verdict": other_verdict, "failures": failures,
            "left_out": [{"method": m, "budget": b, "words": words} for (m, b), words in refusals.items()],
            "different_by_method": worst, "examples": examples[:20], "methods": methods, "families": families,
            "budgets": budgets, "contexts": contexts, "seconds": seconds, "gpu_seconds": gpu_seconds,
            "verdict": verdict, "passed": good}, indent=1) + "\n", encoding="utf-8")
    print(f"{'passed' if good else 'FAILED'} in {seconds:.0f} s ({gpu_seconds:.0f} on the GPU): {verdict}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
