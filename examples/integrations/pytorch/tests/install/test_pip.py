"""pip installs the package with its headers from the checkout; the snippet of the README then runs from another folder."""
import os
import re
import subprocess
import sys
import sysconfig
import venv

import pytest
import torch
from conftest import HERE, MODEL, ROOT

DOOR = HERE.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A fresh environment with nothing but the package, above what this one has: its Python, and a folder elsewhere."""
    root = tmp_path_factory.mktemp("installed")
    venv.create(root / "venv", with_pip=False)
    python = root / "venv" / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
                    "--target", packages, str(DOOR)], check=True, cwd=root)
    others = [sysconfig.get_path("purelib"), os.path.dirname(os.path.dirname(torch.__file__))]
    with open(f"{packages}/zz_others.pth", "w", encoding="utf-8") as paths:
        paths.write("\n".join(others) + "\n")
    return python, packages, root


def test_the_headers_come_along(installed):
    _, packages, _ = installed
    want = {path.relative_to(ROOT / "include") for path in (ROOT / "include" / "tessera").rglob("*.*")}
    root = f"{packages}/tessera_torch/include"
    assert want == {path.relative_to(root) for path in type(ROOT)(root, "tessera").rglob("*.*")}
    sources = {path.relative_to(DOOR / "tessera_torch") for path in (DOOR / "tessera_torch").rglob("*.*")
               if "__pycache__" not in path.parts}
    assert all((type(ROOT)(packages, "tessera_torch") / path).exists() for path in sources)


def test_the_snippet_runs_from_another_folder(installed):
    python, packages, root = installed
    snippet = re.search(r"```python\n(from transformers import.*?)```", (DOOR / "README.md").read_text(), re.S).group(1)
    snippet = snippet.replace("examples/model", str(MODEL)).replace("examples/data", str(MODEL.parent / "data"))
    program = f"{snippet}\nimport tessera_torch; print(tessera_torch.__file__)\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", program], cwd=root, env={**environment, "TESSERA_TORCH_CACHE": str(root / "cache")},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "velvet walnut" in lines[0] and lines[-1].startswith(packages)
    said = [line for line in done.stderr.splitlines() if line.startswith("tessera_torch compiles")]
    assert len(said) == 2 and all("once" in line for line in said), done.stderr
