"""Rules for torch's own modules, by exact type.

A linear layer alone is only replaced where ``own_product`` says that this is faster than torch's.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fusedops import nn as fused
from fusedops.integrations.hf.class_table import ClassTable
from fusedops.integrations.hf.original_code import remember
from fusedops.integrations.hf.partitioned_weights import gathers_on_access
from fusedops.integrations.hf.rules import activations
from fusedops.integrations.hf.rules.rule import (
    TORCH_MULTIPLIES_FLOAT32,
    FusionPlan,
    PatchRule,
    Refusal,
    always,
    bypass_obstacle,
    empty_like_parameters,
    product_dtype,
    runs_here,
)
from fusedops.ops.gelu import gelu
from fusedops.ops.linear_act import linear_act
from fusedops.ops.rms_norm import rms_norm

AS_FAST = "torch's own product is as fast here"


def own_product(input: torch.Tensor) -> bool:
    """Return whether a linear layer without activation is computed by the own product.

    On the CPU it is the faster one, for any number of rows where weights come from memory
    (``docs/dev/performance_notes.md``, "Decoding"), but for float32 on processors by Intel, where
    torch calls MKL. On a GPU it is torch's.
    """
    return input.is_cpu and runs_here(input) and product_dtype(input) in _SERVED


_HALF = (torch.bfloat16, torch.float16)
_SERVED = _HALF if TORCH_MULTIPLIES_FLOAT32 else (torch.float32, *_HALF)


def torchs_product_is_faster(tensor: torch.Tensor) -> bool:
    """Return whether torch's product and another op behind it are faster than one fused op.

    ``tensor`` is the input, or a weight of its dtype.
    """
    return tensor.is_cpu and product_dtype(tensor) == torch.float32 not in _SERVED


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


class CrossEntropyLoss(fused.CrossEntropyLoss):
    """``nn.CrossEntropyLoss`` of logits and class indices with the fused op."""

    z_loss = 0.0
    softcap = None

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss; sharded logits keep torch's, which knows them."""
        if type(input) is not torch.Tensor or not runs_here(input):
            return nn.CrossEntropyLoss.forward(self, input, target)
        return super().forward(input, target)


class LinearLayer(NamedTuple):
    """What a class of linear layers does in another way than torch's."""

    is_transposed: bool = False  # its weight is ``[in, out]``
    rounds_twice: bool = False  # it adds its bias to the rounded product


# ``by_code.py`` adds those that are linear layers by their code.
LINEARS: ClassTable[LinearLayer] = ClassTable("linear")
LINEARS[nn.Linear] = LINEARS[Linear] = LinearLayer()
LINEAR_BASES: list[type[nn.Module]] = [nn.Linear]

for _gelu in (nn.GELU, GELU):
    activations.KNOWN[_gelu] = lambda module: activations.FORMS["gelu"].get(module.approximate)
for _activation, _name in ((nn.SiLU, "silu"), (nn.ReLU, "relu")):
    activations.KNOWN[_activation] = _name
    remember(_activation)
activations.FUNCTIONS.update({F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", F.silu: "silu"})


def is_linear(module: Any) -> bool:
    """Return whether a module is a linear layer, also one of a class that was derived from it."""
    return isinstance(module, tuple(LINEAR_BASES))


def product_obstacle(name: str, module: Any) -> str | None:
    """Return why the product of ``module`` must not be done without calling it, or ``None``."""
    reason = bypass_obstacle(name, module, LINEARS)
    if reason is None and LINEARS[type(module)].rounds_twice and module.bias is not None:
        reason = f"{name} adds its bias to the rounded product"
    if reason is None and LINEARS[type(module)].is_transposed and gathers_on_access(module):
        reason = f"{name} is partitioned: its transpose, kept for backward, would stay gathered"
    return reason


def weight_of(linear: Any) -> torch.Tensor:
    """Return the weight of a linear layer as ``[out, in]``."""
    weight: torch.Tensor = linear.weight
    return weight.t() if LINEARS[type(linear)].is_transposed else weight


def product_plan(module: nn.Module) -> FusionPlan:
    """Return the plan of a linear layer."""
    example = empty_like_parameters(module)
    runs = example.is_meta or own_product(example)  # on meta, the device is not known yet
    return FusionPlan(("linear_act",)) if runs else FusionPlan((), note=AS_FAST)


def _loss_plan(module: nn.CrossEntropyLoss) -> FusionPlan | Refusal:
    known = module.weight is None
    return FusionPlan(("cross_entropy",)) if known else Refusal("it has class weights")


RULES = (
    PatchRule(nn.LayerNorm, LayerNorm, "O1", always("layer_norm"), guarded=True),
    PatchRule(nn.RMSNorm, RMSNorm, "O1", always("rms_norm")),
    PatchRule(nn.GELU, GELU, "O1", always("gelu"), guarded=True),
    PatchRule(nn.Linear, Linear, "O2", product_plan),
    PatchRule(nn.CrossEntropyLoss, CrossEntropyLoss, "O2", _loss_plan),
)
