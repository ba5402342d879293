"""The package's wheel, outside of the checkout: its build step compiles from what it carries, and a server of it runs no
compiler."""
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, document
from test_server import CLASSES, SCRIPT

# A compiler that writes down what it is asked for.
COMPILER = """#!/bin/sh
echo "$@" >>'{log}'
exec '{real}' "$@"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """(folder, environment) of an installed wheel and a compiler beside it whose calls are known."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    flags = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *flags, "--no-build-isolation", "-w", folder,
                    ROOT / "examples" / "integrations" / "vllm"], check=True, cwd=folder)
    subprocess.run([*pip, "install", *flags, "--target", folder / "site", *folder.glob("*.whl")], check=True, cwd=folder)
    (folder / "bin").mkdir()
    compiler = folder / "bin" / "g++"
    compiler.write_text(COMPILER.format(log=folder / "compiled", real=shutil.which("g++")))
    compiler.chmod(0o755)
    return folder, {**os.environ, "PYTHONPATH": str(folder / "site"), "TESSERA_TORCH_CACHE": str(folder / "operators"),
                    "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def compiled(folder):
    """Calls of the compiler that compile, since the last time."""
    log = folder / "compiled"
    calls = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [call for call in calls if call != "--version" and "-dumpversion" not in call]


def test_a_wheel_needs_no_checkout_and_its_server_no_compiler(installed, model, tokenizer, tmp_path):
    from tessera_torch import build
    folder, environment = installed
    run = lambda *command: subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False,
                                          cwd=tmp_path, env=environment)
    where = run("-c", "import tessera_vllm; from tessera_vllm import operators; package = operators.package(); "
                      "print(tessera_vllm.__file__, package.__file__, package.build.INCLUDE)")
    assert [path.startswith(str(folder / "site")) for path in where.stdout.split()] == [True] * 3, where.stderr
    # The operators for PyTorch take a minute. Those of the tests are of the same files, by their names' checksum.
    (folder / "operators").mkdir()
    build.operators()
    for made in build.cache_folder().glob("operators_*"):
        (folder / "operators" / made.name).symlink_to(made.resolve())

    prompt, value = document(tokenizer, 1000, 1)
    script = tmp_path / "asks.py"
    script.write_text(SCRIPT)
    settings = {"mode": "compact", "method": "keydiff", "budget": 256}
    asked = json.dumps({"options": {**CLASSES, "additional_config": {"tessera": settings}}, "calls": [([prompt], None)]})
    early = run(script, asked, model)
    assert early.returncode != 0 and "python -m tessera_vllm.build --model" in early.stdout + early.stderr
    assert compiled(folder) == []

    built = run("-m", "tessera_vllm.build", "--model", model, "--methods", "keydiff")
    calls = compiled(folder)
    assert built.returncode == 0 and len(calls) == 1 and str(folder / "site") in calls[0], (built.stderr, calls)
    assert str(ROOT) not in calls[0]
    served = run(script, asked, model)
    assert served.returncode == 0, served.stdout + served.stderr
    assert f"ANSWERS [[\"" in served.stdout and value in served.stdout
    assert compiled(folder) == []
