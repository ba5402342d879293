#!/usr/bin/env python3
"""Checks that builds of one unit for two levels of x86-64 can be linked into one program, and that every two values of -march
under which the compiler chooses instructions differently have names of their own.

Usage: two_targets.py REPOSITORY COMPILER [FLAG...]. Compiles tests/link/targets.cpp for any processor and for AVX2, and finds, by
disassembly, functions that both builds have under one name and that need AVX2 or BMI in the second: the linker keeps either.
Where qemu-x86_64 is installed, the program runs on a processor without AVX, with the second build linked first.
What cannot be done here is said in a line that begins with "skipped".
"""
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
NEWER = re.compile(r"\t(v[a-z0-9]+|andn|bextr|bls(?:i|r|msk)|bzhi|mulx|pdep|pext|rorx|s[ah]rx|shlx|tzcnt|lzcnt)\s")


# Compilers use these when a program asks for them, not by themselves: cryptography, system calls, cache control, carries.
ASKED_FOR = set("""ABM ADX AES AVX512VP2INTERSECT CLFLUSHOPT CLWB CLZERO FSGSBASE INVPCID KL LAHF_SAHF MOVDIR64B MOVDIRI MWAITX PCLMUL
PCONFIG PKU PRFCHW PTWRITE RDPID RDRND RDSEED SGX SHA SHSTK SSE4A VAES VPCLMULQDQ WBNOINVD WIDEKL XSAVE XSAVEC XSAVEOPT XSAVES""".split())
NAME = '#include "tessera/core/host/host_isa.hpp"\nTESSERA_HOST_ISA\n'


def marches(compiler):
    """The values of -march that the compiler knows for 64 bits."""
    said = subprocess.run([*compiler, "-march=none", "-E", "-x", "c++", "/dev/null"], capture_output=True, text=True).stderr
    listed = re.search(r"(?:valid arguments to .-march=. switch|valid target CPU values) are: ([^;\n]*)", said)
    return [name for name in re.split("[ ,]+", listed[1].strip()) if name not in ("native", "")] if listed else []


def names_that_two_share(repository, compiler):
    """Lines about values of -march with one name and different instructions, and how many values there are."""
    seen, wrong, known = {}, [], 0
    for march in marches(compiler):
        command = [*compiler, f"-march={march}", "-m64", "-E", "-x", "c++", f"-I{repository}/include", "-"]
        macros = subprocess.run([*command, "-dM"], input="", capture_output=True, text=True)
        if macros.returncode != 0:
            continue  # of 32 bits
        known += 1
        told = {name for name in re.findall(r"#define __([A-Z0-9_]+?)__ 1$", macros.stdout, re.MULTILINE)} - ASKED_FOR
        told = {name for name in told if not name.startswith("tune")}
        made = subprocess.run([*command, "-P"], input=NAME, capture_output=True, text=True, check=True).stdout.split()[-1]
        other, others = seen.setdefault(made, (march, told))
        if told != others:
            wrong.append(f"{made}: {other} and {march} differ by {' '.join(sorted(told ^ others))}")
    return wrong, known


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def weak_functions(unit):
    found = set()
    for line in output_of("nm", unit).splitlines():
        kind, name = line.split()[-2:]
        if kind in "WVu":
            found.add(name)
    return found


def needing_newer(unit):
    """Functions with instructions that a processor of the first level lacks."""
    found, current = set(), None
    for line in output_of("objdump", "-d", "--no-show-raw-insn", unit).splitlines():
        head = re.match(r"[0-9a-f]+ <(.+)>:$", line)
        if head:
            current = head[1]
        elif current and NEWER.search(line + " "):
            found.add(current)
    return found


def main(repository, *compiler):
    if platform.machine() != "x86_64":
        print("skipped: no x86-64 machine")
        return 0
    if not shutil.which("objdump") or not shutil.which("nm"):
        print("skipped: no objdump; install binutils")
        return 0
    wrong, known = names_that_two_share(repository, compiler)
    print(f"{known} values of -march, {len(wrong)} with a name of another one")
    if wrong or not known:
        print("\n".join(wrong) or "the compiler lists no values of -march: the check sees nothing")
        return 1
    link = pathlib.Path(repository, "tests/link")
    with tempfile.TemporaryDirectory() as folder:
        any_unit, avx2_unit, program = (f"{folder}/{name}" for name in ("any.o", "avx2.o", "program"))
        for unit, name, flags in ((any_unit, "run_for_any", ["-march=x86-64"]), (avx2_unit, "run_for_avx2", ["-march=x86-64", *AVX2])):
            subprocess.run([*compiler, "-O2", *flags, f"-DTARGET={name}", "-c", link / "targets.cpp", "-o", unit], check=True)
        both = weak_functions(any_unit) & weak_functions(avx2_unit)
        shared = sorted(both & needing_newer(avx2_unit))
        print(f"{len(both)} weak functions in both builds, {len(shared)} of them with instructions of the newer one")
        if not needing_newer(avx2_unit):
            print("the build for AVX2 holds none of its instructions: the check sees nothing")
            return 1
        if shared:
            print(output_of("c++filt", *shared))
            return 1
        flags = ["-O1", "-march=x86-64", "-pthread"]
        subprocess.run([*compiler, *flags, link / "targets_main.cpp", avx2_unit, any_unit, "-static", "-o", program], check=True)
        subprocess.run([program], check=True)
        if not shutil.which("qemu-x86_64"):
            print("skipped: no qemu-x86_64, so nothing ran on a processor without AVX; install qemu-user")
            return 0
        subprocess.run(["qemu-x86_64", "-cpu", "Nehalem", program, "any"], check=True)
        print("ran on a processor without AVX")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
