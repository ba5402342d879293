#!/usr/bin/env python3
"""Checks that no folder has more files, and no file more lines, than a reader takes in.

Usage: sizes.py REPOSITORY.
"""
import pathlib
import sys

MOST_FILES, MOST_LINES = 14, 400
SOURCES = (".hpp", ".cuh", ".cpp", ".cu", ".py", ".sh", ".cmake", ".in")
# Many short files of one kind, each found by its name.
COLLECTIONS = ("include/tessera/methods", "include/tessera/scorer", "include/tessera/core")


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
            if lines > MOST_LINES:
                yield f"{name}: {lines} lines; at most {MOST_LINES}: split it by idea"
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
