"""A GPU on which operators' Triton kernels run from the PTX that was compiled for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fake_gpu
import torch
from ptx_machine.gpu import Driver, executing

from fusedops._core import backends, extension
from fusedops._core.capability import compute_capability
from fusedops.testing.stand_in_cuda import answers
from fusedops.testing.stand_in_device import StandIn

DEVICE = torch.device("cuda", 0)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let tensors begin as NaN: the memory of one that was freed may hold the right values."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def present(capability: int, seed: int = 0) -> Iterator[Driver]:
    """Let tensors of the CPU count as those of a GPU whose kernels the machine executes."""
    from fusedops.kernels import _attention_launch, _descriptors, _launch, _norm, _pointer_table
    from fusedops.kernels import scaled_masked_softmax as softmax

    of_cuda = answers(1, divmod(capability, 10))
    unsupported = backends._unsupported_triton

    def on_the_machine(kernels: Any, _: torch.device, args: Any, backward: bool) -> str | None:
        return unsupported(kernels, DEVICE, args, backward)

    # What asks the device of a tensor, which is the CPU, is told of the GPU.
    num_programs, has_descriptors = _launch.num_programs, _descriptors.available
    asks = (_attention_launch, _descriptors, _norm, softmax)
    with contextlib.ExitStack() as stack:
        stack.enter_context(poisoned_memory())
        machine = stack.enter_context(executing(capability, seed))
        stack.enter_context(StandIn(DEVICE, record=lambda event: None).as_current())
        for owner, name, value in (
            (extension, "triton_missing", lambda: None),
            (backends, "_unsupported_triton", on_the_machine),
            *((torch.cuda, name, of_cuda[name]) for name in fake_gpu.ASKED),
            *((each, "compute_capability", lambda _: divmod(capability, 10)) for each in asks),
            (_launch, "num_programs", lambda _: num_programs(DEVICE)),
            (_descriptors, "available", lambda _: has_descriptors(DEVICE)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for clear in (
            num_programs.cache_clear,
            _attention_launch.generation_of.cache_clear,
            has_descriptors.cache_clear,
            compute_capability.cache_clear,
            *fake_gpu._clears(_pointer_table),
        ):
            stack.callback(clear)
            clear()
        yield machine
