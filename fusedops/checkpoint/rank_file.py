"""The file of one rank: generators, options of optimizers, the position in the data and more."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from fusedops.checkpoint.ranks import first_line
from fusedops.runtime import generators


def name_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.pt"


def read(folder: Path, rank: int) -> dict[str, Any]:
    """Return what the file of a rank contains."""
    return _unpack((folder / name_of(rank)).read_bytes())


def packed(step: int, data: Any, extra: Any, states: dict[str, Any], groups: Any) -> bytes:
    """Return the file of this rank, with the generators as they are now.

    Raises:
        TypeError: a part holds what a checkpoint must not load again.
    """
    parts = {"step": step, "data": data, "extra": extra, "stateful": states, "groups": groups}
    parts["generators"] = generators.capture()
    checked = [("data", data), ("extra", extra), ("a group of the optimizer", groups)]
    for name, part in [*states.items(), *checked]:
        try:
            _unpack(_pack(part))
        except Exception as error:
            raise TypeError(
                f"Checkpointer: {name} must hold numbers, texts, tensors, and lists and "
                f"dictionaries of them, got what cannot be loaded again: {first_line(error)}"
            ) from None
    return _pack(parts)


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
