"""Calls that launch the kernel configurations which users run, three blocks deep.

``docs/reports/triton_kernels.csv`` records the machine code of the configurations in
``tools/kernel_cases``. A hot sample is a call of a public op that launches some of them, with grids
and loops of at least three blocks in each direction: the kernel's own tiles, full blocks and a last
one that is not full. Sizes are divided by 16, as in practice. ``tests/ops/test_hot_coverage.py``
launches all of them on a fake GPU and names each configuration that none of them reaches: where a
kernel has got another tile, the sizes here follow it.

    for call in calls("attention", torch.bfloat16):
        result = made(call, New(torch.device("cuda"), torch.bfloat16)).run()

Nothing here launches anything, or needs Triton, before ``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedops.specs import Sample, Spec, all_specs
from fusedops.specs.comparison import ComparisonResult, fresh, incoming
from fusedops.specs.comparison import run as run_sample
from hot_samples import attention, elementwise, experts, lists, products, rows
from hot_samples.call import HotCall, New

__all__ = ["HotCall", "HotSample", "New", "calls", "made", "ops"]

# Kernel file -> the calls that launch its configurations.
_CALLS: dict[str, list[HotCall]] = {
    **attention.CALLS,
    **elementwise.CALLS,
    **experts.CALLS,
    **lists.CALLS,
    **products.CALLS,
    **rows.CALLS,
}


@dataclass(frozen=True)
class HotSample:
    """A ``HotCall`` with its arguments, on the device and in the dtype asked for."""

    op: str  # the public op, or the operator over lists of tensors, that is called
    sample: Sample
    buffers: Mapping[str, int] = field(default_factory=dict)

    @property
    def spec(self) -> Spec | None:
        """The op's spec; an operator over lists of tensors has none of this kind."""
        return all_specs().get(self.op)

    def run(
        self, incoming: Callable[[tuple[torch.Tensor, ...]], list[torch.Tensor]] = incoming
    ) -> ComparisonResult:
        """Call the op and differentiate it; the sample's tensors are used as they lie in memory.

        What was added to a buffer takes the place of the gradient that it is. An operator over
        lists of tensors is called: its result is empty where it returns nothing.
        """
        spec = self.spec
        if spec is None:
            found = getattr(torch.ops.fusedops, self.op)(*self.sample.args)
            return ComparisonResult([] if found is None else [found], [])
        if not self.buffers:
            return run_sample(spec.op, self.sample, incoming)
        output = spec.op(*self.sample.args, **self.sample.kwargs)
        leaves = self.sample.leaves
        (given,) = incoming((output,))
        found = list(torch.autograd.grad(output, leaves, given, allow_unused=True))
        for name, position in self.buffers.items():
            leaf = self.sample.args[position]
            place = next(i for i, each in enumerate(leaves) if each is leaf)
            assert found[place] is None, f"{name} was given, and the gradient came as well"
            found[place] = self.sample.kwargs[name].to(leaf.dtype)
        return ComparisonResult([output.detach()], found)

    def plain(self) -> Sample:
        """Return the same call without buffers, with new leaves: what gives the truth."""
        kwargs = {k: v for k, v in self.sample.kwargs.items() if k not in self.buffers}
        return fresh(Sample(self.sample.name, self.sample.args, kwargs, self.sample.random))


def ops() -> list[str]:
    """Return the kernel files that have hot samples, sorted by name."""
    return sorted(_CALLS)


def calls(op: str, dtype: torch.dtype = torch.bfloat16) -> list[HotCall]:
    """Return the calls that launch the configurations of a file in ``fusedops/kernels``.

    Those of bfloat16 are also those of float16; the report has others of float32.
    """
    return [call for call in _CALLS[op] if call.float32 == (dtype == torch.float32)]


def made(call: HotCall, new: New) -> HotSample:
    """Return the sample of a call, with tensors that ``new`` makes."""
    args: Any = call.make(new)
    kwargs: dict[str, Any] = {}
    if isinstance(args[-1], dict):
        args, kwargs = args
    sample = Sample(call.name, tuple(args), kwargs, call.random)
    return HotSample(call.op, sample, call.buffers)
