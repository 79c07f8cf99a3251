"""What stochastic rounding draws by: the parameter's name and the element's number in it.

Neither processes, shards nor parameter groups are in it, so that none of them changes a bit.
"""

from __future__ import annotations

import hashlib
from typing import Any

from fusedops._core.parameter_names import plain_name
from fusedops.ops.adamw import Draw
from fusedops.optim import _shards


def draw(param: Any, name: str, seed: int) -> Draw:
    """Return what the elements of a parameter, or of the part of it that is here, draw by.

    Parameters without a name (``""``) share a key.

    Raises:
        UnsupportedError: the part is no regular pattern.
    """
    # Two parameters that have one plain name share their numbers, which does no harm: each is
    # rounded without bias all the same.
    digest = hashlib.blake2b(f"{seed}:{plain_name(name)}".encode(), digest_size=8).digest()
    return Draw(
        int.from_bytes(digest, "little", signed=True), *_shards.place(param, name or "without name")
    )
