#!/usr/bin/env python3
"""Checks that every policy header has its row in docs/policies.md: its name, in backticks, in a row's first cell.

Usage: policy_rows.py REPOSITORY. A `detail` folder beside the policies holds what is no policy.
"""
import pathlib
import re
import sys

FOLDERS = ["scorer", "budget", "selector", "layout", "attention", "schedule", "methods"]


def main(repository):
    root = pathlib.Path(repository)
    page = root / "docs" / "policies.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    first_cells = re.findall(r"^\s*\|([^|]*)\|", text, flags=re.M)
    documented = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    headers = [path for folder in FOLDERS for path in sorted((root / "include" / "tessera" / folder).glob("*.*"))
               if path.suffix in (".hpp", ".cuh")]
    missing = [path for path in headers if path.stem not in documented]
    for path in missing:
        print(f"{path.relative_to(root)}: docs/policies.md has no row that begins with | `{path.stem}` |")
    print(f"{len(headers)} policy headers, {len(missing)} without a row")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
