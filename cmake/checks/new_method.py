#!/usr/bin/env python3
"""Checks that a method written in one header is taken up by the tool and the tests without another edit.

Usage: new_method.py REPOSITORY CMAKE GENERATOR COMPILER CUDA(ON|OFF). Configures a copy of the tree to which one header
was added, builds nothing, and looks for the method in every list that CMake makes.
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile

NAME = "one_more_method"
MADE = {  # file in the build folder: what it must contain
    f"examples/tool/method_{NAME}.cpp": f"<tessera/methods/{NAME}.hpp>",
    "examples/tool/registry_list.cpp": f"describe_{NAME}()",
    "test_methods/every_method.hpp": f"tessera::{NAME}<",
    f"test_methods/method_{NAME}.cpp": f"tessera::{NAME}<",
    "test_methods/registry.cpp": f"published_{NAME}()",
}
MADE_WITH_CUDA = {
    "examples/tool/cuda_caches_bf16_64_given.cu": f"tessera::{NAME}<T, D, D, method_layout<own, tool_layout<T, D>, grouped_layout<T, D>>>",
    f"test_gpu/test_cache_{NAME}.cuh": f"hold_conversations<tessera::{NAME}<",
}


def main(repository, cmake, generator, compiler, cuda):
    root = pathlib.Path(repository).resolve()
    with tempfile.TemporaryDirectory() as folder:
        tree, build = pathlib.Path(folder) / "tree", pathlib.Path(folder) / "build"
        for part in ("cmake", "include", "tests", "examples", "benchmarks", "docs"):
            if not (root / part).is_dir():
                continue
            shutil.copytree(root / part, tree / part,
                            ignore=shutil.ignore_patterns("*.safetensors", "results", "corpus", "__pycache__"))
        for part in ("CMakeLists.txt", "LICENSE"):
            shutil.copy(root / part, tree / part)
        methods = tree / "include" / "tessera" / "methods"
        text = (methods / "snapkv.hpp").read_text(encoding="utf-8")
        (methods / f"{NAME}.hpp").write_text(text.replace("snapkv", NAME), encoding="utf-8")
        run = subprocess.run([cmake, "-S", tree, "-B", build, "-G", generator, f"-DCMAKE_CXX_COMPILER={compiler}",
                              f"-DTESSERA_CUDA={cuda}", "-DTESSERA_BUILD_BENCHMARKS=OFF"], stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, check=False)
        if run.returncode:
            print(run.stdout)
            return 1
        problems = []
        expected = {**MADE, **(MADE_WITH_CUDA if cuda == "ON" else {})}
        for name, words in expected.items():
            path = build / name
            if not path.is_file():
                problems.append(f"{name} was not made")
            elif words not in path.read_text(encoding="utf-8"):
                problems.append(f"{name} lacks {words}")
    for problem in problems:
        print(f"a new header in include/tessera/methods: {problem}")
    print(f"{len(expected)} lists, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
