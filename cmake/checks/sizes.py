#!/usr/bin/env python3
"""Checks that no folder has more files, and no file more lines, than a reader takes in.

Usage: sizes.py REPOSITORY. What is larger today stands in the lists below with its size: it may shrink, not grow, and
leaves the list when it fits.
"""
import pathlib
import sys

MOST_FILES, MOST_LINES = 14, 400
SOURCES = (".hpp", ".cuh", ".cpp", ".cu", ".py", ".sh", ".cmake", ".in")
# Many short files of one kind, each found by its name.
COLLECTIONS = ("include/tessera/methods", "include/tessera/scorer", "include/tessera/core", "tests/compile_fail",
               "benchmarks/results")
FILES_TODAY = {"examples/engine": 20, "examples/tool": 38, "tests/examples": 15, "tests/methods": 24}
LINES_TODAY = {
    "tests/backend/cuda/read/test_page_oracle.cu": 418,
    "tests/backend/cuda/read/test_page_retrieval.cu": 725,
    "tests/examples/cli/command_line.py": 593,
    "tests/examples/test_model.cpp": 432,
    "tests/hostile/hostile.py": 452,
}


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
            lines = path.read_text(encoding="utf-8").count("\n")
            most = LINES_TODAY.get(name.as_posix(), MOST_LINES)
            if lines > most:
                yield f"{name}: {lines} lines; at most {most}: split it by idea"
    for folder, files in folders.items():
        most = FILES_TODAY.get(folder, MOST_FILES)
        if len(files) > most and folder not in COLLECTIONS:
            yield f"{folder}: {len(files)} files; at most {most}: give it rooms"


def main(repository):
    problems = list(check(pathlib.Path(repository).resolve()))
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems; {len(FILES_TODAY)} folders and {len(LINES_TODAY)} files are larger than they should be")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
