#!/usr/bin/env python3
"""Checks that a file does not compile, and that the compiler's output contains each of its `// expect: sentence` lines.

Usage: compile_fail.py FILE COMPILER [FLAG...]. A file named control_* must compile instead: it proves that the others
fail for their own reason and not for a wrong flag. A line `// flags: -fno-exceptions` adds compiler flags.
"""
import os
import pathlib
import re
import subprocess
import sys


def main(file, *compiler):
    path = pathlib.Path(file)
    expected = re.findall(r"^\s*//\s*expect:\s*(.+?)\s*$", path.read_text(encoding="utf-8"), flags=re.M)
    own_flags = re.findall(r"^\s*//\s*flags:\s*(.+?)\s*$", path.read_text(encoding="utf-8"), flags=re.M)
    compiler += tuple(flag for line in own_flags for flag in line.split())
    # Width 0 keeps a message on one line, and the C locale keeps it English.
    run = subprocess.run([*compiler, "-fsyntax-only", "-fmessage-length=0", str(path)], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, errors="replace", env={**os.environ, "LC_ALL": "C"},
                         check=False)
    if path.name.startswith("control_"):
        problem = "" if run.returncode == 0 else "the control file must compile"
    elif not expected:
        problem = "the file has no line '// expect: <sentence>'"
    elif run.returncode == 0:
        problem = "the file compiles, and must not"
    else:
        problem = "".join(f"the output lacks: {sentence}\n" for sentence in expected if sentence not in run.stdout)
    if problem:
        print(f"{path.name}: {problem}\n{run.stdout}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
