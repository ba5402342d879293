"""Compiles what is needed when it is first needed, and keeps it on disk by its content.

Two kinds of libraries: the operators (csrc/operators.cpp), built once by torch's own builder, and one small library for
each recipe, element type and head dim, which knows nothing of PyTorch and takes a compiler some twenty seconds.
"""
import concurrent.futures
import functools
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import torch

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
INCLUDE = HERE / "include" if (HERE / "include").exists() else HERE.parents[3] / "include"  # an installed package has its own
EIGEN = os.environ.get("EIGEN3_INCLUDE_DIR", "/usr/include/eigen3")  # for recipes that rotate rows
ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)  # the last on the CPU alone
# Strings pass between the operators and the recipes' libraries: both have them as the torch that is installed has.
# Code of all libraries is for this processor: they share types, whose namespace names the instruction set.
HOST = "-march=native"
ABI = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
EXPORTS = """
using cache_type = tessera_torch::%s_cache<recipe_type>;
tessera::any_cache* tessera_torch_make(const tessera_torch::cache_request& request) { return new cache_type(request); }
tessera::any_cache* tessera_torch_copy(const tessera::any_cache& cache, const tessera_torch::device_memory& memory) {
  return static_cast<const cache_type&>(cache).copy_in(memory).release();
}
const char* tessera_torch_parameters() {
  static const std::string text = tessera_torch::parameters_text<recipe_type>();
  return text.c_str();
}
bool tessera_torch_rereads() { return recipe_type::retain_type::rereads; }
bool tessera_torch_takes_scores() { return recipe_type::retain_type::takes_scores; }
bool tessera_torch_takes_back() { return tessera::taken_back<recipe_type>() != tessera::takes_back::nothing; }
bool tessera_torch_drops_by_layer() { return tessera_torch::drops_by_layer<recipe_type>; }
bool tessera_torch_retrieves() { return recipe_type::retrieve_type::retrieves; }
bool tessera_torch_looks_over_layers() { return tessera_torch::looks_over_layers<recipe_type>; }
bool tessera_torch_adds_up() { return recipe_type::retrieve_type::adds_up; }
bool tessera_torch_turns_queries() { return recipe_type::retain_type::observed == tessera::observes::statistics; }
"""
PAGE_EXPORTS = """
tessera_torch::any_pages* tessera_torch_make_pages(const tessera_torch::cache_request& request) {
  return new tessera_torch::%s_pages<recipe_type>(request);
}
"""
OPERATORS = ("operators.cpp", "session_operators.cpp", "sharing_operators.cpp", "pages/page_operators.cpp", "pages/observation_operators.cpp",
             "pages/reading_operators.cpp")
MAY_COMPILE = True  # False within an engine's process: what is not there is then refused
ROWS = ("given", "fp8", "int8", "int4", "int2", "tailed")  # how K and V are stored
NO_POLICIES = ("backend", "concepts", "core", "math", "methods", "runtime")


def cache_folder():
    """Where libraries lie: $TESSERA_TORCH_CACHE, or a folder of the user's cache."""
    root = os.environ.get("TESSERA_TORCH_CACHE") or pathlib.Path.home() / ".cache" / "tessera_torch"
    return pathlib.Path(root)


def methods():
    """The published methods: every header of include/tessera/methods is one."""
    return sorted(path.stem for path in (INCLUDE / "tessera" / "methods").glob("*.hpp"))


def begin_to_compile(path, what, seconds):
    """Before a library is made: says so to who waits for it."""
    if not MAY_COMPILE:
        raise FileNotFoundError(f"library is missing; expected {path}; build it before this process starts")
    print(f"tessera_torch compiles {what}, once: about {seconds} s; kept in {path.parent}", file=sys.stderr, flush=True)


