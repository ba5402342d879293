#!/usr/bin/env python3
"""Shows that each source check passes on good input and fails on bad input.

Usage: self_test.py COMPILER
"""
import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

sys.dont_write_bytecode = True  # a test leaves nothing in the source tree
import compile_fail
import docs
import forbidden_text
import format as source_format
import layers
import new_method
import mirrors
import policy_rows
import sizes
import words

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks" / "plots"), str(ROOT / "docs" / "tools")]
import doxygen_filter
import figures_page
import library_facts
import public_headers
import docs_site

COMPILER = sys.argv.pop(1) if len(sys.argv) > 1 else "c++"
PRAGMA = "#pragma once\n"


class Checks(unittest.TestCase):
    def outcome(self, check, files):
        """Runs `check` on a repository of `files` ({path: text}); returns its exit code and output."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = pathlib.Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                code = check(folder)
            return code, output.getvalue()

    def assert_passes(self, check, files):
        code, output = self.outcome(check, files)
        self.assertEqual(code, 0, output)

    def assert_fails(self, check, files, sentence):
        code, output = self.outcome(check, files)
        self.assertEqual(code, 1, output)
        self.assertIn(sentence, output)

    def test_sources_are_as_clang_format_writes_them(self):
        with tempfile.TemporaryDirectory() as venv:
            program = pathlib.Path(venv, "bin", "clang-format")
            program.parent.mkdir()

            def check(root):
                return source_format.main(root, venv)

            def write_program(version):  # it joins spaces
                program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo version {version} && exit\ntr -s " " <"$2"\n')
                program.chmod(0o755)

            source = {"include/tessera/a.hpp": "int  a;\n"}
            write_program(source_format.VERSION)
            self.assert_passes(check, {"include/tessera/a.hpp": "int a;\n", "docs/a.hpp": "int  a;\n"})
            self.assert_fails(check, source, "include/tessera/a.hpp: clang-format writes this file in another way")
            write_program("1.2.3")
            with unittest.mock.patch.object(source_format.shutil, "which", return_value=None):
                code, output = self.outcome(check, source)
            self.assertEqual(code, 77, output)
            self.assertIn("is not installed; pip install clang-format==", output)

    def layer_case(self, header, text):
        good = {"core/a.hpp": "", "math/a.hpp": "", "scorer/a.hpp": "", "budget/a.hpp": "",
                "methods/a.hpp": "", "recipe.hpp": "", "cache.hpp": "", header: text}
        return {f"include/tessera/{name}": PRAGMA + body for name, body in good.items()}

    def test_rooms_have_an_order(self):
        files = self.layer_case("backend/cuda/score/b.cuh", '#include "../choose/b.cuh"\n')
        self.assert_fails(layers.main, files | {"include/tessera/backend/cuda/choose/b.cuh": PRAGMA},
                          "backend/cuda/score includes choose")
        self.assert_fails(layers.main, self.layer_case("backend/cuda/attic/b.cuh", ""), "attic is no room")

    def test_parts_are_included_from_their_own_room_only(self):
        part = "include/tessera/backend/cuda/score/expected/detail/part.cuh"
        parts = {part: PRAGMA, "include/tessera/math/detail/part.hpp": PRAGMA}
        for header, text in [
            ("backend/cuda/score/b.cuh", '#include "expected/detail/part.cuh"\n'),
            ("backend/cuda/score/detail/b.cuh", '#include "../expected/detail/part.cuh"\n'),
            ("math/b.hpp", '#include "detail/part.hpp"\n'),
        ]:
            self.assert_passes(layers.main, self.layer_case(header, text) | parts)
        for header, text, home in [
            ("backend/cuda/choose/b.cuh", '#include "../score/expected/detail/part.cuh"\n', "backend/cuda/score"),
            ("backend/cuda/cache.cuh", "#include <tessera/backend/cuda/score/expected/detail/part.cuh>\n", "backend/cuda/score"),
            ("scorer/b.hpp", '#include "../math/detail/part.hpp"\n', "math"),
        ]:
            self.assert_fails(layers.main, self.layer_case(header, text) | parts, f"is a part of {home}; include a header of {home}")
        user = '#include "tessera/backend/cuda/score/expected/detail/part.cuh"\n'
        good = self.layer_case("core/b.hpp", "") | parts
        self.assert_passes(layers.main, good | {"tests/backend/test_part.cu": user, "benchmarks/bench_part.cu": user})
        self.assert_fails(layers.main, good | {"examples/ladder/a.cu": user}, "a.cu:1: tessera/backend/cuda/score/expected/detail/part.cuh is a part")

    def test_layers_accept_what_points_down(self):
        for header, text in [
            ("math/b.hpp", '#include <vector>\n#include "../core/a.hpp"\n#include "a.hpp"\n'),
            ("methods/b.hpp", '#include "../recipe.hpp"\n#include <tessera/scorer/a.hpp>\n'),
            ("core/b.hpp", "#define TESSERA_B 1\n// #define B, __global__ and <Eigen/Core> in a comment\n"),
            ("backend/cuda/device/b.hpp", "__global__ void kernel();\n#include <cub/cub.cuh>\n"),
            ("core/c.hpp", "// TO" "DO #12: later\n"),
            ("math/c.hpp", "TESSERA_NAMESPACE_BEGIN\ninline int f() { return (std::min)(1, (std::max<int>)(2, 3)); }  // min(), near\n"
                           "TESSERA_NAMESPACE_END\n"),
            ("core/error.hpp", "TESSERA_SHARED_NAMESPACE_BEGIN\nclass error {};\nTESSERA_SHARED_NAMESPACE_END\n"),
        ]:
            self.assert_passes(layers.main, self.layer_case(header, text))

    def test_layers_reject_each_broken_rule(self):
        for header, text, sentence in [
            ("core/b.hpp", '#include "../math/a.hpp"\n', "core includes math"),
            ("math/b.hpp", '#include "../scorer/a.hpp"\n', "math includes scorer"),
            ("scorer/b.hpp", '#include "../budget/a.hpp"\n', "scorer includes budget"),
            ("scorer/b.hpp", "#include <tessera/recipe.hpp>\n", "scorer includes recipe.hpp"),
            ("methods/b.hpp", '#include "../cache.hpp"\n', "methods includes cache.hpp"),
            ("tessera.hpp", '#include "methods/a.hpp"\n', "tessera.hpp includes methods"),
            ("scorer/b.hpp", '#include "gone.hpp"\n', "no header of Tessera"),
            ("extras/b.hpp", "", "extras is no layer"),
            ("math/b.hpp", "#include <Eigen/Core>\n", "<Eigen/Core> may be included by runtime only"),
            ("math/b.hpp", "#include <catch2/catch.hpp>\n", "not on the list of outside headers"),
            ("core/b.hpp", "#define BLOCK 1\n", "must begin with TESSERA_"),
            ("math/b.hpp", "#define TESSERA_B 1\n", "defined outside core/"),
            ("scorer/b.hpp", "__global__ void kernel();\n", "__global__ outside backend/cuda"),
            ("scorer/b.hpp", "template <class... Any>\nvoid f(const Any&...) {}\n", "a call that takes anything and does nothing"),
            ("backend/cuda/device/b.cuh", "auto e = detail::a_entry<int>;\ncudaFuncSetAttribute(e);\ndetail::a_entry<int><<<1, 1>>>();\n",
             "configured and launched apart"),
            ("backend/cuda/device/b.cuh", "cudaFuncSetAttribute(detail::a_entry<int>, limit);\n", "a_entry is configured by name"),
            ("math/b.hpp", "inline int one() { return 1; }\n", "not between TESSERA_NAMESPACE_BEGIN"),
            ("math/b.hpp", "namespace tessera { inline int one() { return 1; } }\n", "opened by hand"),
            ("math/b.hpp", "TESSERA_SHARED_NAMESPACE_BEGIN\n", "of core only"),
            ("math/b.hpp", "std::vector<int> x;\n", "write host_vector"),
            ("math/b.hpp", "int x = std::min(1, 2);\n", "macros of windows.h"),
            ("math/b.hpp", "int x = f(std::numeric_limits<int>::max());\n", "macros of windows.h"),
            ("math/b.hpp", "int x = (max(1, 2));\n", "macros of windows.h"),
            ("math/b.hpp", "bool near = true;\n", "near is a macro"),
            ("core/b.hpp", "// TO" "DO later\n", "open work without an issue number"),
        ]:
            self.assert_fails(layers.main, self.layer_case(header, text), sentence)
        self.assert_fails(layers.main, {"include/tessera/core/a.hpp": "\n"}, "lacks #pragma once")

    def test_every_policy_needs_its_row(self):
        header = {"include/tessera/scorer/key_norm.hpp": ""}
        self.assert_passes(policy_rows.main, {**header, "docs/policies.md": "| `key_norm` | L2 norm |\n"})
        self.assert_fails(policy_rows.main, header, "scorer/key_norm.hpp")
        self.assert_fails(policy_rows.main, {**header, "docs/policies.md": "| a | see `key_norm` |\n"}, "no row")

    def test_every_method_needs_rows_that_agree_with_it(self):
        good = {"include/tessera/methods/quick.hpp": "// arXiv:2404.14469\nstruct quick : recipe<retain<position, "
                                                     "two_stage<uniform>, top_tokens>, dense<T>> {};\n",
                "docs/policies.md": "| `quick` | `position` | `two_stage<uniform>` | `top_tokens` |\n",
                "README.md": "| `quick` | the newest | arXiv:2404.14469 |\n"}
        self.assert_passes(policy_rows.main, good)
        for name, text, sentence in [
            ("docs/policies.md", "", "no row that begins with | `quick` |"),
            ("docs/policies.md", "| `quick` | `position` | `two_stage<pyramid>` | `top_tokens` |\n", "does not name `uniform`"),
            ("README.md", "`quick` is quick\n", "README.md has no row that begins with | `quick` |"),
            ("README.md", "| `quick` | | arXiv:2406.14469 |\n", "gives `quick` the paper arXiv:2406.14469"),
        ]:
            self.assert_fails(policy_rows.main, {**good, name: text}, sentence)

    def test_a_new_method_must_reach_every_list(self):
        # A tree that takes no notice of its headers.
        files = {f"{part}/kept.txt": "" for part in ("cmake", "tests", "examples", "benchmarks")}
        files |= {"CMakeLists.txt": "cmake_minimum_required(VERSION 3.25)\nproject(deaf NONE)\n", "LICENSE": "",
                  "include/tessera/methods/snapkv.hpp": "struct snapkv;\n"}
        self.assert_fails(lambda folder: new_method.main(folder, "cmake", "Ninja", COMPILER, "OFF"), files,
                          "registry_list.cpp was not made")

    def test_pages_must_say_what_the_sources_say(self):
        marker, code = "<!-- examples/ladder/a.cpp [readme] -->\n", "```cpp\nint a;\n```\n"
        good = {"README.md": marker + code + "[more](docs/concepts.md)\n",
                "docs/concepts.md": "tessera: a budget must have a name\n",
                "examples/ladder/a.cpp": "// [readme]\nint a;\n// [readme]\n",
                "include/tessera/concepts/budget.hpp": '"tessera: a budget "\n  "must have a name"'}
        self.assert_passes(docs.main, good)
        self.assert_passes(docs.main, {**good, "docs/files.md": "`concepts/budget.hpp`, `a.cpp`, `tests/NAME.cpp`\n", "docs/experiments.md":
                                       "| a | b | c | d | - |\n", "docs/engines.md": "`tessera/concepts/budget.hpp`, `a.cpp`\n"})
        part = {"include/tessera/concepts/detail/part.hpp": "// A part: budget.hpp.\n"}
        self.assert_passes(docs.main, {**good, **part, "docs/files.md": "`concepts/detail/part.hpp`\n```cpp\n#include <tessera/concepts/budget.hpp>\n```\n"})
        self.assert_passes(docs.main, {**good, "include/tessera/core/a.hpp": "// See concepts/budget.hpp, budget.hpp, tessera/core/a.hpp.\n"})
        for name, text, sentence in [
            ("README.md", code, "shows no marked region"),
            ("README.md", good["README.md"] + "[gone](docs/gone.md)\n", "docs/gone.md leads nowhere"),
            ("examples/ladder/a.cpp", "// [readme]\nint b;\n// [readme]\n", "the code differs"),
            ("examples/ladder/a.cpp", "int a;\n", "has no region"),
            ("examples/ladder/b.cpp", "// [more]\nint b;\n// [more]\n", "no page shows the region [more]"),
            *[("README.md", good["README.md"] + f"`{gone}`\n", f"there is no file {gone}") for gone in ("concepts/gone.hpp", "gone.cuh")],
            ("docs/engines.md", "`budget.hpp`\n", "budget.hpp is not the path that a program includes"),
            ("docs/cuda.md", "`concepts/budget.hpp`\n", "concepts/budget.hpp is not the path that a program includes"),
            ("docs/concepts.md", "tessera: a budget must\n", "lacks the sentence: tessera: a budget must have a name"),
            *[("docs/experiments.md", text, "line 2 has not five cells") for text in ("\n| a | b | c | d |\n", "\n| a | b |  | d | e |\n")],
        ]:
            self.assert_fails(docs.main, {**good, name: text}, sentence)
        for name, text, sentence in [
            ("docs/files.md", "`tessera/concepts/detail/part.hpp`\n", "tessera/concepts/detail/part.hpp is a part: name a public header"),
            ("docs/files.md", "```cpp\n#include <tessera/concepts/detail/part.hpp>\n```\n", "which is a part: include a public header"),
            ("docs/files.md", "```cpp\n#include <tessera/concepts/gone.hpp>\n```\n", "a program includes tessera/concepts/gone.hpp, which is not there"),
            ("include/tessera/core/a.hpp", "// See concepts/gone.hpp.\n", "core/a.hpp: a comment names concepts/gone.hpp, which is not there"),
            ("include/tessera/core/a.hpp", "int a;  // gone.cuh\n", "a comment names gone.cuh, which is not there"),
            ("include/tessera/concepts/a.hpp", "/// See detail/part.hpp.\n", "a comment names detail/part.hpp, which is a part"),
        ]:
            self.assert_fails(docs.main, {**good, **part, name: text}, sentence)

    def test_the_page_of_figures_is_what_the_records_say(self):
        folder = "benchmarks/results/"
        record = {"machine": {"gpu": "NVIDIA H200", "date": "2026-01-02", "commit": "abc1234"}, "figures": {"decode/B1": {"us": 1.5}}}
        told = [{"date": "2026-01-03", "card": "NVIDIA H200", "commit": "def5678", "command": "bench", "page": folder + "diary/2026-01-03.md",
                 "kernels": {"decode/B1": "1.4 us"}}]
        good = {folder + "2026-01-02-h200.json": json.dumps(record), folder + "diary/figures.json": json.dumps(told),
                folder + "diary/provenance.json": "{}", folder + "diary/2026-01-03.md": "## 2026-01-03: faster\n\ndecode 1.4 us\n"}

        def check(files):
            def written_and_changed(where):
                figures_page.main([where])
                for name, text in files.items():
                    pathlib.Path(where, name).write_text(text, encoding="utf-8")
                return figures_page.main(["--check", where])
            return written_and_changed

        self.assert_passes(check({}), good)
        for name, text, sentence in [
            (folder + "2026-01-02-h200.json", json.dumps(record | {"figures": {"copy/4GiB": {"us": 2.5}}}), "not what the records say"),
            (folder + "diary/2026-01-03.md", "## 2026-01-03: faster\n\ndecode 11.4 us\n", "does not say 1.4"),
            (folder + "accuracy/a.json", "[]", "names no machine"),
            (folder + "diary/provenance.json", json.dumps({"gone.json": {}}), "gone.json, which is not there"),
            (folder + "README.md", "", "not what the records say"),
        ]:
            self.assert_fails(check({name: text}), {**good, folder + "accuracy/note.txt": ""}, sentence)

    def test_the_list_of_public_headers_is_what_the_headers_say(self):
        include = "include/tessera/"
        good = {include + "cache.hpp": "// A whole cache of one model. More of it.\n#pragma once\n", include + "math/detail/part.hpp": PRAGMA,
                include + "backend/cpu/part.hpp": PRAGMA, include + "backend/cuda/score/detail/part.cuh": PRAGMA,
                include + "backend/cuda/score/pool.cuh": "// Scores pooled on the device.\n", include + "backend/cpu/attend.hpp": "// Attention over rows,\n// on the CPU.\n",
                "docs/engines.md": "`tessera/backend/cpu/attend.hpp`\n"}

        def check(files):
            def written_and_changed(where):
                public_headers.main([where])
                page = pathlib.Path(where, "docs/public_headers.md").read_text(encoding="utf-8")
                self.assertIn("| `tessera/cache.hpp` | A whole cache of one model. |\n", page)
                self.assertIn("| `tessera/backend/cpu/attend.hpp` | Attention over rows, on the CPU. |\n", page)
                self.assertIn("| `tessera/backend/cuda/score/pool.cuh` | Scores pooled on the device. |\n", page)
                self.assertNotIn("part.", page)
                for name, text in files.items():
                    pathlib.Path(where, name).write_text(text, encoding="utf-8")
                return public_headers.main(["--check", where])
            return written_and_changed

        self.assert_passes(check({}), good)
        for name, text, sentence in [
            (include + "cache.hpp", "// Another cache of one model.\n", "not what the headers say"),
            (include + "cache.hpp", "// Of one.\n", "cache.hpp: its first comment is no sentence"),
            (include + "cache.hpp", PRAGMA, "cache.hpp: its first comment is no sentence"),
            ("docs/engines.md", "`tessera/backend/cpu/attend.hpp`, `tessera/backend/cpu/part.hpp`\n", "part.hpp: its first comment"),
        ]:
            self.assert_fails(check({name: text}), good, sentence)

    def test_contracts_and_pages_become_what_doxygen_reads(self):
        text = ("// What a header has, `a < b`.\n#pragma once\n/// Adds `a*b` to 100 %. See `x\n/// y`.\n///   add(a) -> int     a sum\n///"
                "                     of two\n/// More.\n/// Errors   none,\n///          never.\nint a;  ///< [n]; <b>\n")
        self.assertEqual(doxygen_filter.header(text).split("\n"), [
            "/// @header_of What a header has, <tt>a \\< b</tt>.", "#pragma once", "/// Adds <tt>a*b</tt> to 100 \\%. See <tt>x</tt>",
            "/// <tt>y</tt>.", "/// - <tt>add(a) -\\> int</tt>: a sum", "///   of two", "/// @paragraph_end More.", "/// @contract{Errors} none,",
            "/// never.", "int a;  ///< [n]; \\<b\\>", ""])
        page = "# A `b`\n[c](../c.md) [d](../x.hpp) ![e](images/e.svg) `tessera/f.hpp`\n```cpp\n[c](../c.md)\n```\n"
        self.assertEqual(doxygen_filter.page(page, "docs/a.md", ["docs/a.md", "c.md"], {"tessera/f.hpp"}),
                         "# A <tt>b</tt> {#page_docs_a}\n[c](@ref page_c) d ![e](e.svg) [<tt>tessera/f.hpp</tt>](@ref tessera/f.hpp)\n"
                         "```cpp\n[c](../c.md)\n```\n")

    def test_a_type_without_a_contract_is_a_problem_of_the_site(self):
        log = ("a.hpp:1: warning: Compound tessera::cache is not documented.\na.hpp:2: warning: Compound tessera::cache::part is not documented.\n"
               "a.hpp:3: warning: Member f() (function) of class tessera::cache is not documented.\na.hpp:4: warning: end of comment block\n\n"
               "a.hpp:4: warning: end of comment block\na.hpp:5: warning: Compound tessera::cuda::pack is not documented.\n"
               "a.hpp:6: warning: Member f() (function) of namespace tessera is not documented.\n")
        self.assertEqual([line[:7] for line in docs_site.problems_of(log)], ["a.hpp:1", "a.hpp:4", "a.hpp:5", "a.hpp:6"])

    def test_parts_of_pages_are_what_the_library_says(self):
        place = "<!-- made by docs/tools/library_facts.cpp: {} -->\n{}<!-- made until here -->\nrest\n"
        good = {"docs/method_matrix.md": place.format("matrix", "a\nb\n"), "docs/engines.md": "before\n" + place.format("memory", "c\n")}
        parts = library_facts.parts_of("@@ matrix\na\nb\n@@ memory\nc\n")
        problems = lambda parts, check: lambda folder: len(library_facts.put(pathlib.Path(folder), parts, check))
        self.assertEqual(self.outcome(problems(parts, True), good)[0], 0)
        for changed in ({**parts, "memory": "d\n"}, {"memory": "c\n"}, {**parts, "more": ""}):
            self.assertEqual(self.outcome(problems(changed, True), good)[0], 1, changed)
        self.assertEqual(self.outcome(problems({**parts, "memory": "d\n"}, False), good)[0], 0)
        self.assertEqual(self.outcome(problems(parts, True), {**good, "docs/engines.md": "c\n"})[0], 1)

    def test_a_step_that_hangs_is_ended_and_a_slow_one_is_not(self):
        steps = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "steps.sh"
        with tempfile.TemporaryDirectory() as logs:
            script = f"limit=3600 logs={logs}; source {steps}\n" + """
                attempt slow 20 bash -c 'for i in 1 2 3; do echo $i; sleep 0.5; done'
                attempt hangs 1 bash -c 'echo begun; exec sleep 3600'
                attempt fails 60 bash -c 'exit 3'
                limit=0
                attempt late 5 true
                echo "failed $failed" """
            run = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, text=True, check=False)
            written = [line.split("\t")[:2] for line in pathlib.Path(logs, "steps.tsv").read_text().splitlines()]
        self.assertEqual(written, [["slow", "0"], ["hangs", "silent"], ["fails", "3"], ["late", "124"]], run.stdout)
        self.assertIn("failed 3", run.stdout)

    def test_folders_and_files_have_a_size(self):
        folder = {f"tests/core/{i}.cpp": "" for i in range(14)}
        self.assert_passes(sizes.main, {**folder, "include/tessera/math/a.hpp": "\n" * 400})
        self.assert_fails(sizes.main, {**folder, "tests/core/one_more.txt": ""}, "tests/core: 15 files; at most 14")
        self.assert_fails(sizes.main, {"include/tessera/math/a.hpp": "\n" * 401}, "401 lines; at most 400")
        for kernel in ("__device__ void f();\n", "__global__ void f();\n"):
            self.assert_passes(sizes.main, {"include/tessera/math/a.cuh": kernel + "\n" * 599})
            self.assert_fails(sizes.main, {"include/tessera/math/a.cuh": kernel + "\n" * 600}, "601 lines; at most 600")
        self.assert_passes(sizes.main, {"include/tessera/math/a.hpp": "/// what it does\n" * 200 + "\n" * 300})
        self.assert_fails(sizes.main, {"include/tessera/math/a.hpp": "/// what it does\n" * 200 + "\n" * 301}, "at most 400")
        self.assert_fails(sizes.main, {"include/tessera/math/a.hpp": "// " + "x" * 118 + "\n"}, "a.hpp:1: 121 columns; at most 120")
        body = "namespace a {\nvoid f(int x) {\n" + "  ++x;\n" * 119 + "}\n}  // namespace a\n"
        self.assert_fails(sizes.main, {"tests/core/a.cpp": body}, "a.cpp:2: 121 lines in one function")
        self.assert_passes(sizes.main, {"tests/core/a.cpp": body.replace("  ++x;\n", "", 1)})

    def test_two_bodies_have_one_room_and_a_reason(self):
        def pair(room, other, row):
            both = "#pragma once\nTESSERA_NAMESPACE_BEGIN\nnamespace {0} {{\ntemplate <class T>\nclass pump {{\n int a;\n}};\n}}\nTESSERA_NAMESPACE_END\n"
            return {f"include/tessera/backend/cpu/{room}/pump.hpp": both.format("cpu"),
                    f"include/tessera/backend/cuda/{other}/pump.cuh": both.format("cuda"), mirrors.PAGE: row}
        row = "| `pump` | store | why |\n"
        self.assert_passes(mirrors.main, pair("store", "store", row))
        self.assert_fails(mirrors.main, pair("store", "score", row), "pump: in store of the CPU and in score of the device; one room")
        self.assert_fails(mirrors.main, pair("store", "store", "no row\n"), "lacks a row with the reason")
        self.assert_fails(mirrors.main, {**pair("store", "store", row), "include/tessera/backend/cuda/store/pump.cuh": ""},
                          "pump has one body now; drop the row")
        turn = {"include/tessera/backend/cpu/cache/a.hpp": "namespace cpu {\nclass a {\n};\n}\n",
                "include/tessera/backend/cuda/cache/a.cuh": "namespace cuda {\nclass b {\n};\n}\n", mirrors.PAGE: ""}
        self.assert_fails(mirrors.main, turn, "cache/a: a header of both backends, and no name of it is in both")

    def test_names_say_what_the_thing_is(self):
        header = "include/tessera/math/a.hpp"
        for text in [
            "// struct place {};\n/* int take(); */\nconst char* words = \"int kept;\";\n#define most 1\n",
            "inline int f(int at, int from) {\n  int own = at, most_rows = from;\n  return own + most_rows;\n}\n",
            "template <int most, class T = list<int, 2>>\nT f(const T& given);\n",
            "struct cursor {\n  cursor() : base(1), before{2} {}\n  using base::at;\n  int taken = base::one, placed[2] = {one, one};\n};\n",
            "template <class T>\nconcept cursor = requires(T t) {\n  t.at(1);\n  T::one;\n};\n",
            "enum class kind : unsigned char { newest = seen(1), mostly };\n",
        ]:
            self.assert_passes(words.main, {header: text})
        for text, line, name in [
            ("struct place {};\n", 1, "place"),
            ("namespace a {\nenum class kind { newest, own };\n}\n", 2, "own"),
            ("template <class T>\nusing lists = T;\n", 2, "lists"),
            ("template <class T>\nconcept kept = true;\n", 2, "kept"),
            ("template <class T = list<int>>\n  requires(sizeof(T) > 1)\nTESSERA_HD constexpr T of(const T& a) {\n  return a;\n}\n", 3, "of"),
            ("struct row {\n  row() : at_(1) {}\n  int first, at_;\n};\n", 3, "at_"),
            ("struct row {\n  int f() const { return 1; }\n  [[nodiscard]] int* take() const noexcept { return 0; }\n};\n", 3, "take"),
            ("struct row {\n  std::array<int, 2> here{};\n};\n", 2, "here"),
            ("struct row {\n  void (*put)(int) = nullptr;\n};\n", 2, "put"),
            ("struct row {\n  struct {\n    int a;\n    int to;\n  } ends;\n};\n", 4, "to"),
            ("inline void f() {\n  struct part {\n    int held;\n  };\n}\n", 3, "held"),
            ("inline constexpr int most_rows = 8;\n", 1, "most_rows"),
        ]:
            self.assert_fails(words.main, {header: text}, f"a.hpp:{line}: {name} says nothing of the thing; use ")

    def test_forbidden_text_is_found(self):
        self.assert_passes(forbidden_text.main, {"a.md": "frame/" + "work/ and ${root}/" + "work/ are fine\n"})
        self.assert_fails(forbidden_text.main, {"a.md": "cd /" + "work/main\n"}, "a.md:1")
        self.assert_fails(forbidden_text.main, {"b/c.txt": "\nhttps://py" + "pi.org/simple\n"}, "b/c.txt:2")

    def test_compile_fail_wants_the_right_failure(self):
        broken = "static_assert(sizeof(char) == 2, \"tessera: a char is one byte\");\n"
        compiles = lambda name: lambda folder: compile_fail.main(f"{folder}/{name}", COMPILER, "-std=c++20")
        for name, text, code in [
            ("good.cpp", "// expect: tessera: a char is one byte\n" + broken, 0),
            ("other_reason.cpp", "// expect: tessera: a sentence that is not there\n" + broken, 1),
            ("compiles.cpp", "// expect: tessera: a char is one byte\n", 1),
            ("says_nothing.cpp", broken, 1),
            ("control_good.cpp", "int main() {}\n", 0),
            ("control_broken.cpp", broken, 1),
        ]:
            self.assertEqual(self.outcome(compiles(name), {name: text})[0], code, name)


if __name__ == "__main__":
    unittest.main()
