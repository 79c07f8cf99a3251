"""Root-mean-square normalisation: each row to mean square 1, then scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.tracing import plain_sizes
from fusedops.ops import _norm_math
from fusedops.ops._norm_op import NormOp
from fusedops.ops.gated_rms_norm import call as call_gated
from fusedops.ops.gated_rms_norm import check_options

ROUNDINGS = _norm_math.ROUNDINGS

# The function below checks, because the default of eps depends on the dtype of the input.
_OP = NormOp(centred=False, residual=False, name="rms_norm").define(checked=False)


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "torch",
    gate: torch.Tensor | None = None,
    norm_before_gate: bool = True,
    groups: int = 1,
    gate_activation: str = "silu",
) -> torch.Tensor:
    """Divide by the root mean square over the last ``len(normalized_shape)`` dimensions.

    ``y = x / sqrt(E[x^2] + eps) * (weight + weight_offset)``; with a ``gate`` the call is
    ``fusedops.gated_rms_norm``.

    Args:
        input: ``[..., *normalized_shape]``, any floating dtype, any strides.
        normalized_shape: sizes of the trailing dimensions.
        weight: ``normalized_shape``, dtype of ``input``; for an ``input`` in half precision also
            float32.
        eps: added to the mean square; ``None`` is, as in torch, the ``eps`` of float32 (of float64
            for float64).
        weight_offset: added to the weight, in float32; 1 if a model stores ``weight - 1`` (Gemma).
            It does not apply without a weight.
        rounding: ``"torch"`` rounds once, at the end (also Gemma's); ``"hf"`` rounds the normalised
            row to the dtype of ``input`` and then multiplies (Llama, Qwen, Mistral; T5 where weight
            and input have one dtype). The two differ in half precision only.
        gate: shape and dtype of ``input``, multiplies the result by its activation. Needs one
            normalised dimension, ``"torch"`` and no offset.
        norm_before_gate: ``False`` normalises ``input`` times the gate's activation.
        groups: with a gate, number of equal parts of a row that are normalised separately.
        gate_activation: ``"silu"`` or ``"sigmoid"``.

    Returns:
        Shape and dtype of ``input``, contiguous. With ``"hf"`` and a float32 weight and a
        half-precision input the dtype is float32, to which torch promotes their product.

    Raises:
        ValueError: a shape or device does not fit, ``rounding`` is unknown, or an argument does not
            go with the gate or needs one.
        TypeError: an argument is no tensor or number, or its dtype does not fit.

    Note:
        Arithmetic is float32 (float64 for float64). On the CPU, for a contiguous input, the result
        has the bits of ``torch.nn.functional.rms_norm``, or with ``"hf"`` those of
        ``LlamaRMSNorm``: the roundings are the same, and squares are summed in torch's order. Two
        cases differ in the last place: a single row of 32768 elements or more, whose sum torch
        divides by the number of threads; and results below 1.2e-38, which the bfloat16 kernels
        treat as zero. On a GPU the roundings are the same, the order of the sum is not. A row's
        result does not depend on the other rows; the weight's gradient is summed in a fixed order:
        the same bits for any number of threads. Saves ``input``, ``weight`` and one number per row.
        Under autocast on CUDA, ``"torch"`` computes in float32 as torch's does and ``"hf"`` keeps
        the dtypes as the models do; unchanged on the CPU.

    Reference:
        Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467.

    Example:
        >>> import torch, fusedops
        >>> fusedops.rms_norm(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), (4,), eps=0.0)
        tensor([[1.2000, 1.6000, 0.0000, 0.0000]])
    """
    normalized_shape = plain_sizes(normalized_shape)
    checks.tensor("rms_norm", "input", input)
    checked_eps = 0.0 if eps is None else eps
    _norm_math.check("rms_norm", "input", input, normalized_shape, weight, None, checked_eps)
    _norm_math.check_rms("rms_norm", weight_offset, rounding)
    if gate is not None:
        _check_gated(normalized_shape, weight_offset, rounding)
        options = (norm_before_gate, groups, gate_activation)
        return call_gated("rms_norm", input, gate, weight, eps, *options)
    if norm_before_gate is not True or type(groups) is not int or groups != 1:
        _refuse_ungated(input, norm_before_gate, groups, gate_activation)
    if not isinstance(gate_activation, str) or gate_activation != "silu":
        _refuse_ungated(input, norm_before_gate, groups, gate_activation)
    eps = _norm_math.default_eps(input, eps)
    return _OP(input, normalized_shape, weight, eps, weight_offset, rounding)[0]


def _check_gated(normalized_shape: Sequence[int], weight_offset: float, rounding: str) -> None:
    if len(normalized_shape) != 1:
        expected = "the last size alone with a gate"
        checks.fail("rms_norm", "normalized_shape", expected, list(normalized_shape))
    if weight_offset != 0.0:
        checks.fail("rms_norm", "weight_offset", "0 with a gate", weight_offset)
    if rounding != "torch":
        checks.fail("rms_norm", "rounding", "'torch' with a gate", repr(rounding))


def _refuse_ungated(
    input: torch.Tensor, norm_before_gate: Any, groups: Any, gate_activation: Any
) -> None:
    check_options("rms_norm", input, norm_before_gate, groups, gate_activation)
    checks.fail(
        "rms_norm", "gate", "given with norm_before_gate, groups or gate_activation", "None"
    )
