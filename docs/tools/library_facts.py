#!/usr/bin/env python3
"""Puts what docs/tools/library_facts.cpp prints into the pages: between
`<!-- made by docs/tools/library_facts.cpp: NAME -->` and `<!-- made until here -->`.

    docs/tools/library_facts.py [--check] PROGRAM [REPOSITORY]

PROGRAM is build/PRESET/bin/library_facts. --check writes nothing and fails where a page would change.
"""
import pathlib
import re
import subprocess
import sys

PAGES = {"matrix": "docs/method_matrix.md", "memory": "docs/engines.md"}
SOURCE = "docs/tools/library_facts.cpp"
HERE = "docs/tools/library_facts.py"


def parts_of(printed):
    """{name: text} of what the program printed."""
    parts = re.split(r"^@@ (\w+)\n", printed, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2]))


def with_part(text, name, part):
    """The page with the part in its place, or None where it has no place for it."""
    begin, end = f"<!-- made by {SOURCE}: {name} -->\n", "<!-- made until here -->\n"
    before, found, rest = text.partition(begin)
    old, closed, after = rest.partition(end)
    return before + begin + part + end + after if found and closed else None


def put(root, parts, check):
    problems = [f"no page takes the part {name}" for name in parts if name not in PAGES]
    for name, page in PAGES.items():
        path = root / page
        text = path.read_text(encoding="utf-8")
        made = with_part(text, name, parts[name]) if name in parts else None
        if made is None:
            problems.append(f"{page} has no place for the part {name}, or the program did not print it")
        elif made != text and check:
            problems.append(f"{page} does not say what the library says: run {HERE} build/PRESET/bin/library_facts")
        elif made != text:
            path.write_text(made, encoding="utf-8")
    return problems


def main(words):
    check = "--check" in words
    words = [word for word in words if word != "--check"]
    root = pathlib.Path(words[1] if len(words) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    printed = subprocess.run([words[0]], stdout=subprocess.PIPE, text=True, check=True).stdout
    problems = put(root, parts_of(printed), check)
    for problem in problems:
        print(problem)
    print(f"{len(PAGES)} parts of pages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
