"""Liger's Triton kernels in the figures of our own report: where ours are expected to win.

    python tools/peer_kernels.py           # writes docs/reports/triton_peers.csv
    python tools/peer_kernels.py --check   # compares with it

No GPU is needed: Liger's functions are called on CPU tensors with launches that are only noted, and
what they would launch, with their own tiles and warps, is compiled for sm_90 and read as ours are
(``kernel_report.py``). ``bytes`` is what a pass moves for each element of bfloat16, by the kernel
and by what its launcher does beside it, ``estimate`` the share of the bandwidth that the arithmetic
of ``kernel_report_estimate.py`` allows, in percent; ``our_bytes`` and ``our_estimate`` are the same
of the rows of ours that do the pass. ``times`` is how many times faster that lets ours be. 1.00
says that both wait for memory alone: what differs then is not in this arithmetic.

``make kernel-report-peers`` installs what this needs in a folder of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import kernel_report
import report_table
import torch

CAPABILITY = 90
ROWS = 64  # more would change no kernel
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
FIGURES = ("warps", "registers", "stack", "blocks", "loads", "per_16_bytes", "in_flight")


@dataclass(frozen=True)
class Pass:
    """A pass of an op that both libraries have.

    Attributes:
        op: our name.
        kernel: Liger's kernel.
        moved: bytes that Liger moves for each element.
        ours: kernel, case and bytes of our rows that do the same.
    """

    op: str
    kernel: str
    moved: int
    ours: tuple[tuple[str, str, int], ...]


_FORWARD, _BACKWARD = "_forward_kernel", "_backward_kernel"
_ROW = "BLOCK_M=1, BLOCK_N=4096, "
_ADD = "not centred, dropout none"
_HEADS = "half, forward, BLOCK_H=8, BLOCK_R=64, BLOCK_REST=0"
PASSES = (
    Pass("rms_norm", "_rms_norm_forward_kernel", 4, ((_FORWARD, _ROW + "not centred", 4),)),
    # It fills the gradient with zeros before it writes it, unless told to overwrite what came in.
    Pass(
        "rms_norm", "_rms_norm_backward_kernel", 8, ((_BACKWARD, "BLOCK_N=4096, not centred", 6),)
    ),
    Pass("layer_norm", "_layer_norm_forward_kernel", 4, ((_FORWARD, _ROW + "centred", 4),)),
    Pass(
        "layer_norm", "_layer_norm_backward_kernel", 6, ((_BACKWARD, "BLOCK_N=4096, centred", 6),)
    ),
    Pass("add_rms_norm", "_fused_add_rms_norm_forward_kernel", 8, ((_FORWARD, _ROW + _ADD, 8),)),
    Pass(
        "add_rms_norm",
        "_fused_add_rms_norm_backward_kernel",
        8,
        ((_BACKWARD, "BLOCK_N=4096, " + _ADD, 8),),
    ),
    Pass("swiglu", "_swiglu_forward_kernel", 6, ((_FORWARD, "silu, BLOCK=1024", 6),)),
    Pass("swiglu", "_swiglu_backward_kernel", 10, ((_BACKWARD, "silu, BLOCK=1024", 10),)),
    Pass("geglu", "_geglu_tanh_forward_kernel", 6, ((_FORWARD, "gelu_tanh, BLOCK=1024", 6),)),
    Pass("geglu", "_geglu_tanh_backward_kernel", 10, ((_BACKWARD, "gelu_tanh, BLOCK=1024", 10),)),
    Pass("rotary_embedding", "_triton_rope", 4, (("_kernel", _HEADS, 4),)),
    # Its one kernel reads twice and leaves the gradient where the logits were; of its two loops the
    # figures are those of the one that moves more.
    Pass(
        "cross_entropy",
        "liger_cross_entropy_kernel",
        6,
        (
            ("_sums_kernel", "BLOCK=4096, FIRST=True, LAST=True, SMOOTH=False, CAPPED=False", 2),
            (_BACKWARD, "BLOCK=4096, CAPPED=False", 4),
        ),
    ),
)


def calls() -> dict[str, tuple[Any, ...]]:
    """Return arguments for each op: rows of 4096, a gated layer's 14336, 128256 logits."""

    def values(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)

    x, wide, heads = (ROWS, 4096), (ROWS, 14336), (1, ROWS, 32, 128)
    angles = torch.zeros(1, ROWS, 128, dtype=torch.bfloat16)
    return {
        "rms_norm": (values(*x), (4096,), values(4096), 1e-5),
        "layer_norm": (values(*x), (4096,), values(4096), values(4096)),
        "add_rms_norm": (values(*x), values(*x), (4096,), values(4096), 1e-5),
        "swiglu": (values(*wide), values(*wide)),
        "geglu": (values(*wide), values(*wide), "tanh"),
        "rotary_embedding": (*(values(*heads).transpose(1, 2) for _ in range(2)), angles, angles),
        "cross_entropy": (values(ROWS, 128256), torch.zeros(ROWS, dtype=torch.int64)),
    }


