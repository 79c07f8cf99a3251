"""Hot samples of what works on elements: activations, gated units, dropout, rotary positions."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core.activation import GELU_VARIANTS
from hot_samples.call import HotCall, New

# A backward with a sum over rows has eight programs a multiprocessor, shared by three tiles of
# columns: three tiles of rows and more for each of 132.
_ROWS, _COLUMNS = 4240, 1280
_LONG = 2560  # elements or columns: three blocks of 1024


def _gelu(form: str) -> HotCall:
    return HotCall("gelu", f"{_LONG} {form}", lambda new: (new(16, _LONG // 16), form))


def _with_bias(op: str, *options: Any) -> HotCall:
    def make(new: New) -> tuple[Any, ...]:
        data = new(_ROWS, _COLUMNS), new(_COLUMNS, key="bias")
        residual = (new(_ROWS, _COLUMNS, key="residual"),) if op == "bias_dropout_add" else ()
        return *data, *residual, *options

    name = " ".join([f"{_ROWS}x{_COLUMNS}", *map(str, options)])
    return HotCall(op, name, make, random=op == "bias_dropout_add")


def _glu(op: str, *form: str) -> HotCall:
    def make(new: New) -> Any:
        # Halves of one projection: rows that are apart.
        halves = new(48, 2 * _LONG).detach().chunk(2, dim=1)
        options = {"approximate": form[0]} if form else {}
        return tuple(half.requires_grad_() for half in halves), options

    return HotCall(op, " ".join([f"48x{_LONG}", *form]), make)


def _rotary(heads: int, head_dim: int, rotary_dim: int, interleaved: bool) -> HotCall:
    def make(new: New) -> Any:
        def rows(count: int, key: str) -> torch.Tensor:
            made = new(2, 48, count, head_dim, key=key).detach()
            return made.transpose(1, 2).requires_grad_()

        place = torch.arange(48, device=new.device, dtype=torch.float32)
        dims = torch.arange(rotary_dim // 2, device=new.device)
        angle = place[:, None] * 10000.0 ** (dims * (-2.0 / rotary_dim))
        wide = angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle, angle], -1)
        tables = (wide.cos().to(new.dtype), wide.sin().to(new.dtype))
        return (rows(heads, "q"), rows(16, "k"), *tables), {"interleaved": interleaved}

    form = "interleaved" if interleaved else "half"
    return HotCall("rotary_embedding", f"2x{heads}x48x{head_dim} of {rotary_dim} {form}", make)


CALLS: dict[str, list[HotCall]] = {
    "gelu": [_gelu(form) for form in GELU_VARIANTS],
    "bias_gelu": [_with_bias("bias_gelu", form) for form in GELU_VARIANTS],
    "bias_dropout_add": [_with_bias("bias_dropout_add", 0.1)],
    "geglu": [_glu("geglu", form) for form in GELU_VARIANTS],
    "swiglu": [_glu("swiglu")],
    "rotary_embedding": [
        _rotary(*sizes, interleaved)
        for sizes in ((48, 64, 64), (32, 128, 128), (48, 80, 32), (32, 512, 512))
        for interleaved in (False, True)
    ],
}
