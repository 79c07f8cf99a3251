"""Which backend would run an op for a module, for the report of ``patch``."""

from __future__ import annotations

import torch
from torch import nn

from fusedops._core import backends


def empty_like_parameters(module: nn.Module) -> torch.Tensor:
    """Return an empty tensor of the dtype and on the device of a module's parameters.

    A plain one, whatever they are: a quantised weight cannot make others like itself. A layer
    whose weights are packed in integers has none; what it computes is float32.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return torch.empty(0)


def resolution(op: str, module: nn.Module) -> str:
    """Return which backend would run an op for this module, and why."""
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        return "known when the parameters are on a device"
    # Dtype and device decide, and sizes that are small here.
    arguments = getattr(torch.ops.fusedops, op).default._schema.arguments
    tensor = empty_like_parameters(module).new_zeros(1, 1, 1, 8)
    try:
        return str(backends.resolve(op, *[tensor] * len(arguments)))
    except Exception as error:  # the module's forward would say so: a report never does
        return f"not known: {error}"
