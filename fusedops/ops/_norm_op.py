"""Builds the operators of the four norms: layer norm and RMS norm, alone or after a residual sum.

The norms differ in few arguments; contract, reference, backward, fakes and sharding rules are
shared. The reference formulas are in ``_norm_math.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from fusedops._core import checks, dtypes, philox, sharding
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Sharding
from fusedops.kernels import _norm_arguments
from fusedops.kernels._norm_arguments import ABSENT, ARGUMENTS, NormArguments
from fusedops.ops import _norm_math, _residual
from fusedops.ops._norm_math import offset, row_placements, rows


@dataclass(frozen=True)
class NormOp(NormArguments):
    """One of the four norms, ``name``."""

    name: str = ""

    def define(self, *, checked: bool = True) -> Callable[..., Any]:
        """Register the op and return what calls it, with the errors of ``check`` if ``checked``."""
        arguments = ", ".join(f"{ARGUMENTS[name]} {name}" for name in self.arguments)
        returns = ", ".join(f"Tensor {name}" for name in (*self.outputs, *self.statistics))
        return define_op(
            self.name,
            f"({arguments}) -> ({returns})",
            contract=self._contract(),
            reference=self._reference,
            fake=self._fake,
            gradient=Gradient(
                inputs=self.inputs,
                outputs=self.outputs,
                saves=self.saves,
                reference=self._backward_reference,
                fake=self._backward_fake,
                computed=_norm_arguments.computed_gradients if self.residual else None,
                aliases={"input": "residual"} if self.residual else {},
            ),
            # With a residual the public function casts what autocast would.
            autocast="keep" if self.residual else "norm",
            triton=__name__.rpartition(".ops.")[0] + f".kernels.{self.name}",
            shard=self._shard if self.residual else self._shard_rows,
            shard_backward=self._shard_backward if self.residual else None,
            check=self.check if checked else None,
        )

    def check(self, *args: Any) -> None:
        # A dict: torch.compile traces this function.
        given = ABSENT | dict(zip(self.arguments, args, strict=True))
        owner, summed = "input", given["input"]
        if self.residual:
            residual = given["residual"]
            if isinstance(residual, torch.Tensor) and residual.dtype != given["input_dtype"]:
                return  # the public function has cast one of them, and checked before
            p = given["dropout_p"]
            _residual.check(self.name, summed, residual, "dropout_p", p, True)
            owner, summed = "the sum", residual
        checks.tensor(self.name, "input", given["input"])
        parameters = (given[name] for name in ("normalized_shape", "weight", "bias", "eps"))
        _norm_math.check(self.name, owner, summed, *parameters)
        if not self.centred:
            _norm_math.check_rms(self.name, given["weight_offset"], given["rounding"])

    def _contract(self) -> dict[str, str | tuple[str, ...]]:
        shape, parameter = "[*rows, *normalized_shape]", "param(T) [*normalized_shape]"
        normed = f"T {shape}" if self.centred else f"param(T) {shape}"
        contract: dict[str, str | tuple[str, ...]]
        if self.residual:
            summed = f"param(input_dtype) as T {shape}"
            contract = {"input": f"input_dtype {shape}", "residual": summed, "summed": summed}
            contract |= {"seed": "int64 [numbers]", "numbers": "numbers == 2 or numbers > 5"}
            contract |= {"dropout_p": "0 <= dropout_p <= 1"}
        else:
            contract = {"input": f"T {shape}"}
        contract |= {self.outputs[0]: normed}
        contract |= dict.fromkeys(("weight", "bias") if self.centred else ("weight",), parameter)
        contract |= dict.fromkeys(self.statistics, "stat(T) [*rows]")
        contract |= {"normalized_shape": "len(normalized_shape) >= 1"}
        return contract if self.centred else contract | {"rounding": _norm_math.ROUNDINGS}

    def _reference(self, *args: Any) -> tuple[torch.Tensor, ...]:
        call = self.read(args)
        summed = call.input
        if self.residual:
            summed = _residual.add(call.input, call.residual, call.seed, call.dropout_p)
        normalized = self._normalize(summed, call)
        normed = _norm_math.scale(normalized.values, call, summed.dtype)
        leading = rows(summed, call.normalized_shape)
        statistics = (getattr(normalized, name).reshape(leading) for name in self.statistics)
        outputs = (normed.contiguous(), summed)
        return (*outputs[: len(self.outputs)], *statistics)

    def _fake(self, *args: Any) -> tuple[torch.Tensor, ...]:
        call = self.read(args)
        summed = call.residual if self.residual else call.input
        dtype = _norm_arguments.scaled_dtype(summed.dtype, call.weight, call.rounding)
        outputs = (summed.new_empty(summed.shape, dtype=dtype), summed.new_empty(summed.shape))
        leading = rows(summed, call.normalized_shape)
        statistic = dtypes.statistics_dtype(summed.dtype)
        statistics = (summed.new_empty(leading, dtype=statistic) for _ in self.statistics)
        return (*outputs[: len(self.outputs)], *statistics)

    def _normalize(self, summed: torch.Tensor, call: SimpleNamespace) -> _norm_math.Normalized:
        function = _norm_math.normalize if self.centred else _norm_math.normalize_rms
        return function(summed, call.normalized_shape, call.eps)

    def _backward_reference(self, *args: Any) -> tuple[torch.Tensor | None, ...]:
        # ``summed`` is an output, but not a constant: autograd knows how it depends on the inputs.
        call, needs = self.read_backward(args)
        summed, weight = call.summed, call.weight
        total = torch.zeros_like(summed, dtype=dtypes.statistics_dtype(summed.dtype))
        parameters: list[torch.Tensor | None] = [None] * len(needs[2:])
        if call.grad_normed is not None:
            normalized = self._normalize(summed, call)
            factor = offset(weight, call.weight_offset, normalized.values.dtype)
            kind = summed.dtype if weight is None else weight.dtype
            requested = (needs[0] or needs[1], *needs[2:])
            of_rows, *parameters = _norm_math.norm_gradients(
                call.grad_normed, normalized, factor, call.normalized_shape, kind, requested
            )
            total = total if of_rows is None else of_rows
        if call.grad_summed is not None:
            total = total + call.grad_summed.to(total.dtype)
        grad_residual = total.to(summed.dtype).contiguous() if needs[1] else None
        if not self.residual:
            return grad_residual, *parameters
        grad_input = None
        if needs[0]:
            grad_input = philox.dropout(total, call.seed, call.dropout_p).to(call.input_dtype)
            grad_input = grad_input.contiguous()
        return grad_input, grad_residual, *parameters

    def _backward_fake(self, *args: Any) -> tuple[torch.Tensor | None, ...]:
        call, needs = self.read_backward(args)
        parameter = call.summed.dtype if call.weight is None else call.weight.dtype
        kinds = [call.summed.dtype] + [parameter] * len(needs[2:])
        shapes = [call.summed.shape] + [call.normalized_shape] * len(needs[2:])
        if self.residual:
            kinds, shapes = [call.input_dtype, *kinds], [call.summed.shape, *shapes]
        return tuple(
            call.summed.new_empty(shape, dtype=kind) if needed else None
            for shape, kind, needed in zip(shapes, kinds, needs[-len(kinds) :], strict=True)
        )

    def _shard_rows(self, input: Any, normalized_shape: Sequence[int]) -> list[Sharding]:
        """Rows are independent: any leading dim may be sharded, parameters are replicated."""
        return self._shard(input, normalized_shape, None)

    def _shard(self, input: Any, normalized_shape: Sequence[int], seed: Any) -> list[Sharding]:
        tensors = [name for name in self.arguments if "Tensor" in ARGUMENTS[name]]
        results = len(self.outputs) + len(self.statistics)
        shardings: list[Sharding] = []
        for dim in row_placements(input, normalized_shape, seed):
            inputs = [dim if name in ("input", "residual") else REPLICATE for name in tensors]
            shardings.append(([dim] * results, inputs))
        return shardings

    def _shard_backward(
        self, summed: Any, normalized_shape: Sequence[int], seed: Any
    ) -> list[Sharding]:
        """With rows sharded, each rank has a part of the sums that are the parameter gradients."""
        shardings: list[Sharding] = []
        for dim in row_placements(summed, normalized_shape, seed):
            partial = sharding.of_gradient(REPLICATE, sharded=dim != REPLICATE)
            inputs = [dim, dim, dim, REPLICATE, *[dim] * len(self.statistics), REPLICATE]
            shardings.append(([dim, dim, *[partial] * len(self.inputs[2:])], inputs))
        return shardings
