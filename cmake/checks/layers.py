#!/usr/bin/env python3
"""Checks that includes point down only, and the other rules about headers that a script can read.

Usage: layers.py REPOSITORY. Prints one line per broken rule; exits with 1 if there is any.
"""
import pathlib
import re
import sys

# Which layers each layer may include, besides itself. The most specific name wins ("backend/cpu" before "backend").
AXES = ["scorer", "budget", "selector", "scope", "channels", "layout", "prefill", "attention", "schedule"]  # never include each other
RECIPE = ["stage_facts.hpp", "stages.hpp", "recipe_checks.hpp", "recipe.hpp", "planned.hpp"]
BELOW_AXES = ["core", "math", "concepts"]
MAY_INCLUDE = {
    "core":         [],
    "math":         ["core"],
    "concepts":     ["core", "math"],
    **{axis: BELOW_AXES for axis in AXES},
    "stage_facts.hpp": BELOW_AXES,
    "stages.hpp":   BELOW_AXES + ["stage_facts.hpp", "scope"],  # the scope of a stage that names none
    "recipe_checks.hpp": BELOW_AXES + ["stages.hpp"],
    "recipe.hpp":   BELOW_AXES + ["stages.hpp", "recipe_checks.hpp", "prefill"],  # of a recipe that names no prefill
    "planned.hpp":  BELOW_AXES + RECIPE,
    "tailed_rows.hpp": ["layout", "channels"],
    "methods":      ["core", "recipe.hpp", "runtime"] + AXES,  # of runtime: what rotates its rows needs Eigen
    "runtime":      BELOW_AXES + RECIPE,
    "backend/cpu":  BELOW_AXES + AXES + RECIPE + ["runtime"],
    "backend/cuda": BELOW_AXES + AXES + RECIPE + ["runtime"],
    "cache.hpp":    BELOW_AXES + AXES + RECIPE + ["runtime", "backend/cpu"],
    "tessera.hpp":  BELOW_AXES + AXES + RECIPE + ["backend/cpu", "cache.hpp"],  # machinery only: no methods
}

# Rooms of the backends: each may include itself and the ones before it.
ROOMS = {
    "backend/cpu": ["kernel", "store", "score", "observe", "choose", "attend", "read", "cache", "backend.hpp", "any_cache.hpp", "named_cache.hpp"],
    "backend/cuda": ["cache_options.hpp", "device", "store", "score", "observe", "choose", "attend", "read", "cache", "backend.cuh",
                     "cache.cuh", "any_cache.cuh"],
}

# The public header of a room that has parts alone.
FRONTS = {"backend/cpu/cache": "backend/cpu/backend.hpp", "backend/cuda/cache": "backend/cuda/backend.cuh"}

# Headers from outside the standard C++ library (those have neither a dot nor a slash in their name).
EXTERNAL = {
    "immintrin.h":   ["math", "attention", "layout", "backend/cpu"],
    "pthread.h":     ["core"],
    "Eigen/":        ["runtime"],
    "cub/":          ["backend/cuda"],
    "thrust/":       ["backend/cuda"],
    "cuda/":         ["backend/cuda"],
    "cuda":          ["backend/cuda", "runtime"],
    "cooperative_groups": ["backend/cuda"],
}


# Code is in the namespace of the instruction set that it is compiled for (docs/decisions/0017-one-namespace-a-target.md). These
# headers have words that builds for all of them share, and functions that are inlined always.
SHARED = ["attention_part.hpp", "encoding.hpp", "error.hpp", "stored/element_blocks.hpp", "types.hpp", "units.hpp", "views.hpp"]  # of core
MACROS = ["config.hpp", "host/host_isa.hpp"]  # of core: the macros themselves
STD_VECTORS = ["core/host/host_vector.hpp", "backend/cuda/device/memory.cuh"]  # the second gives its caller one


