#!/usr/bin/env python3
"""Checks that C++ and CUDA sources are formatted as clang-format does it, in exactly the version that writes concepts well.

Usage: format.py REPOSITORY [VENV]    checks; VENV: a virtual environment that may have clang-format
       format.py --fix REPOSITORY [VENV]    formats
       format.py --version    prints the version
Exits with 1 where a file is formatted in another way, and with 77 where that version is not installed.
"""
import concurrent.futures
import pathlib
import shutil
import subprocess
import sys

VERSION = "19.1.7"
FOLDERS = ("include", "tests", "examples", "benchmarks")
SOURCES = (".hpp", ".cuh", ".cpp", ".cu")
INSTALL = f"pip install clang-format=={VERSION}"


def program(venv):
    """The clang-format of that version, or None."""
    for found in (venv and str(pathlib.Path(venv, "bin", "clang-format")), shutil.which("clang-format")):
        if not found or not pathlib.Path(found).is_file():
            continue
        said = subprocess.run([found, "--version"], stdout=subprocess.PIPE, text=True, check=False).stdout.split()
        if VERSION in said:
            return found
    return None


def sources(root):
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*")
                  if path.suffix in SOURCES and path.is_file())


def formatted(clang_format, path):
    """The text of a file as it should be."""
    return subprocess.run([clang_format, "--style=file", str(path)], stdout=subprocess.PIPE, check=True).stdout


def main(*arguments):
    if arguments == ("--version",):
        print(VERSION)
        return 0
    fix = arguments[:1] == ("--fix",)
    repository, *venv = arguments[1:] if fix else arguments
    root = pathlib.Path(repository).resolve()
    clang_format = program(venv[0] if venv else None)
    if not clang_format:
        print(f"skipped: clang-format {VERSION} is not installed; {INSTALL}, or pass a virtual environment that has it")
        return 77
    paths = sources(root)
    with concurrent.futures.ThreadPoolExecutor() as workers:
        texts = list(workers.map(lambda path: formatted(clang_format, path), paths))
    wrong = [(path, text) for path, text in zip(paths, texts) if path.read_bytes() != text]
    for path, text in wrong:
        if fix:
            path.write_bytes(text)
        print(f"{path.relative_to(root).as_posix()}: {'formatted' if fix else 'clang-format writes this file in another way'}")
    print(f"{len(paths)} files, {len(wrong)} {'formatted' if fix else 'problems'}")
    if wrong and not fix:
        print(f"To format them: {INSTALL}, and cmake/checks/format.py --fix .")
    return 1 if wrong and not fix else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
