"""The library's headers go into the package, so that an installed one needs no checkout."""
import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

HEADERS = pathlib.Path(__file__).resolve().parents[3] / "include" / "tessera"


class WithHeaders(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # then the package stays in the checkout
            target = pathlib.Path(self.build_lib) / "tessera_torch" / "include" / "tessera"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(HEADERS, target)


setup(cmdclass={"build_py": WithHeaders})
