"""The experts of a mixture-of-experts layer: two products with a gate between, per expert.

The input is never copied in permuted order: the first product gathers the tokens itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.activation import ACTIVATIONS
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Sharding
from fusedops.kernels._arguments import MoeArguments, of_add_gradients, of_backward
from fusedops.ops import _moe_math, _weight_gradients
from fusedops.ops._moe_gate import GATES, hidden_of, preactivation_gradient
from fusedops.ops._routing_plan import RoutingPlan, check_probs
from fusedops.ops._weight_gradients import AddGradientsOp, GradientTarget
from fusedops.ops.grouped_mm import (
    bounds,
    check_into,
    computed_in,
    grouped_product,
    grouped_sum,
    grouped_weight_gradient,
    lowered,
)
from fusedops.ops.linear_act import check_parameter, empty_gradient, records_graph


def moe_mlp(
    input: torch.Tensor,
    plan: RoutingPlan,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    recompute: bool = True,
    grad_weights_into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Apply each token's experts and sum their outputs, weighted by the router.

    ``y[t] = sum_j p[t, j] * (act(x[t] W1g[e] + b1g[e]) * (x[t] W1u[e] + b1u[e]) W2[e] + b2[e])``
    over the kept slots ``j`` of token ``t``, where ``e`` is the expert of the slot.

    Args:
        input: ``[tokens, hidden]``, any floating dtype, any strides.
        plan: of ``tokens`` tokens: from ``moe_route`` or ``RoutingPlan.from_choices``.
        w1: ``[experts, hidden, 2 * inner]``, gate and up; ``[experts, hidden, inner]`` if not
            ``gated``. Dtype of ``input``, any strides: the transposed view of a weight
            ``[experts, 2 * inner, hidden]`` is not copied.
        w2: ``[experts, inner, hidden_out]``, any strides.
        b1: ``[experts, 2 * inner]`` (``inner``), or ``None``.
        b2: ``[experts, hidden_out]``, or ``None``.
        activation: of the gate: as for ``linear_act``, or ``"swiglu_oai"``, that of GPT-OSS:
            ``(clamp(up, -7, 7) + 1) * g * sigmoid(1.702 g)`` with ``g = min(gate, 7)``.
        gated: whether ``w1`` makes a gate and a factor, else ``h = act(z)``.
        interleaved: columns of ``w1`` are ``gate 0, up 0, gate 1, ...`` (GPT-OSS), else the gates
            come first (the field's ``gate_up_proj``).
        recompute: save only the input and the plan for the backward, which then recomputes the
            first product; on the CPU the results have the same bits. ``False``: the pre-activation
            is saved as well, ``tokens * top_k * 2 * inner`` numbers (``inner`` if not ``gated``) of
            ``input``'s dtype, which is faster. The input is not copied in permuted order in either
            case.
        grad_weights_into: float32 tensors (float64 for float64) of the shapes of ``w1`` and ``w2``,
            each dense or a transposed view. The backward then adds the weights' gradients to them,
            unrounded, and the weights themselves get none.

    Returns:
        ``[tokens, hidden_out]``, dtype of ``input``, contiguous. The result of a token without a
        kept slot is 0.

    Raises:
        ValueError: a shape or device does not fit, ``activation`` is unknown, or (CPU) the plan's
            indices are out of range.
        TypeError: an argument is no tensor or no plan, or its dtype does not fit.

    Note:
        Products accumulate in float32 (float64 for float64); activation, gate and probability act
        on the sums, and the hidden layer is rounded once. ``z``, saved or recomputed, is rounded
        too before the backward reads it, which limits the accuracy of the gradient of ``probs``.
        The sum over a token's slots is float32 in the order of the slots: that of
        ``moe_unpermute``, the same bits for any number of threads. Gradients to ``input``,
        ``plan.probs``, weights and biases; those of the weights have the weights' memory layout.
        The op is twice differentiable, with ``grad_weights_into`` once. Under autocast all but the
        probabilities are cast.

    Reference:
        Shazeer et al.: Outrageously Large Neural Networks, arXiv:1701.06538; Tan et al.:
        ScatterMoE, arXiv:2403.08245.

    Example:
        >>> import torch, fusedops
        >>> plan = fusedops.RoutingPlan.from_choices(
        ...     torch.tensor([[1], [0]]), torch.tensor([[1.0], [0.5]]), num_experts=2)
        >>> w1, w2 = torch.tensor([[[1.0]], [[10.0]]]), torch.ones(2, 1, 1)
        >>> fusedops.moe_mlp(torch.tensor([[3.0], [4.0]]), plan, w1, w2, activation="relu",
        ...     gated=False)
        tensor([[30.],
                [ 2.]])
    """
    op = "moe_mlp"
    for name, value in (("gated", gated), ("interleaved", interleaved), ("recompute", recompute)):
        checks.flag(op, name, value)
    checks.choice(op, "activation", activation, GATES if gated else ACTIVATIONS)
    _check(op, input, plan, w1, w2, b1, b2, gated)
    probs = plan.probs.to(dtypes.statistics_dtype(input.dtype))
    keep = not recompute and records_graph(input, probs, w1, w2, b1, b2)
    order = plan.permutation, plan.positions, plan.offsets
    form = activation, gated, interleaved, keep
    into: Sequence[GradientTarget] = ()
    anchors: Sequence[torch.Tensor] = ()
    if grad_weights_into is not None:
        into = *_check_pair(op, grad_weights_into, w1, w2), None, None
    elif _weight_gradients.are_summed() and (
        shared := _weight_gradients.shared(computed_in(input), w1, w2, b1, b2)
    ):
        (w1, w2, b1, b2), into, anchors = shared
    input, w1, w2, b1, b2 = lowered(input, w1, w2, b1, b2)
    args = input, probs, *order, w1, w2, b1, b2, *form
    return _weight_gradients.call(_ADDING_OP, args, into, anchors) if into else _OP(*args)[0]