class Policy:
    """A policy of one's own and the recipe that uses it.

    header: C++ text, or the path of a header; it stands behind all of the library's policies, in namespace tessera.
    recipe: the recipe as a C++ type over T, the element type, and D, the head dim (of values Dv, where it differs), for example
            "recipe<retain<my_scorer, uniform, top_tokens>, dense<T, D>, retrieve_all, dense_decode, once>".
    """

    def __init__(self, header, recipe):
        is_path = isinstance(header, os.PathLike) or "\n" not in header and header.endswith((".hpp", ".cuh", ".h"))
        self.text = pathlib.Path(header).read_text(encoding="utf-8") if is_path else header
        self.name = str(header) if is_path else "the policy"
        self.recipe = recipe

    def source(self, element, dim, v_dim):
        headers = [path.relative_to(INCLUDE).as_posix() for path in sorted((INCLUDE / "tessera").rglob("*.hpp"))]
        headers = [name for name in headers if name.count("/") > 1 and name.split("/")[1] not in NO_POLICIES]
        lines = [f"#include <{name}>" for name in headers]
        text = re.sub(r"^\s*#pragma once\s*$", "", self.text, flags=re.M)
        # The preprocessor must see a header's own includes outside of the namespace.
        own = re.findall(r"^\s*#include.*$", text, flags=re.M)
        text = re.sub(r"^\s*#include.*$", "", text, flags=re.M)
        return "\n".join([*lines, *own, "namespace tessera {", f'#line 1 "{self.name}"', text, '#line 1 "the recipe"',
                          f"template <element T, int D, int Dv> using chosen_recipe = {self.recipe};", "}",
                          f"using recipe_type = tessera::chosen_recipe<tessera::{element}, {dim}, {v_dim}>;", ""])


def check_rows(method, rows):
    if rows not in ROWS:
        raise ValueError(f"rows is '{rows}'; expected one of {', '.join(ROWS)}; leave rows out to store what the model gives")
    if rows != "given" and isinstance(method, Policy):
        raise ValueError(f"rows is '{rows}'; expected 'given' beside a Policy, whose recipe names its layout; "
                         f"write {'tailed_rows<dense<T, D>>' if rows == 'tailed' else f'stored<{rows}_rows<T, D>, runs>'} in the recipe")


def source_of(method, element, dim, rows="given", v_dim=None):
    v_dim = v_dim or dim
    if isinstance(method, Policy):
        return method.source(element, dim, v_dim)
    if method not in methods():
        raise ValueError(f"method is '{method}'; expected one of {', '.join(methods())}; or pass a Policy")
    given = f"tessera::{method}<tessera::{element}, {dim}, {v_dim}>"
    if rows == "given":
        return f"#include <tessera/methods/{method}.hpp>\nusing recipe_type = {given};\n"
    # Where the method has its rows lie, in another format.
    layout = f"tessera::stored<tessera::{rows}_rows<tessera::{element}, {dim}, {v_dim}>, {given}::layout_type::placement_type>"
    header = f"layout/{rows}_rows"
    if rows == "tailed":
        layout, header = f"tessera::tailed_rows<{given}::layout_type>", "tailed_rows"
    return (f"#include <tessera/methods/{method}.hpp>\n#include <tessera/{header}.hpp>\n"
            "#include <tessera/layout/packed_rows.hpp>\n"
            f"static_assert(!tessera::packing_layout<{given}::layout_type>,\n"
            f"              \"tessera: {method} packs its rows; leave rows out\");\n"
            f"using recipe_type = tessera::{method}<tessera::{element}, {dim}, {v_dim}, {layout}>;\n")


@functools.cache
def machine(compiler, *unused):
    """What a library depends on besides its own text: headers (but those under unused names), compiler, processor."""
    digest = hashlib.sha256(subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout)
    for root in (INCLUDE / "tessera", SOURCES):
        for path in sorted(root.rglob("*.*")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(unused):
                digest.update(name.encode() + path.read_bytes())
    cpu = pathlib.Path("/proc/cpuinfo")
    if cpu.exists():  # -march=native means another thing on another processor
        lines = cpu.read_text().splitlines()
        digest.update(next((line for line in lines if line.startswith(("flags", "Features"))), "").encode())
    return digest.hexdigest()


def command_of(device):
    if device == "cpu":
        return [os.environ.get("CXX", "g++"), "-std=c++20", "-O3", HOST, ABI, "-shared", "-fPIC", "-x", "c++"]
    # nvcc's -O is that of host code, which only launches kernels; these are optimised fully without it.
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}{'a' if major >= 9 else ''}"
    return [os.environ.get("NVCC", "nvcc"), "-std=c++20", "-O1", f"-arch=sm_{arch}", "--shared", "-Xcompiler", f"-fPIC,{HOST}",
            ABI, "-diag-suppress=177", "-x", "cu"]


