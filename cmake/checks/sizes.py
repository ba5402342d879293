#!/usr/bin/env python3
"""Checks that no folder has more files, and no file and no function more lines, than a reader takes in.

Usage: sizes.py REPOSITORY.
"""
import pathlib
import re
import sys

MOST_FILES, MOST_LINES, MOST_IN_FUNCTION, MOST_COLUMNS = 14, 400, 120, 120
MOST_LINES_OF_KERNELS = 600  # a kernel and its parts are read together
MOST_LINES_WITH_CONTRACTS = 500  # a public header may have more where the rest is contracts (///), which are looked up
KERNEL = re.compile(r"__(device|global)__")
SOURCES = (".hpp", ".cuh", ".cpp", ".cu", ".py", ".sh", ".cmake", ".in")
# Many short files of one kind, each found by its name.
COLLECTIONS = ("include/tessera/methods", "include/tessera/scorer", "benchmarks/results/diary")

NO_FUNCTION = re.compile(r"(if|for|while|switch|do|else|catch|try|return)\b|.*\b(class|struct|namespace|enum|union|concept)\b[^(]*$"
                         r"|.*[\]=,(]\s*$", re.S)


def code_of(text):
    """Blanks comments, strings and characters out and leaves lines as they are."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group())
    text = re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.S)
    text = re.sub(r'R"(\w*)\(.*?\)\1"', blank, text, flags=re.S)
    return re.sub(r"\"(?:\\.|[^\"\\\n])*\"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'", blank, text)


def functions(text):
    """(line, lines, first words) of every function: from the first line of its declaration to its last brace. A lambda, and
    what else stands inside a function, counts to that one."""
    code = code_of(text)
    outer = []  # of each brace that is open: where its function's declaration begins, or None
    for brace in re.finditer(r"[{}]", code):
        if brace.group() == "}":
            if outer:
                begin = outer.pop()
                if begin is not None and not any(other is not None for other in outer):
                    first = code.count("\n", 0, begin) + 1
                    yield first, code.count("\n", 0, brace.start()) + 2 - first, " ".join(code[begin:begin + 200].split())[:60]
            continue
        head = code[:brace.start()]
        begin = max(head.rfind(mark) for mark in ";{}") + 1
        begin += len(head[begin:]) - len(head[begin:].lstrip())
        declaration = re.sub(r"^(#[^\n]*\n\s*|(public|private|protected):\s*)+", "", head[begin:])
        begin = brace.start() - len(declaration)
        parameters = "(" in declaration and declaration.split("(")[0].strip()
        is_function = parameters and not NO_FUNCTION.match(declaration.strip()) and "=" not in declaration.split("(")[0]
        outer.append(begin if is_function else None)


def check(root):
    folders = {}
    for part in ("include", "examples", "tests", "benchmarks", "cmake"):
        for path in sorted((root / part).rglob("*")):
            if not path.is_file() or "__pycache__" in path.parts:
                continue
            name = path.relative_to(root)
            folders.setdefault(name.parent.as_posix(), []).append(name)
            if path.suffix not in SOURCES:
                continue
            text = path.read_text(encoding="utf-8")
            lines = text.count("\n")
            most = MOST_LINES_OF_KERNELS if path.suffix == ".cuh" and KERNEL.search(text) else MOST_LINES
            contracts = len(re.findall(r"^ *///", text, flags=re.M)) if part == "include" else 0
            if most == MOST_LINES and lines - contracts <= MOST_LINES * 3 // 4:
                most = MOST_LINES_WITH_CONTRACTS
            if part == "include":
                for at, line in enumerate(text.split("\n"), 1):
                    if len(line) > MOST_COLUMNS:
                        yield f"{name}:{at}: {len(line)} columns; at most {MOST_COLUMNS}: wrap the line"
            if lines > most:
                yield f"{name}: {lines} lines; at most {most}: split it by idea"
            if path.suffix in (".hpp", ".cuh", ".cpp", ".cu"):
                for at, length, head in functions(text):
                    if length > MOST_IN_FUNCTION:
                        yield f"{name}:{at}: {length} lines in one function ({head}); at most {MOST_IN_FUNCTION}"
    for folder, files in folders.items():
        if len(files) > MOST_FILES and folder not in COLLECTIONS:
            yield f"{folder}: {len(files)} files; at most {MOST_FILES}: give it rooms"


def main(repository):
    problems = list(check(pathlib.Path(repository).resolve()))
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