def _check_pair(
    op: str, pair: Any, w1: torch.Tensor, w2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        checks.fail_type(op, "grad_weights_into", "a pair of tensors, for w1 and w2", pair)
    for index, (name, weight) in enumerate((("w1", w1), ("w2", w2))):
        check_into(op, f"grad_weights_into[{index}]", pair[index], name, weight)
    return pair[0], pair[1]


def _check(op: str, input: Any, plan: Any, w1: Any, w2: Any, b1: Any, b2: Any, gated: bool) -> None:
    _moe_math.check(op, input, plan, of_tokens=True)
    check_probs(op, "plan.probs", plan.probs, plan)
    check_parameter(op, "w1", w1, input)
    check_parameter(op, "w2", w2, input)
    experts, hidden = plan.num_experts, input.shape[1]
    if w1.dim() != 3 or w1.shape[:2] != (experts, hidden) or (gated and w1.shape[2] % 2):
        columns = "2 * inner" if gated else "inner"
        shape = f"of shape [{experts}, {hidden}, {columns}] (the plan's experts, input's columns)"
        checks.fail(op, "w1", shape, list(w1.shape))
    inner = w1.shape[2] // 2 if gated else w1.shape[2]
    if w2.dim() != 3 or w2.shape[:2] != (experts, inner):
        expected = f"of shape [{experts}, {inner}, hidden_out] (as w1's)"
        checks.fail(op, "w2", expected, list(w2.shape))
    for name, bias, weight in (("b1", b1, w1), ("b2", b2, w2)):
        if bias is not None:
            check_parameter(op, name, bias, input)
            checks.shape(op, name, bias, (experts, weight.shape[2]), f"the columns of w{name[1]}")


class _RoutedRows:
    """The rows of a plan, as the reference uses them: their tokens, groups and probabilities."""

    def __init__(self, call: MoeArguments) -> None:
        rows, top_k = call.permutation.shape[0], call.positions.shape[1]
        self.groups = bounds("moe_mlp", call.offsets, rows)
        self.count = self.groups[-1][1] if self.groups else 0
        self.slots = call.permutation[: self.count].long()
        self.tokens = self.slots // max(1, top_k)
        self.probs = call.probs.flatten()[self.slots].unsqueeze(1)
        self.positions, self.offsets = call.positions, call.offsets

    def wide_product(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the product in the accumulation dtype: what the kernels' epilogues see."""
        wide = self.probs.dtype
        bias = None if bias is None else bias.to(wide)
        return grouped_product(rows.to(wide), weight.to(wide), self.groups, bias)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Return each token's sum of its rows, in the order of the slots."""
        tail = rows.new_zeros(self.positions.numel() - self.count, rows.shape[1])
        return _moe_math.combine(torch.cat([rows, tail]), None, self.positions, self.offsets)

    def bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the bias of each row's expert."""
        sizes = [end - begin for begin, end in self.groups]
        return torch.cat([row.expand(size, -1) for row, size in zip(bias, sizes, strict=True)])


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = MoeArguments(*args)
    slots = call.probs.numel()
    for name in ("permutation", "positions"):
        checks.indices("moe_mlp", f"plan.{name}", getattr(call, name), slots, f"in [0, {slots})")
    rows, dtype = _RoutedRows(call), call.input.dtype
    z = rows.wide_product(call.input[rows.tokens], call.w1, call.b1)
    value = hidden_of(z, *call.form)
    output = grouped_product((value * rows.probs).to(dtype), call.w2, rows.groups)
    if call.b2 is not None:
        output = (output + rows.bias(call.b2) * rows.probs).to(dtype)
    kept = call.input.new_zeros(_rows_kept(call), z.shape[1])
    if call.keep_preactivation:
        kept[: rows.count] = z
    return rows.combine(output), kept


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = MoeArguments(*args)
    output = call.input.new_empty(call.positions.shape[0], call.w2.shape[2])
    return output, call.input.new_empty(_rows_kept(call), call.w1.shape[2])


def _rows_kept(call: MoeArguments) -> int:
    return call.permutation.shape[0] if call.keep_preactivation else 0


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    (dy,), call, (kept,), output_mask = of_backward(MoeArguments, args)
    return _gradients(dy, call, kept, output_mask)


def _gradients(
    grad_output: torch.Tensor,
    call: MoeArguments,
    kept: torch.Tensor,
    output_mask: Sequence[bool],
    into: Sequence[torch.Tensor | None] = (None,) * 4,
) -> tuple[torch.Tensor | None, ...]:
    """Return those that are asked for; w1's, w2's, b1's and b2's are added to what is given."""
    wants_input, wants_probs, wants_w1, wants_w2, wants_b1, wants_b2 = output_mask
    rows, dtype, wide = _RoutedRows(call), call.input.dtype, call.probs.dtype
    x, dy = call.input[rows.tokens], grad_output[rows.tokens]
    grads: list[torch.Tensor | None] = [None] * 6
    z = kept[: rows.count]
    # A second derivative recomputes it, so that it is a function of the inputs.
    if torch.is_grad_enabled() or not call.keep_preactivation:
        z = rows.wide_product(x, call.w1, call.b1).to(dtype)
    z = z.to(wide)
    value = hidden_of(z, *call.form)
    grad = rows.wide_product(dy, call.w2.mT)
    if wants_input or wants_w1 or wants_b1:
        dz = preactivation_gradient(grad * rows.probs, z, *call.form).to(dtype)
    if wants_input:
        grads[0] = rows.combine(grouped_product(dz, call.w1.mT, rows.groups))
    if wants_probs:
        dots = (grad * value).sum(1)
        if call.b2 is not None:
            dots = dots + (dy.to(wide) * rows.bias(call.b2).to(wide)).sum(1)
        slots = call.probs.new_zeros(call.probs.numel()).index_copy(0, rows.slots, dots)
        grads[1] = slots.view(call.probs.shape)
    if wants_w1:
        grads[2] = grouped_weight_gradient(x, dz, rows.groups, call.w1, into[0])
    if wants_w2:
        hidden = (value * rows.probs).to(dtype)
        grads[3] = grouped_weight_gradient(hidden, dy, rows.groups, call.w2, into[1])
    if wants_b1:
        grads[4] = grouped_sum(dz, rows.groups, into[2])
    if wants_b2:
        grads[5] = grouped_sum(dy * rows.probs, rows.groups, into[3]).to(dy.dtype)
    return tuple(grads)


def _shard(b2: Any, gated: bool, interleaved: bool) -> list[Sharding]:
    """Replicate; or shard the hidden layers (a sum), or the columns of the output."""
    rules: list[Sharding] = [
        ([REPLICATE] * 2, [REPLICATE] * 9),
        ([1, REPLICATE], [*[REPLICATE] * 6, 2, REPLICATE, 1]),
    ]
    # Gate and up must be on one rank, and no bias may be added twice.
    if (interleaved or not gated) and b2 is None:
        rules.append(([PARTIAL, 1], [*[REPLICATE] * 5, 2, 1, 1, REPLICATE]))
    return rules


# What an argument, or what is kept, is to the others.
_ARGUMENTS: dict[str, str | tuple[str, ...]] = {
    "input": "T [tokens, features]",
    "positions": "int32 [tokens, top_k]",
    "probs": "stat(T) [tokens, top_k]",
    "permutation": "int32 [tokens * top_k]",
    "offsets": "int32 [experts]",
    "experts": "experts >= 1",
    "w2": "T [experts, inner, columns]",
    "w1": "T [experts, features, inner * (1 + gated)]",
    "b1": "T [experts, inner * (1 + gated)]",
    "b2": "T [experts, columns]",
    "preactivation": "T [tokens * top_k, inner * (1 + gated)] | [0, inner * (1 + gated)]",
    "activation": (*ACTIVATIONS, "swiglu_oai"),
}
_OP = define_op(
    "moe_mlp",
    "(Tensor input, Tensor probs, Tensor permutation, Tensor positions, Tensor offsets, Tensor w1,"
    " Tensor w2, Tensor? b1, Tensor? b2, str activation, bool gated, bool interleaved,"
    " bool keep_preactivation) -> (Tensor output, Tensor preactivation)",
    contract={**_ARGUMENTS, "output": "T [tokens, columns]"},
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("input", "probs", "w1", "w2", "b1", "b2"),
        outputs=("output",),
        saves=(*MoeArguments._fields[:9], "preactivation"),
        reference=_backward,
        layouts={"w1": empty_gradient, "w2": empty_gradient},
    ),
    triton="fusedops.kernels.moe_mlp",
    shard=_shard,
)


def _add_gradients_reference(*args: Any) -> tuple[torch.Tensor | None, ...]:
    return _gradients(*of_add_gradients(MoeArguments, args))[:2]


def _add_gradients_fake(
    input: torch.Tensor, probs: torch.Tensor, output_mask: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    pairs = zip((input, probs), output_mask, strict=True)
    return tuple(tensor.new_empty(tensor.shape) if on else None for tensor, on in pairs)


_ADD_GRADIENTS = define_op(
    "moe_mlp_add_gradients",
    "(Tensor(a!)? into_w1, Tensor(b!)? into_w2, Tensor(c!)? into_b1, Tensor(d!)? into_b2,"
    " Tensor grad_output, Tensor input, Tensor probs, Tensor permutation, Tensor positions,"
    " Tensor offsets, Tensor w1, Tensor w2, Tensor? b1, Tensor? b2, Tensor preactivation,"
    " str activation, bool gated, bool interleaved, bool keep_preactivation, bool[] output_mask)"
    " -> (Tensor grad_input, Tensor grad_probs)",
    contract={
        **_ARGUMENTS,
        "grad_output": "T [tokens, columns]",
        "into_w1": "stat(T) [experts, features, inner * (1 + gated)]",
        "into_w2": "stat(T) [experts, inner, columns]",
        "into_b1": "stat(T) [experts, inner * (1 + gated)]",
        "into_b2": "stat(T) [experts, columns]",
        "output_mask": "len(output_mask) == 2",
        "grad_input": "T [tokens, features]",
        "grad_probs": "stat(T) [tokens, top_k]",
    },
    reference=_add_gradients_reference,
    fake=_add_gradients_fake,
    triton="fusedops.kernels.moe_mlp_add_gradients",
    part_of="moe_mlp",
)
_ADDING_OP = AddGradientsOp(_OP, _ADD_GRADIENTS, tensors=9, inputs=(0, 1), parameters=(5, 6, 7, 8))
