#!/usr/bin/env python3
"""Measures what it costs to compile each public header and each method, and writes docs/compile_times.md.

    benchmarks/compile_times.py [--only headers,methods] [--repeat N] [--out FILE]

One compiler at a time, one translation unit each, optimised. Seconds are CPU time (user and system) of the compiler
and its children, so that other work on the machine disturbs little; the least of N runs (1 unless given) counts.
Without nvcc the CUDA columns stay empty. What does not compile is written down so, and the exit status is 1.
"""
import argparse
import datetime
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include"
EIGEN = "-I/usr/include/eigen3"  # where Debian has it
STEP_LIMIT = 25  # seconds of nvcc for the decode step of one recipe

METHOD = """#include "tessera/methods/NAME.hpp"
#include "HEADER"
using namespace tessera;
using made = CACHE<tessera::NAME<bf16, 128, 128>>;
"""
CPU_METHOD = METHOD.replace("HEADER", "tessera/tessera.hpp").replace("CACHE", "tessera::cache") + """
using rows = rows_view<const float>;
made* make(model_shape shape) { return new made(shape, {}, std::make_shared<cpu::executor>()); }
void prompt(made& cache, int id, const rows& q, const rows& k, const rows& v) {
  cache.prefill(0, id, q, k, v);
  cache.end_prefill(id);
}
void step(made& cache, const std::vector<index_t>& ids, const rows& q, const rows& k, const rows& v,
          const rows_view<float>& out, const rows_view<float>& lse) {
  cache.decode(0, cache.prepare_step(ids, 1), q, k, v, out, lse);
}
"""
CUDA_STEP = METHOD.replace("HEADER", "tessera/backend/cuda/cache.cuh").replace("CACHE", "tessera::cuda::cache") + """
using rows = rows_view<const bf16>;
void step(made& cache, const std::vector<index_t>& ids, const rows& q, const rows& k, const rows& v,
          const rows_view<float>& out, const rows_view<float>& lse, cudaStream_t stream) {
  const auto step = cache.prepare_step(ids, 1, stream);
  cache.begin_step(step, stream);
  cache.decode(0, step, q, k, v, out, lse, stream);
}
"""
CUDA_WHOLE = CUDA_STEP + """
made* make(model_shape shape, cuda::cache_options options) { return new made(shape, {}, options); }
void prompt(made& cache, int id, const rows& q, const rows& k, const rows& v, const rows_view<float>& out,
            const rows_view<float>& lse, cudaStream_t stream) {
  cache.reserve(id, 1000, stream);
  cache.prefill(0, id, q, k, v, stream);
  cache.prefill_attention(0, id, q, out, lse, stream);
  cache.end_prefill(id, stream);
}
"""


class compiler:
    def __init__(self, command, extension, folder, repeat):
        self.command, self.extension, self.folder, self.repeat = command, extension, folder, repeat
        self.failures = []

    def seconds(self, what, source):
        """CPU seconds to compile `source`, or None where it does not compile."""
        path = self.folder / f"unit.{self.extension}"
        path.write_text(source)
        least = None
        for _ in range(self.repeat):
            with open(self.folder / "messages", "w") as messages:
                child = subprocess.Popen([*self.command, f"-I{INCLUDE}", EIGEN, "-c", str(path), "-o",
                                          str(self.folder / "unit.o")], stdout=messages, stderr=messages)
                _, status, used = os.wait4(child.pid, 0)
                child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode != 0:
                said = (self.folder / "messages").read_text().splitlines()
                first = next((line for line in said if "error" in line), "")
                self.failures.append(f"{what}: {first}")
                print(f"{what} does not compile: {first}", file=sys.stderr)
                return None
            spent = used.ru_utime + used.ru_stime
            least = spent if least is None else min(least, spent)
        print(f"{what}: {least:.2f} s", flush=True)
        return least


def shown(tool, value):
    return "" if tool is None else "does not compile" if value is None else f"{value:.1f}"


