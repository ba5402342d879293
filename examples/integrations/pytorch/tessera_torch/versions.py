"""Versions of transformers, the oldest and the newest that the tests ran with: what a cache is asked changes between versions."""
import warnings

import transformers

OLDEST, NEWEST = (4, 57), (5, 24)


def doubt(version):
    """A sentence about a version outside of those that are known; None for the others."""
    if OLDEST <= tuple(int(part) for part in version.split(".")[:2]) <= NEWEST:
        return None
    low, high = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
    return (f"transformers is {version}; expected {low} to {high}, with which tessera_torch was made "
            f"(its tests ran with the first and the last): what other versions ask "
            f"of a cache may be answered wrongly; compare with transformers' own cache, or install transformers=={high}.*")


if sentence := doubt(transformers.__version__):  # when the package is imported, so once in a process
    warnings.warn(sentence, stacklevel=2)
