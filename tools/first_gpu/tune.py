"""Tunes ops one by one: a table per op, and one of all of them after each.

An item is an op. The table of all is ``ARCHITECTURE.json`` (``sm_90.json``), as
``fusedops/tuning`` has it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from first_gpu import protocol, stand_in
from fusedops._core import tuning

DTYPES = ("bfloat16", "float32")
_SECONDS = 0.3  # per size, direction and dtype


def merge(tables: Sequence[tuning.TuningTable]) -> tuning.TuningTable:
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
    """Tune each item; those that other processes have tuned before are in the table too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, required=True, help="folder for the tables")
    options = protocol.options(parser)
    stand_in.install_if_asked()
    from first_gpu.worker import error_of_context
    from fusedops._core import backends
    from fusedops.bench import tuner
    from fusedops.bench.conditions import Conditions
    from fusedops.specs import all_specs
    from fusedops.terminal.files import UserError

    device = torch.device("cpu" if stand_in.present() else "cuda")
    names = [name + suffix for name in all_specs() for suffix in ("", "_backward")]
    order = {kind: backends.order(torch.device(kind)) for kind in ("cpu", "cuda")}
    single = options.tables / "ops"
    single.mkdir(exist_ok=True)
    events = protocol.Events(options.events)
    for op in json.loads(options.items.read_text()):
        events.start(op)
        spec = all_specs()[op]
        cases = spec.bench_cases[:1] if stand_in.present() else spec.bench_cases
        try:
            table, notes = tuner.measure_table(
                [(spec, case) for case in cases],
                Conditions(list(DTYPES), device, _SECONDS, quick=stand_in.present()),
            )
        except UserError as error:  # one backend alone serves it
            events.end(op, "skipped", error=str(error))
            continue
        except Exception as error:
            why = f"{type(error).__name__}: {error}".split("\n")[0]
            dead = error_of_context()
            events.end(op, "crashed" if dead else "failed", error=dead or why)
            if dead:
                return protocol.DEAD_CONTEXT
            continue
        (single / f"{op}.json").write_text(tuning.dump(table))
        read = [json.loads(path.read_text()) for path in sorted(single.glob("*.json"))]
        merged = merge([tuning.parse(each, names, order) for each in read])
        (options.tables / f"{merged.architecture}.json").write_text(tuning.dump(merged))
        events.end(op, "passed", entries=len(table.entries), text="\n".join(notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
