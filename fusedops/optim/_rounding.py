"""What stochastic rounding draws by: the parameter's name and the element's number in it.

Neither processes, shards nor parameter groups are in it, so that none of them changes a bit.
"""

from __future__ import annotations

import hashlib
from typing import Any

from fusedops.ops.adamw import Draw
from fusedops.optim import _shards

# Wrappers put these into the names of parameters; a module of such a name loses it, which does no
# harm: two parameters that share their numbers are each rounded without bias all the same.
_WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


def draw(param: Any, name: str, seed: int) -> Draw:
    """Return what the elements of a parameter, or of the part of it that is here, draw by.

    Parameters without a name (``""``) share a key.

    Raises:
        UnsupportedError: the part is no regular pattern.
    """
    plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    digest = hashlib.blake2b(f"{seed}:{plain}".encode(), digest_size=8).digest()
    return Draw(
        int.from_bytes(digest, "little", signed=True), *_shards.place(param, name or "without name")
    )
