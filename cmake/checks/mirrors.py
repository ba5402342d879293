#!/usr/bin/env python3
"""Checks that what exists under both backends stands in the same room of each, and is listed with its reason.

Usage: mirrors.py REPOSITORY [--list].

A name that headers of backend/cpu and of backend/cuda both define is a part with two bodies. A name must stand in
the same room of both, and the page of decisions below must have a row for it: `name` | room | reason. Headers of a turn
with one path under both backends must define at least one such name. `--list` prints the names with their headers.
"""
import pathlib
import re
import sys

from sizes import code_of

PAGE = "docs/decisions/0018-two-bodies.md"
BACKENDS = ("cpu", "cuda")
# Of headers with one path that belong to a turn; others are operations, whose verbs differ where their bodies do.
TURN = re.compile(r"(cache/|observe/|backend$|choose/first_stage$|choose/detail/model_counts$|read/(reader|reading)$|attend/prompt_attention$)")
KERNEL_ROOMS = {"kernel": "device"}  # one room, which has its own name on each backend


def defined(text):
    """Names of types and functions at the scope of `namespace cpu` or `namespace cuda`."""
    code = code_of(text)
    parts, inside = [], []  # inside: of each open brace, whether it is a namespace of the library's
    for brace in re.finditer(r"[{}]", code):
        if brace.group() == "}":
            if inside:
                inside.pop()
            continue
        head = code[:brace.start()]
        declaration = head[max(head.rfind(mark) for mark in ";{}") + 1:].strip()
        named = re.search(r"\bnamespace\s+(\w*)$", declaration)
        if named:
            inside.append(named[1] != "detail")
            continue
        if all(inside):
            parts.append(declaration + " {")
        inside.append(False)
    for declaration in parts:
        plain = without_templates(declaration)
        kind = re.match(r"(?:.*\s)?(?:class|struct)\s+(\w+)", plain)
        if kind:
            yield kind[1]
            continue
        call = re.search(r"(\w+)\s*\(", re.sub(r"__launch_bounds__\s*\([^)]*\)", " ", plain))
        if call and "operator" not in plain and not plain.startswith("requires"):
            yield call[1]


def without_templates(declaration):
    """Drops `template <...>` and a constraint behind it from the beginning of a declaration."""
    declaration = declaration.strip()
    while declaration.startswith("template"):
        depth = 0
        for at in range(declaration.index("<"), len(declaration)):
            depth += {"<": 1, ">": -1}.get(declaration[at], 0)
            if depth == 0:
                break
        declaration = declaration[at + 1:].strip()
        if declaration.startswith("requires"):
            found = re.search(r"\b(class|struct|inline|void|__global__|__device__)\b", declaration)
            declaration = declaration[found.start():] if found else declaration
    return declaration


def names_of(root, backend):
    """{name: [room/..., header]} of one backend."""
    found = {}
    base = root / "include" / "tessera" / "backend" / backend
    for path in sorted(base.rglob("*.?pp")) + sorted(base.rglob("*.cuh")):
        header = path.relative_to(base)
        room = header.parts[0] if len(header.parts) > 1 else header.stem
        for name in set(defined(path.read_text(encoding="utf-8"))):
            found.setdefault(name, []).append((KERNEL_ROOMS.get(room, room), header.as_posix()))
    return found


def check(root):
    cpu, cuda = (names_of(root, backend) for backend in BACKENDS)
    both = sorted(set(cpu) & set(cuda))
    page = root / PAGE
    rows = set(re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8"), flags=re.M)) if page.is_file() else set()
    for name in both:
        rooms = [{room for room, _ in names[name]} for names in (cpu, cuda)]
        if not rooms[0] & rooms[1]:
            yield f"{name}: in {', '.join(sorted(rooms[0]))} of the CPU and in {', '.join(sorted(rooms[1]))} of the device; one room"
        if name not in rows:
            yield f"{name}: two bodies; {PAGE} lacks a row with the reason"
    for name in sorted(rows - set(both)):
        yield f"{PAGE}: {name} has one body now; drop the row"
    headers = [{pathlib.Path(header).with_suffix("").as_posix() for found in names.values() for _, header in found} for names in (cpu, cuda)]
    for header in sorted(filter(TURN.match, headers[0] & headers[1])):
        shared = [name for name in both if any(pathlib.Path(h).with_suffix("").as_posix() == header for _, h in cpu[name]) and
                  any(pathlib.Path(h).with_suffix("").as_posix() == header for _, h in cuda[name])]
        if not shared:
            yield f"{header}: a header of both backends, and no name of it is in both"


def main(repository, *options):
    root = pathlib.Path(repository).resolve()
    if "--list" in options:
        cpu, cuda = (names_of(root, backend) for backend in BACKENDS)
        for name in sorted(set(cpu) & set(cuda)):
            print(f"{name}: {', '.join(h for _, h in cpu[name])}; {', '.join(h for _, h in cuda[name])}")
        return 0
    problems = list(check(root))
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