def version(command, pattern):
    found = re.search(pattern, subprocess.run([command, "--version"], capture_output=True, text=True).stdout)
    return found[1] if found else "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="methods,headers")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--out", default=str(ROOT / "docs/compile_times.md"))
    given = parser.parse_args()
    if not shutil.which("g++"):
        sys.exit("compile_times.py needs g++")
    nvcc_path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        gxx = compiler(["g++", "-std=c++20", "-O3"], "cpp", folder, given.repeat)
        nvcc = nvcc_path and compiler([nvcc_path, "-std=c++20", "-O3", "-arch=sm_90", "-diag-suppress=177"], "cu",
                                      folder, given.repeat)
        cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
        load = os.getloadavg()[0]
        lines = ["# What compiling costs", "",
                 "Written by `benchmarks/compile_times.py`: seconds of CPU time (user and system), one translation",
                 "unit at a time on one core, `-O3`, nvcc for `sm_90` alone. Times hold for this machine.", ""]

        if "methods" in given.only.split(","):
            lines += ["## Methods", "",
                      "bf16, head dim 128. CPU: `cache<Method>`, made, filled and decoded. CUDA step: `prepare_step`,",
                      "`begin_step` and `decode` of `cuda::cache<Method>`; no recipe's may cost more than "
                      f"{STEP_LIMIT} s. CUDA whole: making it,", "the prompt and its attention besides.", "",
                      "| method | g++, whole | nvcc, decode step | nvcc, whole |", "| --- | --- | --- | --- |"]
            over = []
            for header in sorted((INCLUDE / "tessera/methods").glob("*.hpp")):
                method = header.stem
                whole = gxx.seconds(f"{method}, CPU", CPU_METHOD.replace("NAME", method))
                step = cuda_whole = None
                if nvcc:
                    step = nvcc.seconds(f"{method}, CUDA step", CUDA_STEP.replace("NAME", method))
                    cuda_whole = nvcc.seconds(f"{method}, CUDA whole", CUDA_WHOLE.replace("NAME", method))
                if step is not None and step > STEP_LIMIT:
                    over.append(method)
                lines.append(f"| `{method}` | {shown(gxx, whole)} | {shown(nvcc, step)} | {shown(nvcc, cuda_whole)} |")
            if nvcc:
                lines += ["", f"Decode steps over {STEP_LIMIT} s: {', '.join(over) or 'none'}."]
            lines.append("")

        if "headers" in given.only.split(","):
            lines += ["## Headers", "", "Each included alone. `.cuh` needs nvcc.", "",
                      "| header | g++ | nvcc |", "| --- | --- | --- |"]
            empty = "int nothing;\n"
            lines.append(f"| nothing | {shown(gxx, gxx.seconds('nothing, g++', empty))} | "
                         f"{shown(nvcc, nvcc and nvcc.seconds('nothing, nvcc', empty))} |")
            for header in sorted((INCLUDE / "tessera").rglob("*.*pp")) + sorted((INCLUDE / "tessera").rglob("*.cuh")):
                path = header.relative_to(INCLUDE).as_posix()
                source = f"#include <{path}>\n"
                host = "" if header.suffix == ".cuh" else shown(gxx, gxx.seconds(f"{path}, g++", source))
                device = shown(nvcc, nvcc and nvcc.seconds(f"{path}, nvcc", source))
                lines.append(f"| `{path.removeprefix('tessera/')}` | {host} | {device} |")
            lines.append("")

        toolkit = f"nvcc {version(nvcc_path, 'V([0-9.]+)')}" if nvcc else "no nvcc"
        lines[5:5] = [f"{datetime.date.today().isoformat()}, {cpu[1] if cpu else 'unknown CPU'}, "
                      f"{os.cpu_count()} cores, g++ {version('g++', r' ([0-9]+[.][0-9.]+)')}, {toolkit}; load average",
                      f"{load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end.", ""]
        pathlib.Path(given.out).write_text("\n".join(lines).rstrip() + "\n")
        failures = gxx.failures + (nvcc.failures if nvcc else [])
    print(f"{given.out}; {len(failures)} units do not compile")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
