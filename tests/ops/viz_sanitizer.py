"""The sanitizer of triton-viz proves with Z3 that the accesses of kernels are inside their tensors.

    make test-triton-viz

It follows addresses and masks as formulas in Triton's interpreter. The ops are those that version
3.0 can follow: it does not know addresses that a kernel loads or that a loop moves, nor ``tl.dot``.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
import triton_viz
from triton_viz.clients import Sanitizer
from triton_viz.wrapper import create_patched_jit

OPS = (
    "attention_varlen",
    "bias_gelu",
    "cross_entropy",
    "geglu",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "moe_router_loss",
    "moe_unpack",
    "rms_norm",
    "scaled_masked_softmax",
    "swiglu",
)


def traced(kernel: Any) -> Any:
    """Return the kernel, whose launches the sanitizer follows; it exits at what is wrong."""
    return triton_viz.trace(client=Sanitizer(abort_on_error=True))(kernel)


triton.jit = create_patched_jit(traced)  # before the kernels are imported


@triton.jit
def copy_too_much(x_ptr, to_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read past the end of a tensor."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + i, tl.load(x_ptr + i), mask=i < n)


def is_right(call: Callable[[], object]) -> bool:
    """Return whether the sanitizer finds nothing; an error of its own is raised."""
    report = io.StringIO()
    try:
        with contextlib.redirect_stdout(report):
            call()
    except SystemExit:
        print(report.getvalue())
        return False
    return True


def main() -> int:
    """Return 1 if an access is wrong, or if a planted one is not found."""
    import fusedops
    from fusedops.specs import all_specs
    from fusedops.specs.comparison import fresh, run

    num_samples = 0
    for name in OPS:
        spec = all_specs()[name]
        for sample in spec.samples(torch.device("cpu"), torch.float32):
            with fusedops.use_backend("triton"):
                if not is_right(lambda spec=spec, sample=sample: run(spec.op, fresh(sample))):
                    print(f"{name}, sample {sample.name}: an access outside of a tensor")
                    return 1
            num_samples += 1
    x, to = torch.zeros(100), torch.zeros(100)
    if is_right(lambda: copy_too_much[(2,)](x, to, 100, BLOCK=64)):
        print("a planted access outside of a tensor is not found")
        return 1
    print(f"{len(OPS)} ops, {num_samples} samples: all accesses are inside their tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
