"""Matrix products of groups of rows, each with its own weight: the experts of a MoE layer.

The convention is that of ``torch.nn.functional.grouped_mm``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.activation import ACTIVATIONS
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Sharding
from fusedops.kernels._arguments import GroupedArguments, of_add_gradients, of_backward
from fusedops.ops import _weight_gradients
from fusedops.ops._weight_gradients import AddGradientsOp, GradientTarget
from fusedops.ops.linear_act import (
    activate,
    activation_gradient,
    check_parameter,
    empty_gradient,
    is_transposed,
    records_graph,
)


def grouped_mm(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "identity",
    grad_weight_into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply groups of rows by a matrix per group.

    ``y[r] = act(x[r] W[g] + b[g])`` for the rows ``offsets[g-1] <= r < offsets[g]`` of group ``g``.

    Args:
        input: ``[rows, K]``, any floating dtype, any strides; rows sorted by group.
        weight: ``[groups, K, N]``, dtype of ``input``, any sizes and strides: the transposed view
            of a weight ``[groups, N, K]`` is not copied.
        offsets: ``[groups]`` int32, where each group ends (inclusive sums of the group sizes).
            Groups may be empty. Rows from ``offsets[-1]`` on belong to no group.
        bias: ``[groups, N]``, dtype of ``input``.
        activation: as for ``linear_act``.
        grad_weight_into: a float32 tensor (float64 for float64) of the shape of ``weight``, dense
            or a transposed view. The backward then adds the weight's gradient to it, unrounded,
            and ``weight`` itself gets none.

    Returns:
        ``[rows, N]``, dtype of ``input``, contiguous; zeros from row ``offsets[-1]`` on.

    Raises:
        ValueError: a shape or device does not fit, ``activation`` is unknown, or (on the CPU, where
            the values can be read without waiting) ``offsets`` decrease or exceed the rows.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Products accumulate in float32 (float64 for float64), also over the rows of a weight
        gradient; bias and activation act on the sums, which are rounded once. An empty group has a
        zero weight gradient; rows of no group are never read, neither in the input nor in the
        incoming gradient, and get a zero gradient. The host does not wait for a GPU: there, offsets
        that decrease or are too large give unspecified values, but no access outside of the
        tensors. On the CPU a row's result depends on the row and its weight alone. Saves ``input``,
        the parameters and, with an activation, the pre-activation. Under autocast all floating
        arguments are cast. With ``grad_weight_into`` the op is differentiable once.

    Reference:
        Gale, Narayanan, Young, Zaharia: MegaBlocks, arXiv:2211.15841.

    Example:
        >>> import torch, fusedops
        >>> x, weight = torch.ones(3, 1), torch.tensor([[[2.0]], [[5.0]]])
        >>> fusedops.grouped_mm(x, weight, torch.tensor([1, 2], dtype=torch.int32))
        tensor([[2.],
                [5.],
                [0.]])
    """
    op = "grouped_mm"
    _check(op, input, weight, offsets, bias)
    checks.choice(op, "activation", activation, ACTIVATIONS)
    keep = records_graph(input, weight, bias)
    into: Sequence[GradientTarget] = [grad_weight_into, None]
    anchors: Sequence[torch.Tensor] = ()
    if grad_weight_into is not None:
        check_into(op, "grad_weight_into", grad_weight_into, "weight", weight)
    elif _weight_gradients.are_summed() and (
        shared := _weight_gradients.shared(computed_in(input), weight, bias)
    ):
        (weight, bias), into, anchors = shared
    else:
        return _OP(input, weight, offsets, bias, activation, keep)[0]
    input, weight, bias = lowered(input, weight, bias)
    args = input, weight, offsets, bias, activation, keep
    return _weight_gradients.call(_ADDING_OP, args, into, anchors)


def lowered(input: torch.Tensor, *others: torch.Tensor | None) -> list[Any]:
    """Return the tensors in autocast's dtype, where it is enabled; absent ones stay so.

    For functions of which autocast must cast some arguments only.
    """
    lower = computed_in(input)
    return [None if other is None else other.to(lower) for other in (input, *others)]


def computed_in(input: torch.Tensor) -> torch.dtype:
    """Return the dtype that an op computes in, of which autocast casts the arguments."""
    lower = dtypes.autocast_dtype(input.device)
    return input.dtype if lower is None or input.dtype == torch.float64 else lower


