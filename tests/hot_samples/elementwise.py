"""Hot samples of what works on elements: activations, gated units, dropout, rotary positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fusedops._core.activation import GELU_VARIANTS
from fusedops.specs.make import randn
from hot_samples.call import HotCall, ReportCase, deep

_APPROXIMATE = {activation: name for name, activation in GELU_VARIANTS.items()}
# A backward with a sum over rows has eight programs a multiprocessor, shared by tiles of columns;
# three tiles of rows and more for each of 132.
_PROGRAMS = 8 * 132


def _deep_rows(block: int, column_tiles: int) -> int:
    return 3 * block * -(-_PROGRAMS // column_tiles) + 16


def _gelu(case: ReportCase) -> HotCall:
    approximate = _APPROXIMATE[case["ACTIVATION"]]
    count = deep(case["BLOCK"])

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        return randn(16, count // 16, device=device, dtype=dtype), approximate

    return HotCall("gelu", f"{count} {approximate}", make)


def _bias_gelu(case: ReportCase) -> HotCall:
    approximate = _APPROXIMATE[case["ACTIVATION"]]
    cols = deep(case["BLOCK_N"])
    num_rows = _deep_rows(case["BLOCK_M"], 3)

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        x = randn(num_rows, cols, device=device, dtype=dtype)
        return x, randn(cols, device=device, dtype=dtype, key="bias"), approximate

    return HotCall("bias_gelu", f"{num_rows}x{cols} {approximate}", make)


def _bias_dropout_add(case: ReportCase) -> HotCall:
    cols = deep(case["BLOCK_N"])
    num_rows = _deep_rows(case["BLOCK_M"], 3)

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        new = functools.partial(randn, device=device, dtype=dtype)
        shape = (num_rows, cols)
        return new(*shape), new(cols, key="bias"), new(*shape, key="residual"), 0.1

    return HotCall("bias_dropout_add", f"{num_rows}x{cols}", make, random=True)


def _glu(op: str, case: ReportCase) -> HotCall:
    cols = deep(case["BLOCK"])
    options = {"approximate": _APPROXIMATE[case["ACTIVATION"]]} if op == "geglu" else {}

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        # Halves of one projection: rows that are apart.
        both = randn(48, 2 * cols, device=device, dtype=dtype).detach()
        gate, up = (half.requires_grad_() for half in both.chunk(2, dim=1))
        return (gate, up), options

    return HotCall(op, " ".join([f"48x{cols}", *options.values()]), make)


def _rotary(case: ReportCase) -> HotCall:
    head_dim, rotary_dim = case["HEAD_DIM"], case["ROTARY_DIM"]
    interleaved = case["INTERLEAVED"]
    heads = max(32, 3 * case["BLOCK_H"])

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        def new(count: int, key: str) -> torch.Tensor:
            made = randn(2, 48, count, head_dim, device=device, dtype=dtype, key=key)
            return made.detach().transpose(1, 2).requires_grad_()

        place = torch.arange(48, device=device, dtype=torch.float32)
        speed = 10000.0 ** (torch.arange(rotary_dim // 2, device=device) * (-2.0 / rotary_dim))
        angle = place[:, None] * speed
        repeat = torch.repeat_interleave if interleaved else None
        wide = repeat(angle, 2, dim=-1) if repeat else torch.cat([angle, angle], -1)
        tables = (wide.cos().to(dtype), wide.sin().to(dtype))
        return (new(heads, "q"), new(16, "k"), *tables), {"interleaved": interleaved}

    form = "interleaved" if interleaved else "half"
    return HotCall("rotary_embedding", f"2x{heads}x48x{head_dim} of {rotary_dim} {form}", make)


CALLS: dict[str, Callable[[ReportCase], HotCall]] = {
    "gelu": _gelu,
    "bias_gelu": _bias_gelu,
    "bias_dropout_add": _bias_dropout_add,
    "geglu": functools.partial(_glu, "geglu"),
    "swiglu": functools.partial(_glu, "swiglu"),
    "rotary_embedding": _rotary,
}
