"""The library's headers go into the package, so that an installed one needs no checkout. The checkout stays as it is."""
import pathlib
import shutil
import tempfile

from setuptools import setup
from setuptools.command.build_py import build_py

HEADERS = pathlib.Path(__file__).resolve().parents[3] / "include" / "tessera"


class WithHeaders(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # then the package stays in the checkout
            shutil.copytree(HEADERS, pathlib.Path(self.build_lib) / "tessera_torch" / "include" / "tessera")


with tempfile.TemporaryDirectory() as folder:
    setup(cmdclass={"build_py": WithHeaders}, options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}})
