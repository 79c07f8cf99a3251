"""Rules for the modules that transformers' families share: ``Conv1D`` and the activations.

An activation is known by its class, because the names mislead: transformers' ``gelu`` is the erf
form, ``gelu_new``, ``gelu_fast``, ``gelu_accurate`` and ``gelu_pytorch_tanh`` are the tanh form.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import activations as originals
from transformers import pytorch_utils

from fusedops.integrations.hf.original_code import remember
from fusedops.integrations.hf.partitioned_weights import gathers_on_access
from fusedops.integrations.hf.rules import activations
from fusedops.integrations.hf.rules.chain import GELUS
from fusedops.integrations.hf.rules.rule import PatchRule, always, subclass
from fusedops.integrations.hf.rules.torch_modules import (
    LINEAR_BASES,
    LINEARS,
    LinearLayer,
    own_product,
    product_plan,
)
from fusedops.ops.gelu import gelu
from fusedops.ops.linear_act import linear_act

# Class in transformers.activations -> name of the activation in linear_act.
_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "QuickGELUActivation": "fast_gelu",
    "SiLUActivation": "silu",
    "ReLUSquaredActivation": "relu2",
    "LinearActivation": "identity",
}
# Formulae that contain pow: CUDA's autocast computes it in float32, so that all of it is.
_WITH_POW = {"NewGELUActivation", "AccurateGELUActivation"}


class _Gelu(nn.Module):
    approximate: str
    widens: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.widens and input.is_cuda and torch.is_autocast_enabled("cuda"):
            input = input.float()
        return gelu(input, self.approximate)


def gelu_rule(original: type[nn.Module], activation: str, *, widens: bool = False) -> PatchRule:
    """Return the rule for a class of GELU, and let it be part of other ops.

    ``activation`` is the name in ``linear_act``; ``widens`` says whether CUDA's autocast computes
    it in float32.
    """
    patched = subclass(original, _Gelu, approximate=GELUS[activation], widens=widens)
    activations.KNOWN.update({original: activation, patched: activation})
    return PatchRule(original, patched, "O1", always("gelu"), guarded=True)


_gelu_rules = []
for _name, _activation in _ACTIVATIONS.items():
    _original = getattr(originals, _name, None)  # a later transformers adds or removes some
    if _original is not None and _activation in GELUS:
        _gelu_rules.append(gelu_rule(_original, _activation, widens=_name in _WITH_POW))
    elif _original is not None:
        activations.KNOWN[_original] = _activation
        remember(_original)


class Conv1D(pytorch_utils.Conv1D):
    """GPT-2's linear layer, whose weight is ``[in, out]``, with the own product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight + bias``."""
        if not own_product(x) or gathers_on_access(self):
            return super().forward(x)
        return linear_act(x, self.weight.t(), self.bias, activation="identity")


LINEARS[pytorch_utils.Conv1D] = LINEARS[Conv1D] = LinearLayer(is_transposed=True)
LINEAR_BASES.append(pytorch_utils.Conv1D)
RULES = (PatchRule(pytorch_utils.Conv1D, Conv1D, "O2", product_plan), *_gelu_rules)
