"""Compare the code of transformers that rules of ``fusedops.patch`` were written for with the list.

    PYTHONPATH=FOLDER python tools/known_code.py          # transformers that pip put into FOLDER
    python tools/known_code.py opt.OPTDecoderLayer        # the code that the digest is of

Prints name, digest and the releases noted for it, and exits with 1 if one is unknown. A digest
belongs into ``fusedops/integrations/hf/known_code.toml`` once somebody has read the code and found
that the fused code computes the same.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import transformers

from fusedops.integrations.hf.known_code import code, digest, known_digests


def main() -> int:
    """Print a line for each class or function, or the code of those whose names are given."""
    print(f"transformers {transformers.__version__}")
    unknown = 0
    for entries in known_digests().values():
        for name, known in entries.items():
            kind, _, member = name.rpartition(".")
            file = f"models.{kind}.modeling_{kind}" if kind else "loss.loss_utils"
            try:
                module: Any = importlib.import_module(f"transformers.{file}")
            except ModuleNotFoundError:  # a type of later releases
                continue
            original = getattr(module, member, None)
            if name in sys.argv[1:]:
                print(f"\n# {name}\n{code(original)}")
            elif len(sys.argv) == 1:
                current = "missing" if original is None else str(digest(original))
                unknown += current not in known
                print(f"{name:50} {current:12}  {known.get(current, 'UNKNOWN')}")
    return int(unknown > 0)


if __name__ == "__main__":
    sys.exit(main())
