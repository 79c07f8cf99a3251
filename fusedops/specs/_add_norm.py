"""What the specs of ``add_layer_norm`` and ``add_rms_norm`` share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fusedops.specs.make import randn
from fusedops.specs.spec import BadInput, BenchCase, Sample

LIMITS = (
    "The dropout mask is not that of torch's dropout: it is drawn by another generator.",
    "With DTensor, dropout needs the whole tensor on every rank: elements are counted from its "
    "beginning.",
)


def bad_inputs(device: torch.device) -> list[BadInput]:
    """Return the calls that must raise in every op that adds a residual and normalizes."""
    narrow = torch.zeros(3, 8, device=device, dtype=torch.float8_e4m3fn)
    x, weight = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    return [
        BadInput("normalized_shape", (x, x, (7,)), {}, ValueError, ("normalized_shape", "7")),
        BadInput("residual_shape", (x, x[:2], (8,)), {}, ValueError, ("residual", "[3, 8]")),
        BadInput("residual_device", (x, x.to("meta"), (8,)), {}, ValueError, ("residual", "meta")),
        BadInput("residual_dtype", (x, x.long(), (8,)), {}, TypeError, ("residual", "int64")),
        BadInput("float8", (x, narrow, (8,)), {}, TypeError, ("residual", "float8_e4m3fn")),
        BadInput("no_residual", (x, None, (8,)), {}, TypeError, ("residual", "NoneType")),
        BadInput("integers", (x.long(), x, (8,)), {}, TypeError, ("input", "int64")),
        BadInput("weight_shape", (x, x, (8,), weight[:7]), {}, ValueError, ("weight", "[7]")),
        BadInput("weight_dtype", (x, x, (8,), weight.double()), {}, TypeError, ("weight", "sum")),
        BadInput("eps_type", (x, x, (8,)), {"eps": "small"}, TypeError, ("eps", "str")),
        BadInput("p_above", (x, x, (8,)), {"dropout_p": 1.5}, ValueError, ("dropout_p", "1.5")),
        BadInput("p_below", (x, x, (8,)), {"dropout_p": -0.1}, ValueError, ("dropout_p", "-0.1")),
        BadInput("p_type", (x, x, (8,)), {"dropout_p": "0.1"}, TypeError, ("dropout_p", "str")),
        BadInput(
            "p_nan", (x, x, (8,)), {"dropout_p": float("nan")}, ValueError, ("dropout_p", "nan")
        ),
    ]


def case_function(*, takes_bias: bool) -> Callable[..., BenchCase]:
    """Return what makes a benchmark row; an op without a bias gets an ``eps`` in its place."""

    def case(rows: int, columns: int, p: float = 0.0, headline: bool = False) -> BenchCase:
        def make(device: torch.device, dtype: torch.dtype) -> Sample:
            new = functools.partial(randn, device=device, dtype=dtype)
            data = (new(rows, columns), new(rows, columns, key="residual"), (columns,))
            last = new(columns, key="b") if takes_bias else 1e-6
            parameters = (new(columns, shift=1.0, key="w"), last)
            return Sample("bench", (*data, *parameters), {"dropout_p": p}, random=p > 0)

        return BenchCase(
            label=f"{rows}x{columns}" + (f", dropout {p}" if p else ""),
            make=make,
            bytes_forward=lambda dtype: 4 * rows * columns * dtype.itemsize,
            # Both gradients and the sum; without dropout both inputs have the same gradient.
            bytes_backward=lambda dtype: (5 if p else 4) * rows * columns * dtype.itemsize,
            headline=headline,
        )

    return case


def cases(case: Callable[..., BenchCase]) -> tuple[BenchCase, ...]:
    """Return the rows of either op."""
    return (
        case(4096, 768),
        case(4096, 1024, headline=True),
        case(4096, 1024, p=0.1, headline=True),
        case(8192, 4096),
        case(16, 768),
    )
