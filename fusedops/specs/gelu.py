"""What tests, benchmarks and documentation need to know of ``gelu``."""

from __future__ import annotations

import functools

import torch

from fusedops._core.activation import ACTIVATIONS, GELU_VARIANTS
from fusedops.ops.gelu import gelu
from fusedops.specs import depth
from fusedops.specs.make import numel, randn
from fusedops.specs.spec import BadInput, BenchCase, Sample, Spec, same_arguments


def _eager(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return ACTIVATIONS[GELU_VARIANTS[approximate]](input)


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    new = functools.partial(randn, device=device, dtype=dtype)
    samples = [
        Sample(f"{name}_{approximate}", (new(*shape, scale=scale),), {"approximate": approximate})
        for approximate in GELU_VARIANTS
        for name, shape, scale in (("rows", (7, 33), 1.0), ("wide", (3, 5, 17), 6.0))
    ]
    return [
        *samples,
        Sample("default", (new(4, 64),)),
        Sample("positional", (new(4, 64), "fast")),
        Sample("scalar", (new(),)),
        Sample("one_element", (new(1), "tanh")),
        Sample("several_blocks", (new(3, 4099), "tanh")),
        Sample("empty", (new(0, 5),)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x = torch.randn(3, 8, device=device)
    return [
        BadInput("variant", (x, "erf"), {}, ValueError, ("approximate", "'erf'", "'none'")),
        BadInput("near_variant", (x, "tan"), {}, ValueError, ("did you mean 'tanh'",)),
        BadInput("no_variant", (x, None), {}, ValueError, ("approximate", "None")),
        BadInput("boolean", (x, True), {}, ValueError, ("approximate", "True")),
        BadInput("integers", (x.long(),), {}, TypeError, ("input", "int64")),
        BadInput("no_tensor", (1.0,), {}, TypeError, ("input", "float")),
    ]


def _case(shape: tuple[int, ...], approximate: str, headline: bool = False) -> BenchCase:
    def make(device: torch.device, dtype: torch.dtype) -> Sample:
        return Sample("bench", (randn(*shape, device=device, dtype=dtype), approximate))

    return BenchCase(
        label=f"{'x'.join(map(str, shape))} {approximate}",
        make=make,
        bytes_forward=lambda dtype: 2 * numel(shape) * dtype.itemsize,
        bytes_backward=lambda dtype: 3 * numel(shape) * dtype.itemsize,
        headline=headline,
    )


SPEC = Spec(
    name="gelu",
    op=gelu,
    eager=_eager,
    samples=_samples,
    bad_inputs=_bad_inputs,
    bench_case=_case,
    bench_cases=(
        _case((4096, 4096), "fast", headline=True),
        _case((4096, 4096), "tanh"),
        _case((4096, 4096), "none"),
        _case((16, 3072), "fast"),
    ),
    summary="GELU: erf, tanh or fast (x * sigmoid(1.702 x))",
    autocast="keep",
    depth=depth.elementwise,
    opinfo=("nn.functional.gelu",),
    from_opinfo=same_arguments,
)