def noted(call: Callable[[], Any]) -> dict[str, dict[str, Any]]:
    """Return what a call launches, kernel name -> case of the report; nothing is run."""
    from triton.runtime.jit import JITFunction

    found: dict[str, dict[str, Any]] = {}

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.setdefault(self.__name__, case_of(self, args, options, grid))

    with mock.patch.object(JITFunction, "run", note):
        call()
    return found


def case_of(
    kernel: Any, args: tuple[Any, ...], options: dict[str, Any], grid: Any
) -> dict[str, Any]:
    """Describe a launch for the report: a number that is 1 is a constant, as it is to Triton."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    for param in kernel.params:
        value = given.get(param.name, param.default)
        if param.is_constexpr or value is None or (type(value) is int and value == 1):
            constexprs[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
        else:
            kinds = {int: "i32", float: "fp32", bool: "i1"}
            signature[param.name] = kinds[type(value)]
    return {
        "kernel": kernel,
        "signature": signature,
        "constexprs": constexprs,
        "num_warps": given.get("num_warps", 4),
        "num_stages": 1,  # Triton runs no loads ahead in a loop without a matrix product
        "matrix": False,
        "few_rows": False,
        # A grid of as many programs as there are multiprocessors is one program on the CPU.
        "resident": 1 if tuple(grid) == (1,) else None,
        "label": "",
    }


def launches() -> dict[tuple[str, str], dict[str, Any]]:
    """Return Liger's launches, forward and backward, by op and kernel."""
    from fusedops.bench.peers import peers_of

    found = {}
    for op, args in calls().items():
        peer = peers_of(op)["liger"]

        def both(peer: Any = peer, args: tuple[Any, ...] = args) -> None:
            outputs = peer(*args)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

        found |= {(op, name): each for name, each in noted(both).items()}
    return found


def row(
    each: Pass, launch: dict[str, Any], ours: dict[tuple[str, str, str], report_table.Row]
) -> report_table.Row:
    """Return the row of a pass."""
    figures = kernel_report.figures(launch, CAPABILITY)
    our_time, our_bytes = 0.0, 0
    for kernel, case, moved in each.ours:
        our_time += moved / int(ours[each.op, kernel, case]["estimate"])
        our_bytes += moved
    return {
        "op": each.op,
        "kernel": each.kernel,
        **{name: figures[name] for name in FIGURES},
        "bytes": str(each.moved),
        "estimate": figures["estimate"],
        "our_bytes": str(our_bytes),
        "our_estimate": f"{our_bytes / our_time:.0f}",
        "times": f"{each.moved / int(figures['estimate']) / our_time:.2f}",
    }


def main() -> int:
    """Compile Liger's kernels, and write or compare the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    options = parser.parse_args()
    from importlib.metadata import PackageNotFoundError, version

    from triton import __version__

    try:
        liger = version("liger-kernel")
    except PackageNotFoundError:
        print("liger-kernel is not installed: no report of its kernels")
        return 0
    sys.path.insert(0, str(kernel_report.ROOT))
    ours = report_table.rows(report_table.REPORTS / "triton_kernels.csv")
    ours = [row for row in ours if row["arch"] == f"sm_{CAPABILITY}"]
    by_name = {(each["op"], each["kernel"], each["case"]): each for each in ours}
    found = launches()
    table = report_table.Table(
        path=report_table.REPORTS / "triton_peers.csv",
        command="make kernel-report-peers",
        compiler=f"triton {__version__}, liger-kernel {liger}",
        keys=("op", "kernel"),
        bounded=(),
        not_below=("times",),
        problems=lambda _: [],
    )
    rows = [row(each, found[each.op, each.kernel], by_name) for each in PASSES]
    report_table.show(rows)
    return report_table.finish(table, rows, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