def layer_of(path, include_root):
    parts = path.relative_to(include_root / "tessera").parts
    return "/".join(parts[:2]) if parts[0] == "backend" else parts[0]


def room_of(path, include_root):
    return path.relative_to(include_root / "tessera").parts[2]


def home_of_part(path, include_root):
    """Whose part a header in a folder detail/ is: its room in a backend, elsewhere the folder around detail/; None: it is no part."""
    parts = path.relative_to(include_root / "tessera").parts
    if "detail" not in parts[:-1]:
        return None
    return "/".join(parts[:3] if parts[0] == "backend" else parts[:parts.index("detail")])


def check_part(path, target, include_root):
    """Returns what is wrong with an include of `target` in `path`, a file of include/ or not, or None."""
    home = home_of_part(target, include_root)
    if home is None or path.is_relative_to(include_root / "tessera" / home):
        return None
    if FRONTS.get(home) and path == include_root / "tessera" / FRONTS[home]:
        return None
    return f"{target.relative_to(include_root)} is a part of {home}; include a header of {home} outside detail/"


def without_comments(text):
    """Blanks comments out and leaves line numbers as they are."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group())
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.S)


def check_include(line, path, layer, include_root):
    """Returns what is wrong with one #include line, or None."""
    match = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
    if not match:
        return None
    quote, name = match.groups()
    if quote == '"':
        target = (path.parent / name).resolve()
    elif name.startswith("tessera/"):
        target = include_root / name
    else:
        if "." not in name and "/" not in name and not name.startswith("cuda"):
            return None  # standard library
        for prefix, layers in EXTERNAL.items():
            if name.startswith(prefix):
                return None if layer in layers else f"<{name}> may be included by {', '.join(layers)} only"
        return f"<{name}> is not on the list of outside headers"
    if not target.is_relative_to(include_root / "tessera") or not target.is_file():
        return f'"{name}" is no header of Tessera'
    part = check_part(path, target, include_root)
    if part:
        return part
    other = layer_of(target, include_root)
    if other == layer and layer in ROOMS:
        order, here, there = ROOMS[layer], room_of(path, include_root), room_of(target, include_root)
        if here in order and order.index(there) > order.index(here):
            return f"{layer}/{here} includes {there}; it may include {', '.join(order[:order.index(here)])}"
    if other == layer or other in MAY_INCLUDE[layer]:
        return None
    return f"{layer} includes {other}; it may include {', '.join(MAY_INCLUDE[layer]) or 'nothing else'}"


def check_header(path, include_root):
    text = path.read_text(encoding="utf-8")
    layer = layer_of(path, include_root)
    if layer not in MAY_INCLUDE:
        yield 1, f"{layer} is no layer; add it to the table in cmake/checks/layers.py"
        return
    if layer in ROOMS and room_of(path, include_root) not in ROOMS[layer]:
        yield 1, f"{room_of(path, include_root)} is no room of {layer}; add it to the list in cmake/checks/layers.py"
        return
    if not re.search(r"^#pragma once$", text, flags=re.M):
        yield 1, "the header lacks #pragma once"
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        problem = check_include(line, path, layer, include_root)
        if problem:
            yield number, problem
        macro = re.match(r"\s*#\s*define\s+(\w+)", line)
        if macro and not macro[1].startswith("TESSERA_"):
            yield number, f"macro {macro[1]} must begin with TESSERA_"
        if macro and layer != "core":
            yield number, f"macro {macro[1]} is defined outside core/"
        if re.search(r"\(const \w+&\.\.\.\)", line):
            yield number, "a call that takes anything and does nothing: give it the arguments of those that do something"
        if "__global__" in line and layer != "backend/cuda":
            yield number, "__global__ outside backend/cuda"
    yield from check_launches(without_comments(text))
    code = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', without_comments(text))
    yield from check_namespace(code, path.relative_to(include_root / "tessera").as_posix())
    yield from check_macros_of_windows(code)


