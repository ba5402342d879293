"""Versions of transformers that the tests run with: what a cache is asked changes between versions."""
import warnings

import transformers

KNOWN = ((4, 57), (5, 24))


def doubt(version):
    """A sentence about a version that the tests do not run with; None for the others."""
    if tuple(int(part) for part in version.split(".")[:2]) in KNOWN:
        return None
    known = [".".join(map(str, one)) for one in KNOWN]
    return (f"transformers is {version}; expected {' or '.join(known)}, with which the tests of tessera_torch run: what other versions ask "
            f"of a cache may be answered wrongly; compare with transformers' own cache, or install transformers=={known[-1]}.*")


if sentence := doubt(transformers.__version__):  # when the package is imported, so once in a process
    warnings.warn(sentence, stacklevel=2)
