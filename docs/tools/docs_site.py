#!/usr/bin/env python3
"""Builds the site: the contracts of the public headers and the pages, by Doxygen, in build/docs/html.

    docs/tools/docs_site.py [--out FOLDER]

A warning of the Doxygen that continuous integration has is an error (another version words them otherwise), and so is a
type or a function of a public header without a contract. Members without one are none: what a policy must have stands in
the contract of its concept, and in docs/concepts.md.
Where Doxygen is missing it says so and ends with status 77.
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys

import doxygen_filter
import public_headers

ROOT = pathlib.Path(__file__).resolve().parents[2]
MISSING = 77
CHECKED = "1.9.4"  # Doxygen of Debian 12, which continuous integration has
# Pages in the order of the site; what the lists do not name comes behind them.
GUIDE = ("docs/engines.md", "docs/operations.md", "docs/pipeline.md", "docs/concepts.md", "docs/policies.md",
         "docs/method_matrix.md", "docs/public_headers.md", "docs/cuda.md", "docs/glossary.md", "docs/results.md", "docs/experiments.md",
         "docs/experiments_tables.md",
         "benchmarks/results/README.md", "docs/testing.md", "docs/compile_times.md", "docs/changelog.md",
         "CONTRIBUTING.md")
FOLDERS = (("docs/how_to", "How to add a part"), ("docs/decisions", "Decisions and why they were taken"))
# A cache has its answers from these.
BASES = ("runtime/turn/basic_cache.hpp",)
# Said of names that have no contract of their own.
NAMESPACES = re.compile(r"^tessera::(?:cuda::|cpu::)?")
NO_CONTRACT = re.compile(r"warning: (?:Member|Compound) (.*) is not documented\.?$")


def pages():
    main = ["README.md", *(name for name in GUIDE if (ROOT / name).is_file())]
    others = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
    main += [name for name in others if name not in main]
    return main + [path.relative_to(ROOT).as_posix()
                   for folder, _ in FOLDERS for path in sorted((ROOT / folder).glob("*.md"))]


def copy_of(name):
    """Doxygen takes every README.md for the page that it begins with: one alone may be called so."""
    return name.replace("/README.md", "/contents.md")


def copy_sources(source, names, headers):
    """Writes what Doxygen reads below `source`, each file at its own path; returns these paths in order."""
    includes = {name.removeprefix("include/") for name in headers}
    for name in [*names, *headers]:
        text = (ROOT / name).read_text(encoding="utf-8")
        text = doxygen_filter.page(text, name, names, includes) if name.endswith(".md") else doxygen_filter.header(text)
        copy = source / copy_of(name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    made = [copy_of(name) for name in names]
    for folder, title in FOLDERS:  # a page for each folder of pages, so that they stand below one entry of the list
        path = folder + ".dox"
        lines = [f"/** @page {doxygen_filter.page_name(folder)} {title}"]
        lines += [f"- @subpage {doxygen_filter.page_name(name)}" for name in names if name.startswith(folder + "/")]
        (source / path).write_text("\n".join(lines) + "\n*/\n", encoding="utf-8")
        made.append(path)
    return [*made, *headers]


def problems_of(log):
    """Lines of Doxygen that are errors, each once; of names without a contract those that stand in a namespace."""
    seen = {}
    for line in log.splitlines():
        named = NO_CONTRACT.search(line)
        if named and (" of " in named[1] or "::" in NAMESPACES.sub("", named[1])) and " of namespace " not in named[1]:
            continue
        if line.strip():
            seen[re.sub(r"^.*?/source/", "", line)] = None
    return list(seen)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "build" / "docs"))
    out = pathlib.Path(parser.parse_args().out).resolve()
    if not shutil.which("doxygen"):
        print("skipped: doxygen is missing; docs/build.sh installs it")
        return MISSING
    source = out / "source"
    for folder in (out / "html", source):
        shutil.rmtree(folder, ignore_errors=True)
    source.mkdir(parents=True)
    names = pages()
    headers = ["include/tessera/" + name for name in public_headers.public_headers(ROOT)]
    include = ROOT / "include" / "tessera"
    headers += [path.relative_to(ROOT).as_posix() for pattern in BASES for path in sorted(include.glob(pattern))]
    version = re.findall(r"#define TESSERA_VERSION_\w+ (\d+)", (include / "core/config.hpp").read_text())
    settings = (ROOT / "docs" / "tools" / "Doxyfile").read_text(encoding="utf-8")
    settings += f"""
OUTPUT_DIRECTORY = "{out}"
PROJECT_NUMBER = {".".join(version)}
IMAGE_PATH = "{ROOT}/docs/images"
USE_MDFILE_AS_MAINPAGE = README.md
INPUT = {" ".join(f'"{name}"' for name in copy_sources(source, names, headers))}
"""
    run = subprocess.run(["doxygen", "-"], input=settings, cwd=source, text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, check=False)
    problems = problems_of(run.stdout)
    found = subprocess.run(["doxygen", "--version"], text=True, stdout=subprocess.PIPE, check=True).stdout.strip()
    strict = found.startswith(CHECKED)
    if not strict:
        print(f"doxygen {found}: what it says below is no error; {CHECKED} is what the pages are checked with")
    if run.returncode != 0:
        problems.append(f"doxygen ended with status {run.returncode}")
    for problem in problems:
        print(problem)
    print(f"{len(headers)} headers and {len(names)} pages in {out / 'html' / 'index.html'}, {len(problems)} problems")
    return 1 if run.returncode != 0 or problems and strict else 0


if __name__ == "__main__":
    sys.exit(main())