def library(method, dtype, dim, device="cpu", kind="cache", rows="given", v_dim=None):
    """The path of a recipe's library, compiled unless it is there. Errors: ValueError with the compiler's one sentence.

    dim, v_dim: of keys and of values (None: the same); kind: "cache", or "pages" for the operations over an engine's own pages; rows: one of ROWS.
    """
    check_rows(method, rows)
    if dtype not in ELEMENTS:
        raise ValueError(f"dtype is {dtype}; expected {', '.join(map(str, ELEMENTS))}; cast the model")
    v_dim = v_dim or dim
    for name, own in (("head_dim", dim), ("head_dim of values", v_dim)):
        dims = HEAD_DIMS if device == "cpu" else HEAD_DIMS[:-1]
        if own not in dims:
            raise ValueError(f"{name} is {own}; expected one of {', '.join(map(str, dims))}; "
                             "the library's kernels are made for these")
    if device == "cuda" and dtype == torch.float32:
        raise ValueError("dtype is torch.float32; expected torch.bfloat16 or torch.float16 on CUDA; cast the model")
    command = command_of(device)
    folder = "pages/" if kind == "pages" else ""
    text = (f'#include "{folder}{device}_{kind}.{"hpp" if device == "cpu" else "cuh"}"\n' +
            source_of(method, ELEMENTS[dtype], dim, rows, v_dim) + (EXPORTS if kind == "cache" else PAGE_EXPORTS) % device)
    unused = (*OPERATORS, "registry.hpp", "tensor_rows.hpp", "torch_memory.hpp", "pages/page_tensors.hpp",
              *([] if device == "cuda" else ["backend/cuda"]), *([] if kind == "pages" else ["pages/"]))
    depends = machine(command[0], *unused)
    key = hashlib.sha256("\0".join([depends, *command, text]).encode()).hexdigest()[:24]
    name = method if isinstance(method, str) else "policy"
    element = ELEMENTS[dtype] if rows == "given" else f"{rows}_of_{ELEMENTS[dtype]}"
    dims = dim if v_dim == dim else f"{dim}x{v_dim}"
    path = cache_folder() / f"{name}_{element}_{dims}_{device}_{kind}_{key}.so"
    if path.exists():
        return path
    begin_to_compile(path, f"{name} for {element} and head dim {dims}", 60 if device == "cuda" else 20)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source = pathlib.Path(folder) / "recipe.cpp"
        source.write_text(text, encoding="utf-8")
        made = pathlib.Path(folder) / "recipe.so"
        result = subprocess.run([*command, f"-I{SOURCES}", f"-I{INCLUDE}", f"-I{EIGEN}", str(source), "-o", str(made)],
                                capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ValueError(sentence(result.stderr))
        os.replace(made, path)  # whoever builds the same at the same time writes the same
    return path


def sentence(output):
    """The one sentence of a compiler's output: what a static_assert of the library says, else the first error."""
    said = re.search(r"static assertion failed[^\n]*?(tessera: [^\n]*)", output)
    if said:
        return said.group(1).strip().rstrip('"')
    first = re.search(r"^(?:([^\n:]+):(\d+):(?:\d+:)? )?(?:fatal )?error: ([^\n]*)", output, flags=re.M)
    if not first:
        return output.strip().splitlines()[-1] if output.strip() else "the compiler failed and said nothing"
    place = f"{pathlib.Path(first.group(1)).name}, line {first.group(2)}: " if first.group(1) else ""
    return place + first.group(3)


def build_all(wanted, jobs=None):
    """Compiles libraries side by side, as many as there are cores for this process; wanted: what `library` takes."""
    with concurrent.futures.ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda one: library(*one), wanted))


@functools.cache
def operators():
    """torch.ops.tessera, built by torch's own builder for the torch that is installed."""
    compiler = os.environ.get("CXX", "g++")
    with_cuda = torch.cuda.is_available()
    flags = ["-std=c++20", "-O2", HOST, *(["-DTESSERA_TORCH_CUDA"] if with_cuda else [])]
    key = hashlib.sha256("\0".join([machine(compiler, "backend/cuda", "methods"), torch.__version__, *flags]).encode()).hexdigest()[:24]
    name = "tessera_torch_operators"
    folder = cache_folder() / f"operators_{key}"
    if not (folder / "built").exists():
        begin_to_compile(folder, "its operators", 40)
        from torch.utils import cpp_extension
        folder.mkdir(parents=True, exist_ok=True)
        cpp_extension.load(name, [str(SOURCES / source) for source in OPERATORS], extra_cflags=flags, build_directory=str(folder),
                           extra_include_paths=[str(INCLUDE), str(SOURCES)], with_cuda=with_cuda, is_python_module=False)
        (folder / "built").touch()
    else:
        torch.ops.load_library(str(folder / f"{name}.so"))
    return torch.ops.tessera


def parameters(method):
    """Of a method or a Policy: {name: (default, what is allowed, what it means)}, all as text."""
    lines = operators().parameters(str(library(method, torch.float32, 64))).splitlines()
    return {name: tuple(rest) for name, *rest in (line.split("\t") for line in lines)}