def _check(op: str, input: Any, weight: Any, offsets: Any, bias: Any) -> None:
    checks.tensor(op, "input", input)
    if input.dim() != 2:
        checks.fail(op, "input", "a matrix [rows, K]", f"shape {list(input.shape)}")
    check_parameter(op, "weight", weight, input)
    if weight.dim() != 3 or weight.shape[1] != input.shape[1]:
        expected = f"of shape [groups, {input.shape[1]}, N] (input has {input.shape[1]} columns)"
        checks.fail(op, "weight", expected, list(weight.shape))
    checks.index_tensor(op, "offsets", offsets)
    checks.shape(op, "offsets", offsets, weight.shape[:1], "one end per group")
    if offsets.device != input.device:
        checks.fail(op, "offsets", f"on {input.device}, the device of input", offsets.device)
    if bias is not None:
        check_parameter(op, "bias", bias, input)
        checks.shape(op, "bias", bias, (weight.shape[0], weight.shape[2]), "as weight's")


def check_into(op: str, name: str, into: Any, owner: str, weight: torch.Tensor) -> None:
    """Raise unless a weight's gradient can be added to ``into``."""
    checks.like(op, name, into, owner, weight)
    wide = dtypes.statistics_dtype(weight.dtype)
    if into.dtype != wide:
        expected, got = str(wide)[6:], str(into.dtype)[6:]
        raise TypeError(f"{op}: {name} must have dtype {expected}, got {got}")
    checks.shape(op, name, into, weight.shape, f"that of {owner}")
    if not (into.is_contiguous() or into.mT.is_contiguous()):
        checks.fail(op, name, "dense, or a transposed view of dense memory", into.stride())
    if into.requires_grad:
        checks.fail(op, name, "a tensor that requires no gradient", "one that does")


