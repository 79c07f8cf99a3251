"""Hot samples of matrix products: dense, batched and grouped, by pointers and by descriptors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from fusedops.specs.make import randn
from hot_samples.call import HotCall, ReportCase

# Three tiles of 128 rows, three of 256 columns, and five steps of 64 along the sums; fewer rows
# where the case is that of few.
_ROWS, _COLUMNS, _DEPTH = 272, 528, 272
_GROUPS = 64  # of which the kernels' tables have 128 places


def _rows(case: ReportCase) -> int:
    """Return how many rows take the case's tile: those below 128 are of calls of few rows."""
    block = case["BLOCK_M"]
    return block if block < 128 and not case.is_float32 else _ROWS


# How weights lie in memory for a ``TMA_MODE`` of the kernels.
TMA_LAYOUTS = {"plain": "along", "transposed": "across"}


def _layout(case: ReportCase) -> str:
    """Return how weights lie in memory: "along" the sums, "across" them, "apart" by pointers."""
    if case.get("TMA_MODE", "none") != "none":
        return TMA_LAYOUTS[case["TMA_MODE"]]
    return "apart" if case["BLOCK_M"] >= 128 else "along"


def _weight(
    rows: int, columns: int, layout: str, key: str, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``[rows, columns]``, dense along the columns but for "across"."""
    new = functools.partial(
        randn, device=device, dtype=dtype, scale=columns**-0.5, grad=False, key=key
    )
    made = new(columns, rows).t() if layout == "across" else new(rows, columns)
    return made.requires_grad_()


def _input(
    rows: int, columns: int, layout: str, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``[rows, columns]``; "apart": rows begin where no descriptor can."""
    extra = int(layout == "apart")
    made = randn(rows, columns + extra, device=device, dtype=dtype, grad=False)
    return made[:, :columns].requires_grad_()


def _linear_act(case: ReportCase) -> HotCall:
    if case.kernel == "gradient_kernel":
        return _mlp(case)
    num_rows, layout = _rows(case), _layout(case)

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        x = _input(num_rows, _DEPTH, layout, device, dtype)
        weight = _weight(_COLUMNS, _DEPTH, layout, "weight", device, dtype)
        bias = randn(_COLUMNS, device=device, dtype=dtype, key="bias")
        return (x, weight, bias), {"activation": case["ACTIVATION"]}

    return HotCall("linear_act", f"{num_rows}x{_DEPTH}x{_COLUMNS} {layout}", make)


def _mlp(case: ReportCase) -> HotCall:
    # Eight programs for each of 132 multiprocessors share two tiles of columns.
    inner = 2 * case["BLOCK_N"] + 16
    num_rows = 3 * case["BLOCK_M"] * (8 * 132 // 3) + 16

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        new = functools.partial(randn, device=device, dtype=dtype)
        w1 = new(inner, 64, scale=0.125, key="w1")
        w2 = new(48, inner, scale=inner**-0.5, key="w2")
        b1, b2 = new(inner, key="b1"), new(48, key="b2")
        options = {"activation": case["ACTIVATION"], "recompute": True}
        return (new(num_rows, 64), w1, b1, w2, b2), options

    return HotCall("mlp", f"{num_rows}x64x{inner}", make)


def _linear_glu(case: ReportCase) -> HotCall:
    by_elements = case.kernel == "gradient_kernel"
    num_rows = _ROWS if by_elements else _rows(case)
    layout = "along" if by_elements else _layout(case)

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        x = _input(num_rows, _DEPTH, layout, device, dtype)
        weights = (_weight(_COLUMNS, _DEPTH, layout, key, device, dtype) for key in ("gate", "up"))
        return (x, *weights), {"activation": case["ACTIVATION"]}

    name = f"{num_rows}x{_DEPTH}x{_COLUMNS} {layout} {case['ACTIVATION']}"
    return HotCall("linear_glu", name, make)


def _baddbmm(case: ReportCase) -> HotCall:
    num_rows = _rows(case)

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        new = functools.partial(randn, device=device, dtype=dtype)
        a = new(3, num_rows, _DEPTH, key="a")
        b = new(3, _DEPTH, _COLUMNS, key="b", scale=_DEPTH**-0.5)
        return (new(3, num_rows, _COLUMNS), a, b), {"beta": 0.5, "alpha": 2.0}

    return HotCall("baddbmm", f"3x{num_rows}x{_DEPTH}x{_COLUMNS}", make)


def group_sizes(average: int) -> list[int]:
    """Return uneven sizes of groups, several of three tiles of rows, one empty."""
    large = [_ROWS, 0, _ROWS, _ROWS] if average > 64 else [2 * average, 0]
    rest = _GROUPS - len(large)
    return [*large, *[max(1, (average * _GROUPS - sum(large)) // rest)] * rest]


def average_rows(case: ReportCase) -> int:
    """Return the rows of a group, on average, that take the case's tile."""
    block = case.get("BLOCK_M", 128)
    return block if block < 128 and not case.is_float32 else 72


def _grouped_mm(case: ReportCase) -> HotCall:
    adds = bool(case.get("ADDS"))
    average = average_rows(case) if case.kernel == "product_kernel" else 72
    # Gradients and sums of rows come with any layout; the one by pointers launches the most.
    layout = _layout(case) if case.kernel == "product_kernel" else "across"
    activation = case.get("ACTIVATION", "gelu")

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        sizes = group_sizes(average)
        # A few rows behind the last group belong to none.
        num_rows = -(-(sum(sizes) + 1) // 16) * 16
        x = _input(num_rows, _DEPTH, layout, device, dtype)
        ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)
        weight = grouped_weight(_GROUPS, _DEPTH, _COLUMNS, layout, "weight", device, dtype)
        bias = randn(_GROUPS, _COLUMNS, device=device, dtype=dtype, key="bias")
        options: dict[str, Any] = {"activation": activation}
        if adds:
            into = torch.zeros(weight.shape, device=device, dtype=torch.float32)
            options["grad_weight_into"] = into
        return (x, weight, ends, bias), options

    name = f"{_GROUPS} groups of {average}, {_DEPTH}x{_COLUMNS} {layout}{' added' * adds}"
    return HotCall("grouped_mm", name, make, buffers={"grad_weight_into": 1} if adds else {})


def grouped_weight(
    groups: int,
    rows: int,
    columns: int,
    layout: str,
    key: str,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``[groups, rows, columns]``, dense along the columns if "across" is in the layout.

    With "apart" in it no descriptor can read them.
    """
    new = functools.partial(
        randn, device=device, dtype=dtype, scale=rows**-0.5, grad=False, key=key
    )
    extra = int("apart" in layout)
    if "across" in layout:
        return new(groups, rows, columns + extra)[..., :columns].requires_grad_()
    return new(groups, columns, rows + extra)[..., :rows].mT.requires_grad_()


CALLS: dict[str, Callable[[ReportCase], HotCall]] = {
    "linear_act": _linear_act,
    "linear_glu": _linear_glu,
    "baddbmm": _baddbmm,
    "grouped_mm": _grouped_mm,
}
