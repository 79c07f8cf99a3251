"""A call of an op that launches configurations of the static report, not yet made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusedops.specs import Sample, all_specs
from fusedops.specs.comparison import ComparisonResult, fresh, incoming
from fusedops.specs.comparison import run as run_sample
from fusedops.specs.make import TensorFactory as New

Incoming = Callable[[tuple[torch.Tensor, ...]], list[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class HotCall:
    """A call that launches configurations of the static report."""

    op: str  # that of the kernel file, or another op or operator that runs its kernels
    name: str
    # Returns the positional arguments, or a pair of these and a dict of keyword arguments
    make: Callable[[New], Any]
    random: bool = False  # whether it draws numbers (dropout)
    # Keyword argument that a gradient is added to -> position of what it is the gradient of
    buffers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    float32: bool = False  # whether the report has its configuration in float32; else in half

    def sample(self, new: New) -> Sample:
        """Return the call with tensors that ``new`` makes."""
        args: Any = self.make(new)
        args, kwargs = args if isinstance(args[-1], dict) else (args, {})
        return Sample(self.name, tuple(args), kwargs, self.random)

    def plain(self, sample: Sample) -> Sample:
        """Return the same call without buffers, with new leaves: what gives the truth."""
        kwargs = {k: v for k, v in sample.kwargs.items() if k not in self.buffers}
        return fresh(Sample(sample.name, sample.args, kwargs, sample.random))

    def run(self, sample: Sample, incoming: Incoming = incoming) -> ComparisonResult:
        """Call the op and differentiate it; the sample's tensors are used as they lie in memory.

        What was added to a buffer takes the place of the gradient that it is. An operator over
        lists of tensors is called: its result is empty where it returns nothing.
        """
        spec = all_specs().get(self.op)
        if spec is None:
            found = getattr(torch.ops.fusedops, self.op)(*sample.args)
            return ComparisonResult([] if found is None else [found], [])
        if not self.buffers:
            return run_sample(spec.op, sample, incoming)
        output = spec.op(*sample.args, **sample.kwargs)
        (given,) = incoming((output,))
        grads = list(torch.autograd.grad(output, sample.leaves, given, allow_unused=True))
        for name, position in self.buffers.items():
            leaf = sample.args[position]
            place = next(i for i, each in enumerate(sample.leaves) if each is leaf)
            assert grads[place] is None, f"{name} was given, and the gradient came as well"
            grads[place] = sample.kwargs[name].to(leaf.dtype)
        return ComparisonResult([output.detach()], grads)


def in_float32(*calls: HotCall) -> list[HotCall]:
    """Return the calls whose configurations the report has in float32 too."""
    return [dataclasses.replace(call, float32=True) for call in calls]
