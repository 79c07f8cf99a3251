"""Makes one tuning table of the tables of single ops: ``python tools/merge_tables.py FROM TO``.

FROM holds tables of one device, TO gets ``ARCHITECTURE.json``. Ops that were tuned later come in by
running it again.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 (the path comes first)

from fusedops._core import backends, tuning  # noqa: E402
from fusedops.specs import all_specs  # noqa: E402


def merge(tables: Sequence[tuning.Table]) -> tuning.Table:
    """Return a table with the entries of all.

    Raises:
        ValueError: they are of several architectures, or there is none.
    """
    found = sorted({table.architecture for table in tables})
    if len(found) != 1:
        raise ValueError(f"tables of one architecture are wanted, these are of {found or 'none'}")
    entries = tuple(entry for table in tables for entry in table.entries)
    return dataclasses.replace(tables[0], entries=entries, path=None)


def main() -> int:
    """Read, merge, write."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    ops = [name + suffix for name in all_specs() for suffix in ("", "_backward")]
    order = {kind: backends.order(torch.device(kind)) for kind in ("cpu", "cuda")}
    paths = sorted(Path(sys.argv[1]).glob("*.json"))
    try:
        table = merge([tuning.parse(json.loads(path.read_text()), ops, order) for path in paths])
    except (ValueError, tuning.TableError) as error:
        print(error, file=sys.stderr)
        return 1
    out = Path(sys.argv[2]) / f"{table.architecture}.json"
    out.write_text(tuning.dump(table))
    print(f"{len(table.entries)} entries of {len(paths)} tables: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
