"""Calls that launch the kernel configurations which users run, three blocks deep.

``docs/reports/triton_kernels.csv`` records the machine code of the configurations in
``tools/kernel_cases``. A hot sample is a call of a public op that launches some of them, with grids
and loops of at least three blocks in each direction: the kernel's own tiles, full blocks and a last
one that is not full. Sizes are divided by 16, as in practice. ``tests/ops/test_hot_coverage.py``
launches all of them on a fake GPU and names each configuration that none of them reaches: where a
kernel has got another tile, the sizes here follow it.

    new = New(torch.device("cuda"), torch.bfloat16)
    for call in calls("attention", torch.bfloat16):
        result = call.run(call.sample(new))

Nothing here launches anything, or needs Triton, before ``run``.
"""

from __future__ import annotations

import torch

from hot_samples import (
    attention,
    elementwise,
    experts,
    lists,
    products,
    recurrences,
    rows,
    state_space,
)
from hot_samples.call import HotCall, New

__all__ = ["HotCall", "New", "calls", "ops"]

# Kernel file -> the calls that launch its configurations.
_CALLS: dict[str, list[HotCall]] = {
    **attention.CALLS,
    **elementwise.CALLS,
    **experts.CALLS,
    **lists.CALLS,
    **products.CALLS,
    **recurrences.CALLS,
    **rows.CALLS,
    **state_space.CALLS,
}


def ops() -> list[str]:
    """Return the kernel files that have hot samples, sorted by name."""
    return sorted(_CALLS)


def calls(op: str, dtype: torch.dtype = torch.bfloat16) -> list[HotCall]:
    """Return the calls that launch the configurations of a file in ``fusedops/kernels``.

    Those of bfloat16 are also those of float16; the report has others of float32.
    """
    return [call for call in _CALLS[op] if call.float32 == (dtype == torch.float32)]
