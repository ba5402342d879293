"""Beside the plug-in its wheel carries tessera_torch, which the operators are built from, and the library's headers. So
an installed wheel needs no checkout. The checkout stays as it is."""
import pathlib
import shutil
import tempfile

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parents[3]


class WithOperators(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # then the package finds both in the checkout
            carried = pathlib.Path(self.build_lib) / "tessera_vllm" / "carried" / "tessera_torch"
            shutil.copytree(ROOT / "examples" / "integrations" / "pytorch" / "tessera_torch", carried,
                            ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copytree(ROOT / "include" / "tessera", carried / "include" / "tessera")


with tempfile.TemporaryDirectory() as folder:
    setup(cmdclass={"build_py": WithOperators}, options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}})
