"""One training step of a model, as ``report`` and ``fit`` run it: forward, loss and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedops._core import checks

Loss = Callable[[Any], torch.Tensor]


def check_arguments(op: str, model: Any, loss: Any, optimizer: Any) -> None:
    """Raise where an argument has the wrong type."""
    checks.module(op, model)
    if loss is not None and not callable(loss):
        checks.fail_type(op, "loss", "a function", loss)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        checks.fail_type(op, "optimizer", "a torch.optim.Optimizer", optimizer)


@dataclass(frozen=True)
class ModelStep:
    """A forward and a backward of a model; ``op`` is the function that errors name."""

    op: str
    model: nn.Module
    batch: Any
    loss: Loss | None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        parameters = self.model.parameters()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def run(self) -> None:
        """Run the model forward under the caller's autocast, and backward outside of it."""
        torch.clear_autocast_cache()  # each training step casts its weights
        if isinstance(self.batch, Mapping):
            output = self.model(**self.batch)
        elif isinstance(self.batch, (tuple, list)):
            output = self.model(*self.batch)
        else:
            output = self.model(self.batch)
        loss = self.loss(output) if self.loss is not None else _default_loss(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError(
                f"{self.op}: no loss was found in the model's output "
                f"({checks.type_name(output)}): give loss, a function of the output that returns "
                "a number with a gradient"
            )
        del output  # its tensors are freed before the backward
        with _without_autocast(self.device.type):
            loss.backward()


@contextlib.contextmanager
def preserve_gradients(model: nn.Module) -> Iterator[None]:
    """Take the gradients away; afterwards restore them and the states of the generators."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    devices = {parameter.device for parameter in parameters if parameter.device.type == "cuda"}
    with torch.random.fork_rng(list(devices), device_type="cuda"):
        model.zero_grad()
        try:
            yield
        finally:
            for parameter, grad in zip(parameters, gradients, strict=True):
                parameter.grad = grad


@contextlib.contextmanager
def _without_autocast(kind: str) -> Iterator[None]:
    """Leave the caller's autocast, and free its copies of weights."""
    if not torch.is_autocast_enabled(kind):
        yield
        return
    depth = torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, True)
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()


def _default_loss(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else output.float().mean()
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    values = output.values() if isinstance(output, Mapping) else output
    with contextlib.suppress(TypeError):
        first = next((value for value in values if isinstance(value, torch.Tensor)), None)
        return None if first is None else first.float().mean()
    return None
