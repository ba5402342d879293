#!/usr/bin/env python3
"""Checks that no file of the repository names a path of the machine it was written on, or a package registry's host.

Usage: forbidden_text.py REPOSITORY. The words are put together here so that this file passes its own check.
"""
import pathlib
import re
import shutil
import subprocess
import sys

REGISTRY_HOSTS = [
    ("deb.debian", "org"), ("security.debian", "org"), ("archive.ubuntu", "com"), ("pypi", "org"),
    ("pythonhosted", "org"), ("registry.npmjs", "org"), ("crates", "io"), ("proxy.golang", "org"),
    ("repo.maven.apache", "org"), ("repo1.maven", "org"), ("rubygems", "org"),
]
FORBIDDEN = re.compile(
    b"|".join([rb"(?<![\w.~$}-])/" + b"work/"] + [re.escape(".".join(host).encode()) for host in REGISTRY_HOSTS]))


def files_of(root):
    """What git tracks or would add; without git, everything outside the build folder."""
    paths = [path for path in root.rglob("*") if path.relative_to(root).parts[0] not in ("build", ".git")]
    if (root / ".git").exists() and shutil.which("git"):
        listing = subprocess.run(["git", "-C", str(root), "ls-files", "-z", "--cached", "--others",
                                  "--exclude-standard"], capture_output=True, check=False)
        if listing.returncode == 0:
            paths = [root / name.decode() for name in listing.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def main(repository):
    root = pathlib.Path(repository).resolve()
    found = 0
    files = files_of(root)
    for path in files:
        data = path.read_bytes()
        for match in FORBIDDEN.finditer(data):
            line = data.count(b"\n", 0, match.start()) + 1
            print(f"{path.relative_to(root)}:{line}: {match.group().decode()}")
            found += 1
    print(f"{len(files)} files, {found} forbidden words")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
