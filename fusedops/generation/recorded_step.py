"""A decoding step without the Python of the model: its operator calls, recorded and run again.

Modules, arguments and views of a layer take some 150 us of the host for a token, which is as long
as the products of a small model. After two recorded steps that made the same calls with the same
arguments, other than tensors, the compiled library makes these calls (``csrc/recorded_calls.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as all_modules

from fusedops._core import backends, extension, tracing


class RecordedStep:
    """Runs a function of tensors, at first itself, and then the operator calls that it made.

    Args:
        model: whose parameters and buffers the calls read. Their values may change in place. A
            hook, module or parameter that is added or replaced later ends the repetition.

    Attributes:
        reason: why the function always runs itself; ``None``: its calls may be run again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.reason = _obstacle(model)
        self._model = model
        self._modules = list(model.modules())
        self._parts = self._current_parts()
        self.forget()

    def _current_parts(self) -> list[tuple[int, ...]]:
        """Return the identities of all that a module has: some 40 us for 127 modules."""
        return [
            (
                *map(id, module._modules.values()),
                *map(id, module._parameters.values()),
                *map(id, module._buffers.values()),
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
                "forward" in module.__dict__,
            )
            for module in self._modules
        ]

    def forget(self) -> None:
        """Free the recorded calls, which refer to the tensors that they keep."""
        self._calls: Any = None
        self._repeats = False
        self._key: Any = None

    def run(
        self,
        step: Callable[..., torch.Tensor],
        inputs: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return ``step(*inputs)``.

        Args:
            step: makes the same operator calls each time, if all inputs have their shapes, and if
                the tensors that it keeps are the same objects.
            inputs: all tensors that change from step to step.
            kept: tensors that it reads and writes in place, in addition to those of the model.
        """
        if self.reason is None and (_global_hooks() or self._current_parts() != self._parts):
            self.reason = "a hook was added to the model, or a part of it was replaced"
            self.forget()
        if self.reason is not None or tracing.is_traced() or torch._C._len_torch_function_stack():
            return step(*inputs)
        shapes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        key = shapes, [id(tensor) for tensor in kept], backends.changes(), self._model.training
        if key != self._key:
            self.forget()
            self._key = key
        if self._repeats:
            output: torch.Tensor = self._calls.run(list(inputs))[0]
            return output
        return self._record(step, inputs, kept)

    def _record(
        self,
        step: Callable[..., torch.Tensor],
        inputs: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        constants = [*self._model.parameters(), *self._model.buffers(), *kept]
        calls = torch.classes.fusedops_native.RecordedCalls()
        calls.start(list(inputs), constants)
        outputs: list[torch.Tensor] = []
        try:
            outputs.append(step(*inputs))
        finally:
            reason = calls.stop(outputs)
        if reason:
            self.reason = reason
        else:
            self._repeats = self._calls is not None and calls.equals(self._calls)
            self._calls = calls
        return outputs[0]


def _obstacle(model: nn.Module) -> str | None:
    """Return why the calls of a model may not be all that it does, or ``None``."""
    missing = extension.cpu_library()
    if missing is not None:
        return missing
    if _global_hooks():
        return "hooks are registered for all modules"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has hooks"
        if "forward" in module.__dict__:
            return f"{name} has a forward of its own"
        if not type(module).__module__.startswith(("fusedops.", "torch.nn.")):
            return f"{name} is a {type(module).__name__}"
    return None


def _global_hooks() -> bool:
    return bool(all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks)
