"""Rules for torch's own modules, by exact type.

A linear layer on its own is only worth replacing where the own product is faster than torch's:
``own_product`` says where. With an activation behind it, in an ``nn.Sequential``, it always is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedops import nn as fused
from fusedops._core.architecture import is_by_intel
from fusedops.integrations.hf.class_table import ClassTable
from fusedops.integrations.hf.original_code import remember
from fusedops.integrations.hf.rules import activations
from fusedops.integrations.hf.rules.activations import activation_name
from fusedops.integrations.hf.rules.probes import empty_like_parameters
from fusedops.integrations.hf.rules.rule import (
    NOT_APPLICABLE,
    FusionPlan,
    PatchRule,
    Refusal,
    always,
    bypass_obstacle,
    global_hooks,
    runs_here,
)
from fusedops.ops.gelu import gelu
from fusedops.ops.linear_act import linear_act
from fusedops.ops.mlp import mlp
from fusedops.ops.rms_norm import rms_norm


def own_product(input: torch.Tensor) -> bool:
    """Return whether a linear layer without activation is computed by the own product.

    On the CPU it is the faster one, for any number of rows where weights come from memory
    (``docs/dev/performance_notes.md``, "Decoding"), but for float32 on processors by Intel, where
    torch calls MKL. On a GPU it is torch's.
    """
    return input.is_cpu and runs_here(input) and _product_dtype(input) in _SERVED


_HALF = (torch.bfloat16, torch.float16)
_SERVED = _HALF if is_by_intel() and torch.backends.mkl.is_available() else (torch.float32, *_HALF)


def torchs_product_is_faster(tensor: torch.Tensor) -> bool:
    """Return whether torch's product and another op behind it are faster than one fused op.

    Args:
        tensor: the input, or a weight of its dtype.
    """
    return tensor.is_cpu and _product_dtype(tensor) == torch.float32 not in _SERVED


FASTER_PRODUCT = "torch's product of float32 is faster on this processor"


def _product_dtype(input: torch.Tensor) -> torch.dtype:
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return input.dtype


class _Qconfig:
    """What ``torch.ao.quantization`` sets on each module; it passes the patched ones by: a warning.

    It looks for exact classes, and finds none of these.
    """

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is not None and "qconfig" in module.__dict__:
            return module.__dict__["qconfig"]
        raise AttributeError(f"{owner.__name__!r} object has no attribute 'qconfig'")

    def __set__(self, module: nn.Module, value: Any) -> None:
        if value is not None or isinstance(module, nn.Linear):
            warnings.warn(
                f"torch.ao.quantization looks for exact classes and leaves patched "
                f"{type(module).__name__} modules as they are: call fusedops.unpatch(model) "
                "before it and fusedops.patch(model) after it",
                stacklevel=3,
            )
        module.__dict__["qconfig"] = value

    def __delete__(self, module: nn.Module) -> None:
        del module.__dict__["qconfig"]


class LayerNorm(fused.LayerNorm):
    """``nn.LayerNorm`` with the fused op."""

    qconfig = _Qconfig()


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` with the fused op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised input."""
        # Of two dtypes torch makes a third way of computing it, with the sums of neither.
        fits = self.weight is None or self.weight.dtype == x.dtype
        if not fits or not runs_here(x):
            return super().forward(x)
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GELU(nn.GELU):
    """``nn.GELU`` with the fused op."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return GELU of the input."""
        return gelu(input, self.approximate)


class Linear(nn.Linear):
    """``nn.Linear`` with the own product where that is faster."""

    qconfig = _Qconfig()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input @ weight.T + bias``."""
        if not own_product(input):
            return F.linear(input, self.weight, self.bias)
        return linear_act(input, self.weight, self.bias, activation="identity")


class Sequential(nn.Sequential):
    """``nn.Sequential`` that runs linear, activation (and linear) as one op where they follow."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the last module's output."""
        modules = list(self._modules.values())
        fusable = global_hooks() is None
        position = 0
        while position < len(modules):
            count = _fusable(modules, position) if fusable and _is_input(input) else 1
            if count == 1:
                input = modules[position](input)
            else:
                input = _run(modules[position : position + count], input)
            position += count
        return input


class CrossEntropyLoss(fused.CrossEntropyLoss):
    """``nn.CrossEntropyLoss`` of logits and class indices with the fused op."""

    z_loss = 0.0
    softcap = None

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss; sharded logits keep torch's, which knows them."""
        if type(input) is not torch.Tensor or not runs_here(input):
            return nn.CrossEntropyLoss.forward(self, input, target)
        return super().forward(input, target)


# Class of a linear layer -> whether its bias is part of the product; ``by_code.py`` adds those that
# are linear layers by their code.
LINEARS: ClassTable[bool] = ClassTable("linear")
LINEARS[nn.Linear] = LINEARS[Linear] = True
# Classes whose weight is [in, out] -> why the product of one must not be done without calling it.
TRANSPOSED: dict[type, Callable[[str, Any], str | None]] = {}


