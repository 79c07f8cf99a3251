"""Compare the classes of transformers that rules of ``fusedops.patch`` replace with the known ones.

    PYTHONPATH=FOLDER python tools/known_code.py          # transformers that pip put into FOLDER
    python tools/known_code.py LlamaDecoderLayer          # the code that the digest is of

Prints class, digest and the releases noted for it, and exits with 1 if one is unknown. A digest
belongs into ``fusedops/integrations/hf/known_code.toml`` once somebody has read the code and found
that the fused forward computes the same.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import transformers

from fusedops.integrations.hf.known_code import code, digest, known_digests


def main() -> int:
    """Print a line for each class, or the code of those whose names are given."""
    print(f"transformers {transformers.__version__}")
    unknown = 0
    for module_name, classes in known_digests().items():
        module: Any = importlib.import_module(f"transformers.{module_name}")
        for name, known in classes.items():
            original = getattr(module, name, None)
            if name in sys.argv[1:]:
                print(f"\n# {module_name}.{name}\n{code(original)}")
            elif len(sys.argv) == 1:
                current = "missing" if original is None else digest(original)
                unknown += current not in known
                print(f"{module_name:40} {name:28} {current:12}  {known.get(current, 'UNKNOWN')}")
    return int(unknown > 0)


if __name__ == "__main__":
    sys.exit(main())
