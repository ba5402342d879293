#!/usr/bin/env python3
"""Asks the same questions on the GPU and on the CPU, through the tool, and compares the answers.

    benchmarks/gpu_tool.py --tool PATH [--out FILE] [--scale FRACTION] [--budgets LIST] [--contexts LIST] [--jobs COUNT]
                           [--limit SECONDS]

Runs `tessera eval` on both backends over every method of `tessera list`, every budget, every family of tasks
(conversations among them) and several lengths of documents, and over questions from a file. Methods without a budget take
part once a document; the gates that duo_attention needs are found first, by `tessera heads`. A method that refuses a
budget on the CPU is left out at this budget, by name, and must be refused on the GPU in the same words. Passes when no
evaluation fails and at most 1 % of the answers are right on one backend and wrong on the other. Texts that differ are
counted too: once rounding has turned a near tie, a wrong answer goes on in other words. Prints progress, one line for
each failure and a verdict at the end; --out takes the figures as JSON. --scale lowers the number of lengths and budgets;
--budgets and --contexts name them, so that several runs make a whole one.
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
BOOK = ["--tasks", str(TASKS), "--text", str(TEXT)]  # what documents are made from
BUDGETS = (48, 64, 128, 256, 512, 1024)
CONTEXTS = (8192, 4096, 2048, 1024)  # the longest first: they decide when everything is done
MOST_DIFFERENT = 0.01
GPU_RUNS = 3
NO_BUDGET = (None,)
METHODS_A_RUN = 4  # of the CPU: a longer run would outlast the others


class Tool:
    def __init__(self, path, deadline):
        self.path = path
        self.deadline = deadline
        self.settings = {}  # by method: what it needs besides a budget

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
        """({(method, budget, family, turn): answers}, error); `budgets`: NO_BUDGET of methods that have none."""
        settings = [word for method in methods for word in self.settings.get(method, [])]
        if budgets != NO_BUDGET:
            settings += ["--budgets", ",".join(map(str, budgets))]
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.json"
            status, said = self.run(
                "eval", "--model", str(MODEL), "--backend", backend, "--threads", "1", "--methods", ",".join(methods),
                *settings, "--json", str(report), *asked)
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


def find_refusals(tool, pool, methods, asked):
    """{(method, budget): sentence} of what the CPU refuses."""
    pairs = [(method, budget) for method, budgets in methods.items() for budget in budgets]
    outcomes = pool.map(lambda pair: tool.evaluate("cpu", [pair[0]], (pair[1],), asked), pairs)
    return {pair: error for pair, (_, error) in zip(pairs, outcomes) if error}


def grouped(methods, refusals):
    """[(methods, budgets)]: methods that take the same budgets together."""
    taken = {}
    for method, budgets in methods.items():
        accepted = tuple(budget for budget in budgets if (method, budget) not in refusals)
        if accepted:
            taken.setdefault(accepted, []).append(method)
    return [(names, accepted) for accepted, names in taken.items()]


def same_words(cpu, gpu):
    return cpu.splitlines()[-1:] == gpu.splitlines()[-1:]


class Comparison:
    """The same questions on both backends: answers by (context, method, budget, family, turn), and what failed.

    `methods`: the budgets of each by its name.
    """

    def __init__(self, tool, backend, methods, families, contexts):
        self.tool, self.backend, self.methods, self.families = tool, backend, methods, families
        self.contexts = contexts
        self.short = [*BOOK, "--context", "512", "--families", families[0], "--count", "1"]
        self.cpu, self.gpu, self.failures, self.refusals = {}, {}, [], {}
        self.gpu_seconds = 0.0

    def made(self, context, families):
        return [*BOOK, "--context", str(context), "--families", ",".join(families), "--count", "1"]

    def run(self, jobs):
        with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            questions = str(pathlib.Path(folder) / "questions.jsonl")
            write_questions(questions)
            self.refusals = find_refusals(self.tool, pool, self.methods, self.short)
            groups = grouped(self.methods, self.refusals)
            # On the CPU every document and a few methods are a process; on the GPU everything of one length is.
            waiting = [pool.submit(self.on_cpu, context, names[first:first + METHODS_A_RUN], taken, self.made(context, [family]))
                       for context in self.contexts for family in self.families for names, taken in groups
                       for first in range(0, len(names), METHODS_A_RUN)]
            waiting += [pool.submit(self.on_cpu, "file", names, taken, ["--questions", questions])
                        for names, taken in groups]
            self.run_gpu(groups, questions)
            for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
                self.take(self.cpu, *done.result())
                if number % 20 == 0:
                    print(f"cpu: {number} of {len(waiting)} runs done", flush=True)

    def run_gpu(self, groups, questions):
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(GPU_RUNS) as pool:
            waiting = [pool.submit(self.on_gpu, "file", *group, ["--questions", questions]) for group in groups]
            waiting += [pool.submit(self.on_gpu, context, *group, self.made(context, self.families))
                        for context in self.contexts for group in groups]
            for done in concurrent.futures.as_completed(waiting):
                self.take(self.gpu, *done.result())
                print(f"{self.backend}: {done.result()[0]} done after {time.monotonic() - begin:.0f} s", flush=True)
        for (method, budget), words in self.refusals.items():
            _, error = self.tool.evaluate(self.backend, [method], (budget,), self.short)
            if not error or not same_words(words, error):
                self.failures.append(
                    f"{self.backend}, {method} at {budget}: {error or 'answers'}; the CPU refuses: {words}")
        self.gpu_seconds = time.monotonic() - begin

    def take(self, answers, context, found, failed):
        answers.update({(context, *key): value for key, value in found.items()})
        self.failures += failed

    def on_cpu(self, context, names, taken, asked):
        answers, error = self.tool.evaluate("cpu", names, taken, asked)
        return context, answers, [f"cpu, {context}, {','.join(names)}: {error}"] if error else []

    def on_gpu(self, context, names, taken, asked):
        answers, error = self.tool.evaluate(self.backend, names, taken, asked)
        if not error:
            return context, answers, []
        failed = []
        for name in names:  # who was it?
            alone, error_alone = self.tool.evaluate(self.backend, [name], taken, asked)
            answers.update(alone)
            if error_alone:
                failed.append(f"{self.backend}, {context}, {name}: {error_alone}")
        return context, answers, failed or [f"{self.backend}, {context}, all methods together: {error}"]

    def judge(self):
        """The figures for the record."""
        asked = different = other_texts = 0
        worst, examples = {}, []
        for key in sorted(set(self.cpu) & set(self.gpu), key=str):
            (expected, right), (got, got_right) = self.cpu[key], self.gpu[key]
            asked += len(expected)
            other_texts += sum(one != other for one, other in itertools.zip_longest(expected, got))
            count = abs(right - got_right)  # of one question: documents come one at a time
            different += count
            if count:
                worst[key[1]] = worst.get(key[1], 0) + count
                examples.append({"where": [*key], "cpu": expected, "gpu": got})
        unmatched = len(set(self.cpu) ^ set(self.gpu))
        if unmatched and not self.failures:
            self.failures.append(f"{unmatched} answers were given by one backend only")
        skipped = {}
        for method, budget in self.refusals:
            skipped.setdefault(method, []).append(budget)
        left_out = ", ".join(f"{method} at {'/'.join(map(str, refused))}" for method, refused in skipped.items())
        whole = max(asked, 1)
        return {"asked": asked, "different": different, "other_texts": other_texts, "failures": self.failures,
                "left_out": [{"method": m, "budget": b, "words": words} for (m, b), words in self.refusals.items()],
                "different_by_method": worst, "examples": examples[:20], "methods": list(self.methods),
                "families": self.families, "budgets": sorted({b for all_of in self.methods.values() for b in all_of if b}),
                "contexts": self.contexts,
                "gpu_seconds": self.gpu_seconds,
                "passed": not self.failures and asked > 0 and different <= MOST_DIFFERENT * asked,
                "verdict": f"{different} of {asked} answers are other than the CPU's ({100 * different / whole:.2f} %; of "
                           f"the texts {100 * other_texts / whole:.1f} %); {len(self.failures)} evaluations failed; left "
                           f"out: {left_out or 'none'}"}


def listed_or(numbers, given):
    return tuple(int(number) for number in given.split(",")) if given else numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True)
    parser.add_argument("--out")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--budgets", default="")
    parser.add_argument("--contexts", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=500)
    parser.add_argument("--backend", default="cuda", help="what is compared with the CPU")
    given = parser.parse_args()
    begin = time.monotonic()
    tool = Tool(str(pathlib.Path(given.tool).resolve()), begin + given.limit)
    status, listed = tool.run("list", "--json")
    if status != 0:
        sys.exit(f"gpu_tool.py: {listed}")
    budgets = listed_or(BUDGETS[:max(1, round(len(BUDGETS) * given.scale))], given.budgets)
    contexts = listed_or(CONTEXTS[len(CONTEXTS) - max(1, round(len(CONTEXTS) * given.scale)):], given.contexts)
    methods = {method["name"]: budgets if method["has_budget"] else NO_BUDGET
               for method in json.loads(listed)["methods"] if given.backend in method["backends"]}
    with tempfile.TemporaryDirectory() as folder:
        gates = pathlib.Path(folder) / "gates.json"
        status, said = tool.run("heads", "--model", str(MODEL), *BOOK, "--context", "512", "--count", "1", "--out", str(gates))
        if status != 0:
            sys.exit(f"gpu_tool.py: {said}")
        tool.settings["duo_attention"] = ["--set", f"duo_attention.profile={gates}"]
        comparison = Comparison(tool, given.backend, methods,
                                list(json.loads(TASKS.read_text(encoding="utf-8"))["families"]), contexts)
        comparison.run(given.jobs)
    figures = comparison.judge()
    figures["seconds"] = time.monotonic() - begin
    for failure in figures["failures"]:
        print(f"FAILED {failure}")
    for example in figures["examples"][:5]:
        print(f"differs {example['where']}: cpu {example['cpu']!r}, {given.backend} {example['gpu']!r}")
    if given.out:
        pathlib.Path(given.out).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"{'passed' if figures['passed'] else 'FAILED'} in {figures['seconds']:.0f} s "
          f"({figures['gpu_seconds']:.0f} on the GPU): {figures['verdict']}")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
