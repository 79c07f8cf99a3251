"""The arguments of the four norms by name, for ops and kernels alike; imports no Triton."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from fusedops._core import philox, sharding

# Name -> type of every argument that a norm may have, in the order of the schemas.
ARGUMENTS = {
    "input": "Tensor",
    "residual": "Tensor",
    "normalized_shape": "SymInt[]",
    "weight": "Tensor?",
    "bias": "Tensor?",
    "seed": "Tensor?",
    "eps": "float",
    "weight_offset": "float",
    "rounding": "str",
    "dropout_p": "float",
    "input_dtype": "ScalarType",
}
_OF_RESIDUAL = ("residual", "seed", "dropout_p", "input_dtype")
_OF_LAYER_NORM = ("bias",)
_OF_RMS_NORM = ("weight_offset", "rounding")
# What an argument is for a norm that lacks it.
ABSENT: dict[str, Any] = {"weight_offset": 0.0, "rounding": "torch", "dropout_p": 0.0}
ABSENT |= dict.fromkeys(("residual", "bias", "seed", "grad_summed", "mean"))


@dataclass(frozen=True)
class NormArguments:
    """The arguments and results of one of the four norms."""

    centred: bool  # layer norm, which subtracts the mean and has a bias; else RMS norm
    residual: bool  # whether the rows are ``residual + dropout(input)``, a second output

    @property
    def arguments(self) -> list[str]:
        absent = set(_OF_RMS_NORM if self.centred else _OF_LAYER_NORM)
        absent |= set(() if self.residual else _OF_RESIDUAL)
        return [name for name in ARGUMENTS if name not in absent]

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("mean", "rstd") if self.centred else ("rstd",)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("normed", "summed") if self.residual else ("output",)

    @property
    def inputs(self) -> tuple[str, ...]:
        names = ("input", "residual", "weight", "bias")
        return tuple(name for name in names if name in self.arguments)

    @property
    def saves(self) -> tuple[str, ...]:
        summed = "summed" if self.residual else "input"
        seed = ("seed",) if self.residual else ()
        return (summed, "weight", *self.statistics, *seed)

    def read(self, args: Sequence[Any]) -> SimpleNamespace:
        return _read(self.arguments, args)

    def read_backward(self, args: Sequence[Any]) -> tuple[SimpleNamespace, tuple[bool, ...]]:
        """Return the backward's arguments by name, and which gradients it computes.

        Without a residual the gradient of the rows has the place of the residual's.
        """
        grads = ("grad_normed", "grad_summed")[: len(self.outputs)]
        numbers = [name for name in self.arguments if "Tensor" not in ARGUMENTS[name]]
        call = _read((*grads, "summed", *self.saves[1:], *numbers, "output_mask"), args)
        mask = call.output_mask
        if not self.residual:
            call.input_dtype, mask = call.summed.dtype, (False, *mask)
        tensors = (call.grad_normed, call.summed)
        return call, computed_gradients(*tensors, call.dropout_p, call.input_dtype, mask)


def _read(names: Iterable[str], args: Sequence[Any]) -> SimpleNamespace:
    return SimpleNamespace(**ABSENT | dict(zip(names, args, strict=True)))


def scaled_dtype(dtype: torch.dtype, weight: torch.Tensor | None, rounding: str) -> torch.dtype:
    """Return the dtype of a norm of ``dtype``: ``"hf"`` multiplies in the promoted one."""
    promotes = rounding == "hf" and weight is not None
    return torch.promote_types(dtype, weight.dtype) if promotes and weight is not None else dtype


def computed_gradients(
    grad_normed: Any,
    summed: Any,
    dropout_p: float,
    input_dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> tuple[bool, ...]:
    """Return which requested gradients of input, residual and parameters the backward computes.

    Without dropout and cast, ``input`` has the gradient of ``residual``, which is computed once.
    Without ``grad_normed`` the parameters have no gradient.
    """
    same_dtype = input_dtype == sharding.meta(summed).dtype
    same = output_mask[1] and philox.threshold(dropout_p) == 0 and same_dtype
    has_normed = grad_normed is not None
    parameters = (needed and has_normed for needed in output_mask[2:])
    return (output_mask[0] and not same, output_mask[1], *parameters)