def bounds(op: str, offsets: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """Return begin and end of each group as numbers (the reference alone does so)."""
    ends = offsets.tolist()
    groups = list(itertools.pairwise([0, *ends]))
    for index, (begin, end) in enumerate(groups):
        if end < begin:
            checks.fail(op, "offsets", "non-decreasing", f"{end} after {begin} at index {index}")
    if ends and ends[-1] > rows:
        checks.fail(op, "offsets", f"at most the {rows} rows of input", ends[-1])
    return groups


def grouped_product(
    input: torch.Tensor,
    weight: torch.Tensor,
    groups: list[tuple[int, int]],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product of each group in differentiable torch operations, and zeros after them."""
    parts = []
    for group, (begin, end) in enumerate(groups):
        rows = input[begin:end]
        parts.append(
            rows @ weight[group] if bias is None else torch.addmm(bias[group], rows, weight[group])
        )
    last = groups[-1][1] if groups else 0
    parts.append(input.new_zeros(input.shape[0] - last, weight.shape[2]))
    return torch.cat(parts)


def grouped_weight_gradient(
    input: torch.Tensor,
    grad: torch.Tensor,
    groups: list[tuple[int, int]],
    weight: torch.Tensor,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``input^T grad`` over the rows of each group, laid out as ``weight`` is.

    With ``into`` it is added there, unrounded.
    """
    pairs = [(input[begin:end], grad[begin:end]) for begin, end in groups]
    if into is not None:
        for to, (x, dy) in zip(into, pairs, strict=True):
            to.addmm_(x.to(into.dtype).t(), dy.to(into.dtype))
        return into
    if not pairs:
        return torch.zeros_like(weight)
    if is_transposed(weight):
        return torch.stack([dy.t() @ x for x, dy in pairs]).mT
    return torch.stack([x.t() @ dy for x, dy in pairs])


def grouped_sum(
    grad: torch.Tensor, groups: list[tuple[int, int]], into: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of the rows of each group, accumulated wide and rounded once.

    With ``into`` it is added there, unrounded.
    """
    wide = dtypes.statistics_dtype(grad.dtype) if into is None else into.dtype
    sums = [grad[begin:end].sum(0, dtype=wide) for begin, end in groups]
    if into is not None:
        for to, total in zip(into, sums, strict=True):
            to += total
        return into
    return torch.stack(sums).to(grad.dtype) if sums else grad.new_zeros(0, grad.shape[1])


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = GroupedArguments(*args)
    groups = bounds("grouped_mm", call.offsets, call.input.shape[0])
    preactivation = grouped_product(call.input, call.weight, groups, call.bias)
    if call.activation == "identity":
        return preactivation, call.input.new_empty(0)
    kept = preactivation if call.keeps else call.input.new_empty(0)
    return activate(preactivation, call.activation), kept


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = GroupedArguments(*args)
    shape = (call.input.shape[0], call.weight.shape[2])
    return call.input.new_empty(shape), call.input.new_empty(shape if call.keeps else (0,))


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    (grad,), call, (z,), output_mask = of_backward(GroupedArguments, args)
    return _gradients(grad, call, z, output_mask)


def _gradients(
    grad: torch.Tensor,
    call: GroupedArguments,
    z: torch.Tensor,
    output_mask: Sequence[bool],
    into: Sequence[torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor | None, ...]:
    """Return those that are asked for; weight's and bias's are added to what is given."""
    input, weight, offsets, bias, *_ = call
    groups = bounds("grouped_mm", offsets, input.shape[0])
    if call.activation != "identity":
        # A second derivative recomputes it, so that it is a function of the inputs.
        if torch.is_grad_enabled() or z.numel() == 0:
            z = grouped_product(input, weight, groups, bias)
        grad = activation_gradient(grad, z, call.activation)
    return (
        grouped_product(grad, weight.mT, groups) if output_mask[0] else None,
        grouped_weight_gradient(input, grad, groups, weight, into[0]) if output_mask[1] else None,
        grouped_sum(grad, groups, into[1]) if output_mask[2] else None,
    )


def _shard(*args: Any) -> list[Sharding]:
    """Shard the columns of the weights; or, where it is linear, the sum."""
    call = GroupedArguments(*args)
    rules: list[Sharding] = [
        ([REPLICATE] * 2, [REPLICATE] * 4),
        ([1, 1 if call.keeps else REPLICATE], [REPLICATE, 2, REPLICATE, 1]),
    ]
    if call.activation == "identity" and call.bias is None:
        rules.append(([PARTIAL, REPLICATE], [1, 1, REPLICATE, REPLICATE]))
    return rules


def _shard_backward(*args: Any) -> list[Sharding]:
    _, call, _, _ = of_backward(GroupedArguments, args)
    kept = 1 if call.keeps else REPLICATE
    rules: list[Sharding] = [
        ([REPLICATE] * 3, [REPLICATE] * 6),
        ([PARTIAL, 2, 1], [1, REPLICATE, 2, REPLICATE, 1, kept]),
    ]
    if call.activation == "identity":
        rules.append(([1, 1, REPLICATE], [REPLICATE, 1, 1, REPLICATE, REPLICATE, REPLICATE]))
    return rules


# What an argument, or what is kept, is to the others.
_ARGUMENTS: dict[str, str | tuple[str, ...]] = {
    "input": "T [rows, inner]",
    "weight": "T [groups, inner, columns]",
    "offsets": "int32 [groups]",
    "bias": "T [groups, columns]",
    "preactivation": "T [rows, columns] | [0]",
    "activation": tuple(ACTIVATIONS),
}
_OP = define_op(
    "grouped_mm",
    "(Tensor input, Tensor weight, Tensor offsets, Tensor? bias, str activation,"
    " bool keep_preactivation) -> (Tensor output, Tensor preactivation)",
    contract={**_ARGUMENTS, "output": "T [rows, columns]"},
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("input", "weight", "bias"),
        outputs=("output",),
        saves=("input", "weight", "offsets", "bias", "preactivation"),
        reference=_backward,
        layouts={"weight": empty_gradient},
    ),
    autocast="lower",
    triton="fusedops.kernels.grouped_mm",
    shard=_shard,
    shard_backward=_shard_backward,
)


def _add_gradients_reference(*args: Any) -> torch.Tensor | None:
    return _gradients(*of_add_gradients(GroupedArguments, args))[0]


def _add_gradients_fake(input: torch.Tensor, output_mask: Sequence[bool]) -> torch.Tensor | None:
    return input.new_empty(input.shape) if output_mask[0] else None


_ADD_GRADIENTS = define_op(
    "grouped_mm_add_gradients",
    "(Tensor(a!)? into_weight, Tensor(b!)? into_bias, Tensor grad_output, Tensor input,"
    " Tensor weight, Tensor offsets, Tensor? bias, Tensor preactivation, str activation,"
    " bool keep_preactivation, bool[] output_mask) -> (Tensor grad_input)",
    contract={
        **_ARGUMENTS,
        "grad_output": "T [rows, columns]",
        "into_weight": "stat(T) [groups, inner, columns]",
        "into_bias": "stat(T) [groups, columns]",
        "output_mask": "len(output_mask) == 1",
        "grad_input": "T [rows, inner]",
    },
    reference=_add_gradients_reference,
    fake=_add_gradients_fake,
    triton="fusedops.kernels.grouped_mm_add_gradients",
    part_of="grouped_mm",
)
_ADDING_OP = AddGradientsOp(_OP, _ADD_GRADIENTS, tensors=4, inputs=(0,), parameters=(1, 3))
