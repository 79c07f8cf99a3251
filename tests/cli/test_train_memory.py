"""The sentence for exhausted memory: fragmentation, or a part that is too large."""

from __future__ import annotations

import pytest
import torch

from fusedops.cli.train_memory import _fragmented

TEXT = (
    "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.00 GiB is free. 60.00 GiB is allocated by PyTorch, and {} is reserved by "
    "PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("request_gib", "unallocated", "free"),
    [
        ("2.00", "12.50 GiB", "12.50 GiB"),
        ("2.00", "900.00 MiB", ""),
        ("0.50", "900.00 MiB", "900.00 MiB"),
    ],
)
def test_free_bytes_in_pieces_are_recognized(request_gib: str, unallocated: str, free: str) -> None:
    error = torch.OutOfMemoryError(TEXT.format(request_gib, unallocated))
    assert _fragmented(error) == free


def test_an_error_without_these_numbers_is_no_fragmentation() -> None:
    assert _fragmented(RuntimeError("DefaultCPUAllocator: can't allocate memory")) == ""
