"""Hot samples of what reduces rows: norms, softmax, losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fusedops.specs.make import randint, randn
from hot_samples.call import HotCall, ReportCase, deep

# A backward over rows has two programs a multiprocessor: three rows and more for each of 132.
_ROWS = 816
_FEW = 48


def _row_length(case: ReportCase) -> int:
    """Return the columns of a row: the block, or three of them where a row is walked."""
    long = "long" in case.kernel
    return 5 * 4096 + 16 if long else case["BLOCK_N"]


def _norm(op: str, case: ReportCase) -> HotCall:
    cols = _row_length(case)

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        new = functools.partial(randn, device=device, dtype=dtype)
        args = (new(_ROWS, cols), (cols,), new(cols, shift=1.0, scale=0.1, key="weight"))
        if op == "layer_norm":
            return (*args, new(cols, scale=0.1, key="bias")), {}
        return args, {"rounding": "hf"} if case.get("ROUND_FIRST", True) else {}

    return HotCall(op, f"{_ROWS}x{cols}", make)


def _add_norm(op: str, case: ReportCase) -> HotCall:
    cols, drops = case["BLOCK_N"], case["DROPOUT"] != "none"

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        new = functools.partial(randn, device=device, dtype=dtype)
        args = (new(_ROWS, cols), new(_ROWS, cols, key="residual"), (cols,))
        options: dict[str, Any] = {"dropout_p": 0.1} if drops else {}
        weight = new(cols, shift=1.0, scale=0.1, key="weight")
        if op == "add_layer_norm":
            return (*args, weight, new(cols, scale=0.1, key="bias")), options
        return (*args, weight), options | {"rounding": "hf"}

    name = f"{_ROWS}x{cols}{', dropout' if drops else ''}"
    return HotCall(op, name, make, random=drops)


def _softmax(case: ReportCase) -> HotCall:
    long = "long" in case.kernel
    cols = _row_length(case)
    kind = case.get("MASK", "additive" if "mask" in case.kernel or long else "none")
    learns = "backward_mask" in case.kernel
    causal = bool(case.get("CAUSAL", not learns))
    queries = _FEW if cols <= 4096 else 16

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        x = randn(2, 3, queries, cols, device=device, dtype=dtype)
        mask = None
        if kind != "none":
            # Of all heads and sequences where it has a gradient: rows are added into it.
            shape = (1 if learns else 2, 1, queries, cols)
            mask = randn(*shape, device=device, dtype=dtype, grad=learns, key="mask")
        if kind == "keep":
            assert mask is not None
            mask = mask > -0.5
        return (x, mask, 0.5), {"is_causal": causal}

    parts = [f"2x3x{queries}x{cols}", kind, "causal" * causal, "learnt" * learns]
    return HotCall("scaled_masked_softmax", ", ".join(filter(None, parts)), make)


def _cross_entropy(case: ReportCase) -> HotCall:
    capped, smooth = bool(case.get("CAPPED")), bool(case.get("SMOOTH"))
    if case.kernel == "total_kernel":
        # Three blocks of rows whose losses are added.
        return _loss(deep(case["BLOCK"]), 64)
    # Products of linear_cross_entropy are float32, and come piece by piece.
    pieces = case.types["x_ptr"] == "*fp32"
    classes = deep(case["BLOCK"])
    return _loss(_FEW, classes, capped=capped, smooth=smooth, pieces=pieces)


def _loss(
    num_rows: int,
    classes: int,
    *,
    capped: bool = False,
    smooth: bool = False,
    pieces: bool = False,
) -> HotCall:
    options: dict[str, Any] = {"softcap": 20.0} if capped else {}
    options |= {"label_smoothing": 0.1} if smooth else {}
    depth = 64

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        count = 3 * classes if pieces else classes
        target = randint(num_rows, high=count, device=device)
        target[::7] = -100
        if not pieces:
            return (randn(num_rows, count, device=device, dtype=dtype, scale=3.0), target), options
        hidden = randn(num_rows, depth, device=device, dtype=dtype)
        weight = randn(count, depth, device=device, dtype=dtype, scale=0.3, key="weight")
        return (hidden, weight, target), options | {"chunk_size": classes, "recompute": True}

    op = "linear_cross_entropy" if pieces else "cross_entropy"
    parts = [f"{num_rows}x{classes}", "soft-cap" * capped, "smooth" * smooth, "pieces" * pieces]
    return HotCall(op, ", ".join(filter(None, parts)), make)


CALLS: dict[str, Callable[[ReportCase], HotCall]] = {
    "layer_norm": functools.partial(_norm, "layer_norm"),
    "rms_norm": functools.partial(_norm, "rms_norm"),
    "add_layer_norm": functools.partial(_add_norm, "add_layer_norm"),
    "add_rms_norm": functools.partial(_add_norm, "add_rms_norm"),
    "scaled_masked_softmax": _softmax,
    "cross_entropy": _cross_entropy,
}
