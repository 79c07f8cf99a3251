"""Hot samples of matrix products: dense, batched and grouped, by pointers and by descriptors.

Weights lie "along" the sums, "across" them, or "apart", where no descriptor can read them.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from hot_samples.call import HotCall, New, in_float32

# Three tiles of 128 rows, three of 256 columns, and five steps of 64 along the sums.
_ROWS, _COLUMNS, _DEPTH = 272, 528, 272
GROUPS = 64  # of which the kernels' tables have 128 places


def _weight(new: New, key: str, layout: str) -> torch.Tensor:
    scaled = {"scale": _DEPTH**-0.5, "grad": False, "key": key}
    if layout == "across":
        return new(_DEPTH, _COLUMNS, **scaled).t().requires_grad_()
    return new(_COLUMNS, _DEPTH, **scaled).requires_grad_()


def _input(new: New, rows: int, layout: str) -> torch.Tensor:
    """Return ``[rows, depth]``; "apart": rows begin where no descriptor can."""
    made = new(rows, _DEPTH + (layout == "apart"), grad=False)
    return made[:, :_DEPTH].requires_grad_()


def _linear_act(rows: int, layout: str) -> HotCall:
    def make(new: New) -> Any:
        weight, bias = _weight(new, "weight", layout), new(_COLUMNS, key="bias")
        return (_input(new, rows, layout), weight, bias), {"activation": "gelu"}

    return HotCall("linear_act", f"{rows}x{_DEPTH}x{_COLUMNS} {layout}", make)


def _mlp() -> HotCall:
    # Eight programs for each of 132 multiprocessors share two tiles of columns.
    rows, inner = 3 * 8 * (8 * 132 // 3) + 16, _COLUMNS

    def make(new: New) -> Any:
        w1 = new(inner, 64, scale=0.125, key="w1")
        w2 = new(48, inner, scale=inner**-0.5, key="w2")
        args = (new(rows, 64), w1, new(inner, key="b1"), w2, new(48, key="b2"))
        return args, {"activation": "gelu", "recompute": True}

    return HotCall("mlp", f"{rows}x64x{inner}", make)


def _linear_glu(rows: int, layout: str, activation: str = "silu") -> HotCall:
    def make(new: New) -> Any:
        weights = (_weight(new, key, layout) for key in ("gate", "up"))
        return (_input(new, rows, layout), *weights), {"activation": activation}

    return HotCall("linear_glu", f"{rows}x{_DEPTH}x{_COLUMNS} {layout} {activation}", make)


def _baddbmm(rows: int) -> HotCall:
    def make(new: New) -> Any:
        b = new(3, _DEPTH, _COLUMNS, key="b", scale=_DEPTH**-0.5)
        args = (new(3, rows, _COLUMNS), new(3, rows, _DEPTH, key="a"), b)
        return args, {"beta": 0.5, "alpha": 2.0}

    return HotCall("baddbmm", f"3x{rows}x{_DEPTH}x{_COLUMNS}", make)


def _grouped_mm(average: int, layout: str, *, adds: bool = False) -> HotCall:
    """Return a product of uneven groups, several of three tiles of rows, one empty."""
    large = [_ROWS, 0, _ROWS, _ROWS] if average > 64 else [2 * average, 0]

    def make(new: New) -> Any:
        rest = GROUPS - len(large)
        sizes = [*large, *[max(1, (average * GROUPS - sum(large)) // rest)] * rest]
        # A few rows behind the last group belong to none.
        x = _input(new, -(-(sum(sizes) + 1) // 16) * 16, layout)
        ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=new.device)
        weight = grouped_weight(new, _DEPTH, _COLUMNS, layout, "weight")
        options: dict[str, Any] = {"activation": "gelu"}
        if adds:
            into = torch.zeros(weight.shape, device=new.device, dtype=torch.float32)
            options["grad_weight_into"] = into
        return (x, weight, ends, new(GROUPS, _COLUMNS, key="bias")), options

    name = f"{GROUPS} groups of {average}, {_DEPTH}x{_COLUMNS} {layout}{' added' * adds}"
    return HotCall("grouped_mm", name, make, buffers={"grad_weight_into": 1} if adds else {})


def grouped_weight(new: New, rows: int, columns: int, layout: str, key: str) -> torch.Tensor:
    """Return ``[groups, rows, columns]``, dense along the columns if "across" is in the layout."""
    scaled = {"scale": rows**-0.5, "grad": False, "key": key}
    extra = int("apart" in layout)
    if "across" in layout:
        return new(GROUPS, rows, columns + extra, **scaled)[..., :columns].requires_grad_()
    return new(GROUPS, columns, rows + extra, **scaled)[..., :rows].mT.requires_grad_()


# Few rows have tiles of their own.
_LAYOUTS = [(16, "along"), (64, "along"), *((_ROWS, each) for each in ("apart", "along", "across"))]
CALLS: dict[str, list[HotCall]] = {
    "linear_act": [
        *(_linear_act(*each) for each in _LAYOUTS),
        _mlp(),
        *in_float32(_linear_act(_ROWS, "along"), _mlp()),
    ],
    "linear_glu": [
        *(_linear_glu(*each) for each in _LAYOUTS),
        _linear_glu(_ROWS, "along", "gelu"),
        *in_float32(*(_linear_glu(_ROWS, "along", each) for each in ("silu", "gelu"))),
    ],
    "baddbmm": [*map(_baddbmm, (16, 64, _ROWS)), *in_float32(_baddbmm(_ROWS))],
    "grouped_mm": [
        *(_grouped_mm(rows if rows < 128 else 72, layout) for rows, layout in _LAYOUTS),
        _grouped_mm(72, "across", adds=True),
        *in_float32(
            *(_grouped_mm(72, layout) for layout in ("along", "across")),
            _grouped_mm(72, "across", adds=True),
        ),
    ],
}
