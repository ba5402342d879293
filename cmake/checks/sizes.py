#!/usr/bin/env python3
"""Checks that no folder has more files, and no file and no function more lines, than a reader takes in.

Usage: sizes.py REPOSITORY.
"""
import pathlib
import re
import sys

MOST_FILES, MOST_LINES, MOST_IN_FUNCTION, MOST_COLUMNS = 14, 400, 120, 120
MOST_LINES_OF_KERNELS = 600  # a kernel and its parts are read together
KERNEL = re.compile(r"__(device|global)__")
SOURCES = (".hpp", ".cuh", ".cpp", ".cu", ".py", ".sh", ".cmake", ".in")
# Many short files of one kind, each found by its name.
COLLECTIONS = ("include/tessera/methods", "include/tessera/scorer", "benchmarks/results/diary")

NO_FUNCTION = re.compile(r"(template\b.*>\s*)?(inline\s+)?(namespace|struct|class|enum|union|extern)\b|.*\bnamespace\b")


def functions(text):
    """(line, lines, first words) of every function body of formatted C++: what a line ending in { opens at its indentation."""
    lines = text.split("\n")
    indents = [len(line) - len(line.lstrip()) for line in lines]
    for at, line in enumerate(lines):
        if not line.endswith("{") or line.lstrip().startswith(("//", "}", "#")):
            continue
        first = at
        while first > 0 and indents[first] > indents[at]:
            first -= 1
        head = " ".join(part.strip() for part in lines[first:at + 1])
        if NO_FUNCTION.match(head) or re.search(r"\b(class|struct)\b", head.split("(")[0]):
            continue
        last = next((i for i in range(at + 1, len(lines)) if indents[i] <= indents[at] and lines[i].lstrip().startswith("}")),
                    len(lines) - 1)
        yield first + 1, last - first + 1, head[:60]


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
