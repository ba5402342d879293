#!/usr/bin/env python3
"""Checks that the pages say what the sources say.

Usage: docs.py REPOSITORY. Seven rules, for README.md, CONTRIBUTING.md and docs/:
- A code block below `<!-- FILE [marker] -->` is, word for word, what stands in FILE between two lines `// [marker]`;
  README.md has at least one. Marked regions must be shown on some page.
- docs/concepts.md has every sentence that the static_asserts of concepts/ and recipe.hpp print.
- Links to files of the repository lead somewhere, on the pages of benchmarks/ and examples/ too.
- A source file that is named in backticks exists: by its path from the repository, include/tessera or examples, or, where
  only its name is given, somewhere. docs/engines.md, docs/cuda.md and docs/operations.md name headers by the path
  that a program includes. Not looked at: names with capitals or brackets (placeholders), docs/compile_times.md (a record
  of one day), and the header that docs/how_to/add_a_scorer.md has the reader write.
- A header that a page names by the path that a program includes, `tessera/...`, or includes in a code block, is public:
  it lies outside folders detail/.
- A header that a comment of include/ names exists: by its path from include/tessera or from a folder around the comment's
  header, or, where only its name is given, somewhere. Comments of public headers name no path of a part.
- Rows of the tables of docs/experiments.md have five cells, none of them empty.
"""
import html
import pathlib
import re
import sys

SNIPPET = re.compile(r"^<!-- (\S+) \[(\w+)\] -->\n```\w*\n(.*?)^```$", flags=re.M | re.S)
LITERALS = re.compile(r'"(tessera: (?:[^"\\]|\\.)*)"((?:\s*"(?:[^"\\]|\\.)*")*)')
FILE = re.compile(r"`((?:[a-z0-9_.-]+/)*[a-z0-9_]+\.(?:hpp|cuh|cpp|cu|py|sh|cmake))`")
TO_BE_WRITTEN = "tempered_attention"
RECORDS = ("compile_times.md",)
FOR_INCLUDING = ("engines.md", "cuda.md", "operations.md")
INCLUDED = re.compile(r"^\s*#\s*include\s*[<\"](tessera/[^>\"]+)[>\"]", flags=re.M)
COMMENT = re.compile(r"//(.*)$", flags=re.M)
HEADER = re.compile(r"(?<![\w/.*-])((?:[a-z0-9_]+/)*[a-z0-9_]+\.(?:hpp|cuh))\b")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def region_of(text, marker):
    """What stands between the two lines `// [marker]`, or None."""
    parts = re.split(rf"^// \[{marker}\]\n", text, flags=re.M)
    return parts[1] if len(parts) == 3 else None


def check_snippets(root, pages):
    shown = set()
    for page in pages:
        for name, marker, code in SNIPPET.findall(page.read_text(encoding="utf-8")):
            source = root / name
            region = region_of(source.read_text(encoding="utf-8"), marker) if source.is_file() else None
            shown.add((name, marker))
            if region is None:
                yield page, f"{name} has no region between two lines // [{marker}]"
            elif region != code:
                yield page, f"the code differs from the region [{marker}] of {name}"
    readme = root / "README.md"
    if not readme.is_file() or not SNIPPET.search(readme.read_text(encoding="utf-8")):
        yield readme, "README.md shows no marked region of an example"
    for path in sorted((root / "examples" / "ladder").glob("*.cpp")):
        name = path.relative_to(root).as_posix()
        for marker in sorted(set(re.findall(r"^// \[(\w+)\]$", path.read_text(encoding="utf-8"), flags=re.M))):
            if (name, marker) not in shown:
                yield path, f"no page shows the region [{marker}]"


def check_sentences(root):
    page = root / "docs" / "concepts.md"
    text = html.unescape(page.read_text(encoding="utf-8")) if page.is_file() else ""
    include = root / "include" / "tessera"
    for path in [*sorted((include / "concepts").glob("*.hpp")), *sorted(include.glob("*.hpp"))]:
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        for first, rest in LITERALS.findall(source):
            sentence = first + "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', rest))
            if sentence not in text:
                yield path, f"docs/concepts.md lacks the sentence: {sentence}"


def check_links(pages):
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in LINK.findall(text):
            if "://" not in target and not (page.parent / target).exists():
                yield page, f"the link to {target} leads nowhere"


def check_files(root, pages):
    sources = [root / part for part in ("include", "examples", "tests", "benchmarks", "cmake")]
    names = {path.name for folder in sources for path in folder.rglob("*.*")}
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for name in FILE.findall(text) if page.name not in RECORDS else ():
            found = name in names if "/" not in name else any(
                (start / name.removeprefix("../")).is_file()
                for start in (root, root / "include", root / "include" / "tessera", root / "examples"))
            if not found and TO_BE_WRITTEN not in name:
                yield page, f"there is no file {name}"
            elif page.name in FOR_INCLUDING and name.endswith((".hpp", ".cuh")) and not (root / "include" / name).is_file():
                yield page, f"{name} is not the path that a program includes, tessera/..."
            elif name.startswith("tessera/") and "detail" in name.split("/"):
                yield page, f"{name} is a part: name a public header"


def check_included(root, pages):
    for page in pages:
        for name in INCLUDED.findall(page.read_text(encoding="utf-8")):
            if TO_BE_WRITTEN in name:
                continue
            if not (root / "include" / name).is_file():
                yield page, f"a program includes {name}, which is not there"
            elif "detail" in name.split("/"):
                yield page, f"a program includes {name}, which is a part: include a public header"


def check_contracts(root):
    include = root / "include" / "tessera"
    headers = sorted(path for path in include.rglob("*") if path.suffix in (".hpp", ".cuh"))
    names = {path.name for path in headers}
    for path in headers:
        folders = [folder for folder in path.parents if folder.is_relative_to(include)]
        for comment in COMMENT.findall(path.read_text(encoding="utf-8")):
            for name in HEADER.findall(comment):
                below = name.removeprefix("tessera/")
                found = name in names if "/" not in name else any((folder / below).is_file() for folder in folders)
                if not found:
                    yield path, f"a comment names {name}, which is not there"
                elif "detail" in name.split("/") and "detail" not in path.relative_to(include).parts:
                    yield path, f"a comment names {name}, which is a part: name a public header"


def check_rows(root):
    page = root / "docs" / "experiments.md"
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines() if page.is_file() else (), 1):
        cells = line.strip().strip("|").split("|")
        if line.startswith("|") and (len(cells) != 5 or not all(map(str.strip, cells))):
            yield page, f"line {number} has not five cells with something in each"


def main(repository):
    root = pathlib.Path(repository).resolve()
    pages = [path for path in (root / "README.md", root / "CONTRIBUTING.md") if path.is_file()]
    pages += sorted((root / "docs").rglob("*.md"))
    others = [path for part in ("benchmarks", "examples") for path in sorted((root / part).rglob("*.md"))]
    problems = [*check_snippets(root, pages), *check_sentences(root), *check_links(pages + others), *check_files(root, pages),
                *check_included(root, pages), *check_contracts(root), *check_rows(root)]
    for path, text in problems:
        print(f"{path.relative_to(root)}: {text}")
    print(f"{len(pages)} pages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