def check_launches(text):
    """A kernel with attributes of its own must be launched through the pointer that was configured: nvcc gives every
    source file a kernel of its own, and a member function may come from another file than its constructor."""
    if "cudaFuncSetAttribute" not in text:
        return
    for named in re.finditer(r"cudaFuncSetAttribute\(\s*detail::(\w+)", text):
        yield text.count("\n", 0, named.start()) + 1, f"{named[1]} is configured by name: configure and launch a member that holds it"
    configured = set(re.findall(r"[=?:]\s*detail::(\w+_entry)\b", text))
    for launch in re.finditer(r"detail::(\w+_entry)(?:<[^;{}]*?>)?\s*<<<", text):
        if launch[1] in configured:
            yield text.count("\n", 0, launch.start()) + 1, f"{launch[1]} is configured and launched apart"


def check_namespace(text, name):
    """All code is in the namespace of its instruction set, and none of it has one name in every build."""
    if name in [f"core/{one}" for one in MACROS]:
        return
    shares = name in [f"core/{one}" for one in SHARED]
    if "{" in text and "TESSERA_NAMESPACE_BEGIN" not in text and not (shares and "TESSERA_SHARED_NAMESPACE_BEGIN" in text):
        yield 1, "the code is not between TESSERA_NAMESPACE_BEGIN and TESSERA_NAMESPACE_END"
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\bnamespace tessera\b|\bTESSERA_HOST_ISA\b", line):
            yield number, "a namespace of Tessera's is opened by hand: write TESSERA_NAMESPACE_BEGIN"
        if "TESSERA_SHARED_NAMESPACE_BEGIN" in line and not shares:
            yield number, f"builds for all targets share what is in {', '.join(SHARED)} of core only: write TESSERA_NAMESPACE_BEGIN"
        if "std::vector<" in line and name not in STD_VECTORS:
            yield number, "functions of std::vector are one for all targets: write host_vector (core/host/host_vector.hpp)"


def check_macros_of_windows(text):
    """windows.h makes macros of min, max, small, near and far."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"(?<!\w)(?<!\()(?:std::)?\b(?:min|max)(?:<[^()]*>)?\(", line) or re.search(r"\((?:std::)?(?:min|max)(?:<[^()]*>)?\(", line):
            yield number, "min and max are macros of windows.h: write (std::min)(a, b), (std::numeric_limits<T>::max)()"
        found = re.search(r"\b(small|near|far)\b", line)
        if found:
            yield number, f"{found[1]} is a macro of windows.h: take another name"


def check_example(path, include_root):
    """Examples include no parts. Tests and benchmarks may: some are of parts."""
    for number, line in enumerate(without_comments(path.read_text(encoding="utf-8")).splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*["<](?:[^">]*/)?(tessera/[^">]+)[">]', line)
        problem = match and check_part(path, include_root / match[1], include_root)
        if problem:
            yield number, problem


def check_open_work(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if re.search(r"\b(TODO|FIXME|XXX)\b", line) and not re.search(r"#\d+", line):
            yield number, "open work without an issue number (#123)"


def main(repository):
    root = pathlib.Path(repository).resolve()
    include_root = root / "include"
    problems = []
    headers = sorted(p for p in include_root.rglob("*") if p.suffix in (".hpp", ".cuh", ".h"))
    for path in headers:
        problems += [(path, *found) for found in check_header(path, include_root)]
    for folder in ("include", "examples", "tests", "benchmarks"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".hpp", ".cuh", ".cpp", ".cu"):
                problems += [(path, *found) for found in check_open_work(path)]
                if folder == "examples":
                    problems += [(path, *found) for found in check_example(path, include_root)]
    for path, number, text in problems:
        print(f"{path.relative_to(root)}:{number}: {text}")
    print(f"{len(headers)} headers, {len(problems)} problems")
    return 1 if problems or not headers else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
