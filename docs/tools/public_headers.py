#!/usr/bin/env python3
"""Writes docs/public_headers.md: every public header with one sentence, the first one of the header's own comment.

    docs/tools/public_headers.py [--check] [REPOSITORY]

--check writes nothing and fails where the page would change, or where a header begins without a sentence.
Public is every header under include/tessera outside a folder detail/. Of the folders in MIXED, whose parts lie beside
what is public, only those are listed that a page of docs/, an example, an integration or a benchmark includes.
"""
import pathlib
import re
import sys

PAGE = "docs/public_headers.md"
HERE = "docs/tools/public_headers.py"
# Folders in the order of the page, with what lies in them.
ROOMS = {
    "": "The library's doors: what most programs include.",
    "methods": "Published methods. Each header is one recipe: one policy on every axis.",
    "backend/cpu": "Operations over an engine's own memory, on the CPU.",
    "backend/cuda": "The whole cache and operations over an engine's own memory, on the GPU.",
    "concepts": "What a policy of each axis must have. A static_assert says in a sentence what a type lacks.",
    "scorer": "Policies: what matters?",
    "budget": "Policies: how many?",
    "selector": "Policies: which?",
    "scope": "Policies: whose?",
    "schedule": "Policies: when again?",
    "layout": "Policies: stored how?",
    "channels": "Policies: which elements of a vector stay?",
    "prefill": "Policies: which keys do a prompt's rows attend?",
    "attention": "Policies: read how?",
    "core": "Views, problems and types that every other folder uses.",
    "math": "Algorithms on plain arrays.",
    "runtime": "Host code that both caches share.",
}
MIXED = ("backend/cpu", "backend/cuda/device")
INCLUDE = re.compile(r"#include\s+[<\"](?:\.\./)*(?:include/)?tessera/([\w/.]+)[>\"]")
NAMED = re.compile(r"`tessera/([\w/.]+\.(?:hpp|cuh))`")
USERS = ("docs", "examples", "benchmarks")
CODE = (".hpp", ".cuh", ".cpp", ".cu", ".md", ".in")
NO_WORDS = 4

HEAD = f"""# Public headers

The script `{HERE}` makes this page; a check keeps it as the headers are. A header's sentence is the
first one of its own comment. Paths are those that a program includes: `#include <tessera/cache.hpp>`.

Public are all headers under `include/tessera` outside folders named `detail`. What lies in a folder `detail` is a part:
only headers of its own room include it, and it moves without notice. Of the headers in
{", ".join(f"`tessera/{folder}/`" for folder in MIXED)} the page lists those that a page of these docs,
an example, an integration or a benchmark includes; the others there are parts, too.
"""


def sentence_of(text):
    """The first sentence of the comment that the header begins with, or None."""
    lines = []
    for line in text.split("\n"):
        if not line.startswith("//"):
            break
        lines.append(line.lstrip("/").strip())
    match = re.match(r"(.*?\.)(?:\s|$)", " ".join(lines))
    return match[1] if match and len(match[1].split()) >= NO_WORDS else None


def included(root):
    """Headers that users include or name by the path of an include."""
    found = set()
    for part in USERS:
        for path in (root / part).rglob("*"):
            if path.suffix in CODE and path.is_file() and path.relative_to(root).as_posix() != PAGE:
                text = path.read_text(encoding="utf-8", errors="replace")
                found.update(INCLUDE.findall(text))
                found.update(NAMED.findall(text) if path.suffix == ".md" else ())
    return found


def public_headers(root):
    """Paths below include/tessera, in order."""
    folder, used = root / "include" / "tessera", included(root)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix not in (".hpp", ".cuh") or "detail" in name.parts:
            continue
        mixed = any(name.is_relative_to(part) for part in MIXED)
        if not mixed or name.as_posix() in used:
            yield name.as_posix()


def room_of(name):
    parts = name.split("/")[:-1]
    return "/".join(parts[:2] if parts[:1] == ["backend"] else parts[:1])


def page_of(root):
    lines, problems, rooms = HEAD.split("\n"), [], {}
    for name in public_headers(root):
        sentence = sentence_of((root / "include" / "tessera" / name).read_text(encoding="utf-8"))
        if sentence is None:
            problems.append(f"include/tessera/{name}: its first comment is no sentence")
        rooms.setdefault(room_of(name), []).append(f"| `tessera/{name}` | {(sentence or '').replace('|', '&#124;')} |")
    for room in sorted(rooms, key=lambda room: (list(ROOMS).index(room) if room in ROOMS else len(ROOMS), room)):
        if room not in ROOMS:
            problems.append(f"{HERE} says nothing of the folder {room}")
        title = f"`tessera/{room}/`" if room else "`tessera/`"
        lines += [f"## {title}", "", ROOMS.get(room, ""), "", "| header | what it has |", "| --- | --- |"]
        lines += [*rooms[room], ""]
    return "\n".join(lines).rstrip("\n") + "\n", problems


def main(words):
    folders = [word for word in words if word != "--check"]
    root = pathlib.Path(folders[0] if folders else pathlib.Path(__file__).parents[2]).resolve()
    text, problems = page_of(root)
    page = root / PAGE
    if "--check" not in words:
        page.write_text(text, encoding="utf-8")
    elif not page.is_file() or page.read_text(encoding="utf-8") != text:
        problems.append(f"{PAGE} is not what the headers say: run {HERE}")
    for problem in problems:
        print(problem)
    print(f"{PAGE}: {text.count('| `tessera/')} headers, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
