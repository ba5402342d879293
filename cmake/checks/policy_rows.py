#!/usr/bin/env python3
"""Checks that every policy and method has its row in docs/policies.md, and every method in README.md.

Usage: policy_rows.py REPOSITORY. A row's first cell holds the header's name, in backticks. A method's row in
docs/policies.md names, in backticks, the policies of its retain, filter and retrieve; its row in README.md names its
paper's arXiv number. A `detail` folder beside the policies holds what is no policy.
"""
import pathlib
import re
import sys

FOLDERS = ["scorer", "budget", "selector", "scope", "channels", "layout", "prefill", "attention", "schedule", "methods"]


STAGE = re.compile(r"\b(?:retain|filter|retrieve)<((?:[^<>]|<[^<>]*>)*)>")


def rows_of(page):
    """{name in the first cell: the whole rows}"""
    rows = {}
    for row in re.findall(r"^\s*\|.*$", page.read_text(encoding="utf-8") if page.is_file() else "", flags=re.M):
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
            rows[name] = rows.get(name, "") + row + "\n"
    return rows


def check_method(path, policies, readme):
    text = path.read_text(encoding="utf-8")
    code = re.sub(r"//[^\n]*", "", text)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", policies.get(path.stem, "")))))
    for policy in sorted(set(re.findall(r"\w+", " ".join(STAGE.findall(code)))) - named):
        yield f"the row of `{path.stem}` in docs/policies.md does not name `{policy}`"
    if path.stem not in readme:
        yield f"README.md has no row that begins with | `{path.stem}` |"
    papers = set(re.findall(r"arXiv:\d{4}\.\d{5}", readme.get(path.stem, "")))
    for paper in sorted(papers - set(re.findall(r"arXiv:\d{4}\.\d{5}", text))):
        yield f"README.md gives `{path.stem}` the paper {paper}, the header does not"


def main(repository):
    root = pathlib.Path(repository)
    policies, readme = rows_of(root / "docs" / "policies.md"), rows_of(root / "README.md")
    problems = []
    headers = [path for folder in FOLDERS for path in sorted((root / "include" / "tessera" / folder).rglob("*.*"))
               if path.suffix in (".hpp", ".cuh") and path.parent.name != "detail"]
    for path in headers:
        if path.stem not in policies:
            problems.append((path, f"docs/policies.md has no row that begins with | `{path.stem}` |"))
        if path.parent.name == "methods":
            problems += [(path, text) for text in check_method(path, policies, readme)]
    for path, text in problems:
        print(f"{path.relative_to(root)}: {text}")
    print(f"{len(headers)} policy headers, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