def _gelu_name(module: Any) -> str | None:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)


activations.KNOWN.update({nn.GELU: _gelu_name, GELU: _gelu_name, nn.SiLU: "silu", nn.ReLU: "relu"})
for _activation in (nn.SiLU, nn.ReLU):
    remember(_activation)
activations.FUNCTIONS.update({F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", F.silu: "silu"})


def is_linear(module: Any) -> bool:
    """Return whether a module is a linear layer, also one of a class that was derived from it."""
    return isinstance(module, (nn.Linear, *TRANSPOSED))


def product_obstacle(name: str, module: Any) -> str | None:
    """Return why a product with the weight of ``module`` must not be done without calling it."""
    return TRANSPOSED.get(type(module), linear_obstacle)(name, module)


def weight_of(linear: Any) -> torch.Tensor:
    """Return the weight of a linear layer as ``[out, in]``."""
    weight: torch.Tensor = linear.weight
    return weight.t() if type(linear) in TRANSPOSED else weight


def linear_obstacle(name: str, module: Any) -> str | None:
    """Return why the product of ``module`` must not be done without calling it, or ``None``."""
    reason = bypass_obstacle(name, module, LINEARS)
    if reason is None and not LINEARS[type(module)] and module.bias is not None:
        reason = f"{name} adds its bias to the rounded product"
    return reason


def _is_input(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and runs_here(value)


def _is_pair(modules: list[Any], position: int) -> bool:
    """Return whether a linear layer and a known activation stand at ``position``."""
    return (
        position + 1 < len(modules)
        and type(modules[position]) in LINEARS
        and activation_name(modules[position + 1]) is not None
    )


def _pair_obstacle(modules: list[Any], position: int) -> str | None:
    activation = modules[position + 1]
    return linear_obstacle(str(position), modules[position]) or bypass_obstacle(
        str(position + 1), activation, (type(activation),)
    )


def _fusable(modules: list[Any], position: int) -> int:
    """Return how many modules from ``position`` on run as one: 1, 2 or 3."""
    if not _is_pair(modules, position) or _pair_obstacle(modules, position) is not None:
        return 1
    if torchs_product_is_faster(modules[position].weight):
        return 1
    last = position + 2
    return 2 if last == len(modules) or linear_obstacle(str(last), modules[last]) else 3


def _run(modules: list[Any], input: torch.Tensor) -> torch.Tensor:
    first, activation = modules[0], activation_name(modules[1])
    assert activation is not None
    if len(modules) == 2:
        return linear_act(input, first.weight, first.bias, activation=activation)
    second = modules[2]
    return mlp(input, first.weight, first.bias, second.weight, second.bias, activation=activation)


def _sequence_inside(module: nn.Sequential) -> tuple[str, ...]:
    """Return the names of the children that run as one with others."""
    names, children = list(module._modules), list(module)
    inside: list[str] = []
    position = 0
    while position < len(children):
        count = _fusable(children, position)
        if count > 1:
            inside += names[position : position + count]
        position += count
    return tuple(inside)


def _sequence_plan(module: nn.Sequential) -> FusionPlan | Refusal:
    children = list(module)
    pairs = [position for position in range(len(children)) if _is_pair(children, position)]
    if not pairs:
        return NOT_APPLICABLE
    reasons = [_pair_obstacle(children, position) for position in pairs]
    reason = global_hooks() if None in reasons else "; ".join(map(str, reasons))
    if reason is not None:
        return Refusal(reason)
    if torchs_product_is_faster(empty_like_parameters(module)):
        return FusionPlan((), note=AS_FAST)
    return FusionPlan(("linear_act", "mlp"), _sequence_inside(module))


AS_FAST = "torch's own product is as fast here"


def product_plan(module: nn.Module) -> FusionPlan:
    """Return the plan of a linear layer."""
    runs = own_product(empty_like_parameters(module))
    return FusionPlan(("linear_act",)) if runs else FusionPlan((), note=AS_FAST)


def _loss_plan(module: nn.CrossEntropyLoss) -> FusionPlan | Refusal:
    known = module.weight is None
    return FusionPlan(("cross_entropy",)) if known else Refusal("it has class weights")


RULES = (
    PatchRule(nn.LayerNorm, LayerNorm, "O1", always("layer_norm"), guarded=True),
    PatchRule(nn.RMSNorm, RMSNorm, "O1", always("rms_norm")),
    PatchRule(nn.GELU, GELU, "O1", always("gelu"), guarded=True),
    PatchRule(nn.Linear, Linear, "O2", product_plan),
    PatchRule(nn.Sequential, Sequential, "O2", _sequence_plan),
    PatchRule(nn.CrossEntropyLoss, CrossEntropyLoss, "O2", _loss_plan),
)
