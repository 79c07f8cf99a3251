"""What attention does to its scores, followed on ``DeferredScores``.

Each function here follows calls of some functions of torch: it returns the scores after the call,
or ``None`` for a call that needs their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedops._core import dtypes
from fusedops.integrations.hf.rules.attention_plan import (
    AttentionPlan,
    WeightDropout,
    attend,
    fits,
    input_of,
)
from fusedops.integrations.hf.rules.deferred_scores import (
    Call,
    DeferredScores,
    Handler,
    Scope,
    active_scope,
    computed,
    computed_value,
    follows,
)
from fusedops.integrations.hf.rules.matrix_products import MatrixProduct, product_of
from fusedops.integrations.hf.rules.rule import runs_here

# Scores that are filled with this or less do not count.
_MASKED = -1e4


def multiply(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Follow a product: one of queries and keys is deferred, one with the values runs the op."""
    scope = active_scope()
    product = None if scope is None else product_of(function, args, kwargs)
    if product is None or scope is None:
        return computed(function, args, kwargs)
    left, right = product.left, product.right
    result: Any = None
    if isinstance(left, DeferredScores):
        if _is_plain(right) and product.bias is None and product.alpha == 1:
            result = _weighted(left, right, product)
    elif _is_plain(left) and _is_plain(right) and not product.of_weights:
        result = _scores(scope, Call(function, args, kwargs), product)
    return computed(function, args, kwargs) if result is None else result


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter) and runs_here(value)


def _scores(scope: Scope, call: Call, product: MatrixProduct) -> DeferredScores | None:
    """Return the deferred product of queries and keys, ``None`` for other factors."""
    query, key = product.left, product.right.transpose(-2, -1)
    autocast = dtypes.autocast_dtype(query.device)
    is_attention = (
        query.dim() == key.dim() >= 3
        and query.shape[-1] == key.shape[-1]
        and query.dtype == key.dtype
        and query.device == key.device
        and (autocast is None or query.dtype != torch.float64)
    )
    if not is_attention:
        return None
    lead = query.shape[:-2]
    if lead != key.shape[:-2]:
        try:
            lead = torch.broadcast_shapes(lead, key.shape[:-2])
        except RuntimeError:
            return None
        query, key = (part.expand(*lead, *part.shape[-2:]) for part in (query, key))
    plan: AttentionPlan | None = AttentionPlan(
        input_of(query, lead), input_of(key, lead), tuple(lead), float(product.alpha)
    )
    bias = product.bias
    if bias is not None and product.beta != 0 and scope.filled(bias) != 0.0:
        if not _is_plain(bias):
            return None
        assert plan is not None
        plan = plan.biased(bias if product.beta == 1 else bias * product.beta)
        if plan is None:
            return None
    assert plan is not None
    scope.num_products += 1
    return DeferredScores(call, plan, autocast or query.dtype, scope)


def _weighted(
    weights: DeferredScores, value: torch.Tensor, product: MatrixProduct
) -> torch.Tensor | None:
    """Return the product of weights and values by the op, ``None`` where it does not serve it."""
    plan = weights.plan()
    if plan is None or not plan.is_normalised:
        return None
    query = plan.query.tensor
    autocast = dtypes.autocast_dtype(query.device)
    is_served = (
        value.dim() == len(plan.shape)
        and value.shape[-2] == plan.shape[-1]
        and value.device == query.device
        and (value.dtype == weights.dtype if autocast is None else value.dtype != torch.float64)
    )
    output = attend(plan, value) if is_served else None
    if output is None:
        return None
    weights._scope.num_fused += 1
    return product.restored(output)


_T: Any = torch.Tensor


@follows(torch.matmul, torch.bmm, torch.baddbmm, torch.einsum)
@follows(_T.matmul, _T.bmm, _T.baddbmm, _T.__matmul__)
def _matrix_product(call: Call) -> Any:
    return multiply(call.function, call.args, call.kwargs)


def _scores_and_other(call: Call) -> tuple[DeferredScores, AttentionPlan, Any] | None:
    """Return the scores of an operation of two, their plan, and the other operand."""
    if len(call.args) != 2 or call.kwargs:
        return None
    scores, other = call.args
    if not isinstance(scores, DeferredScores):
        scores, other = other, scores
    plan = scores.plan()
    if plan is None or plan.is_normalised:
        return None
    if isinstance(other, DeferredScores):  # a bias that is a product
        other = computed_value(other, "the bias of others")
        plan = scores.plan()
    return None if plan is None else (scores, plan, other)


def _promoted(scores: DeferredScores, other: Any) -> torch.dtype:
    if isinstance(other, torch.Tensor) and other.dim() > 0:
        return torch.promote_types(scores.dtype, other.dtype)
    return scores.dtype


@follows(torch.mul, torch.multiply, _T.mul, _T.multiply, _T.__mul__, _T.__rmul__)
def _mul(call: Call) -> DeferredScores | None:
    return _rescaled(call, divides=False)


@follows(torch.div, torch.divide, torch.true_divide, _T.div, _T.divide, _T.__truediv__)
def _div(call: Call) -> DeferredScores | None:
    if not isinstance(call.args[0], DeferredScores):
        return None
    return _rescaled(call, divides=True)


def _rescaled(call: Call, *, divides: bool) -> DeferredScores | None:
    operands = _scores_and_other(call)
    if operands is None:
        return None
    scores, plan, other = operands
    number = scores._scope.number(other)
    scaled = None
    if number is not None and number != 0.0:
        scaled = plan.scaled(1.0 / number if divides else number)
    elif _is_plain(other) and fits(other, plan.shape):
        scaled = plan.scaled_rows(other, divides=divides)
    return None if scaled is None else scores.derived(call, scaled, _promoted(scores, other))


@follows(torch.add, _T.add, _T.__add__, _T.__radd__)
def _add(call: Call) -> DeferredScores | None:
    return _biased(call, negative=False)


@follows(torch.sub, torch.subtract, _T.sub, _T.subtract, _T.__sub__)
def _sub(call: Call) -> DeferredScores | None:
    if not isinstance(call.args[0], DeferredScores):
        return None
    return _biased(call, negative=True)


def _biased(call: Call, *, negative: bool) -> DeferredScores | None:
    operands = _scores_and_other(call)
    if operands is None:
        return None
    scores, plan, other = operands
    if isinstance(other, torch.Tensor):
        if not _is_plain(other) or other.device != scores.device:
            return None
        biased = plan.biased(-other if negative else other)
    else:
        biased = plan if other == 0 else None
    return None if biased is None else scores.derived(call, biased, _promoted(scores, other))


@follows(torch.masked_fill, _T.masked_fill)
def _masked_fill(call: Call) -> DeferredScores | None:
    if len(call.args) != 3 or call.kwargs or not isinstance(call.args[0], DeferredScores):
        return None
    scores, mask, number = call.args
    return _restricted(call, scores, mask, number, keeps=False)


@follows(torch.where, _T.where)
def _where(call: Call) -> DeferredScores | None:
    if len(call.args) != 3 or call.kwargs:
        return None
    mask, first, second = call.args
    if isinstance(mask, DeferredScores):  # the method: scores.where(mask, other)
        mask, first = first, mask
    if isinstance(first, DeferredScores):
        return _restricted(call, first, mask, second, keeps=True)
    return _restricted(call, second, mask, first, keeps=False)


def _restricted(
    call: Call, scores: Any, mask: Any, number: Any, *, keeps: bool
) -> DeferredScores | None:
    """Follow a mask: where it is ``keeps`` scores count, elsewhere they become a number."""
    plan = scores.plan() if isinstance(scores, DeferredScores) else None
    if plan is None or plan.is_normalised or type(mask) is not torch.Tensor:
        return None
    filled = scores._scope.number(number)
    if filled is None or not filled <= _MASKED or mask.dtype != torch.bool:
        return None
    if mask.device != scores.device:
        return None
    restricted = plan.restricted(mask if keeps else ~mask)
    return None if restricted is None else scores.derived(call, restricted)


def _given(call: Call, *names: str) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return dict(zip(names, call.args, strict=False)) | call.kwargs


_SOFTMAX_NAMES = (("input", "dim", "dtype"), ("input", "dim", "_stacklevel", "dtype"))


@follows(torch.softmax, F.softmax, _T.softmax)
def _softmax(call: Call) -> DeferredScores | None:
    given = _given(call, *_SOFTMAX_NAMES[call.function is F.softmax])
    scores = given.get("input")
    plan = scores.plan() if isinstance(scores, DeferredScores) else None
    if plan is None or plan.is_normalised or given.get("dim") not in (-1, len(plan.shape) - 1):
        return None
    assert scores is not None
    dtype = given.get("dtype") or scores.dtype
    if given.get("dtype") is None and scores.is_cuda and scores._context.autocast is not None:
        dtype = torch.promote_types(dtype, torch.float32)  # as CUDA's autocast
    return scores.derived(call, plan._replace(is_normalised=True), dtype)


@follows(F.dropout, torch.dropout)
def _dropout(call: Call) -> DeferredScores | None:
    given = _given(call, "input", "p", "training", "inplace")
    weights, probability = given.get("input"), given.get("p", 0.5)
    if not isinstance(weights, DeferredScores) or given.get("inplace", False):
        return None
    if not given.get("training", given.get("train", True)):
        return weights
    plan = weights.plan()
    if plan is None or not plan.is_normalised or plan.dropout is not None:
        return None
    if not isinstance(probability, (int, float)) or not 0.0 <= probability < 1.0:
        return None
    if probability == 0.0:
        return weights.derived(call, plan)
    dropout = WeightDropout(float(probability))
    again = Call(_dropped, (dropout, call.function, weights, call.args, call.kwargs), {})
    return weights.derived(again, plan._replace(dropout=dropout))


def _dropped(
    dropout: WeightDropout, function: Any, weights: torch.Tensor, args: Any, kwargs: Any
) -> torch.Tensor:
    """Return the weights that are left, those of the op where it has run."""
    factors = dropout.factors(weights)
    result: torch.Tensor = function(*args, **kwargs) if factors is None else weights * factors
    return result


@follows(_T.float, _T.half, _T.bfloat16, _T.double)
def _cast_by_name(call: Call) -> DeferredScores | None:
    dtypes_by_name = {
        "float": torch.float32,
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
        "double": torch.float64,
    }
    return _cast(call, dtypes_by_name[call.function.__name__]) if len(call.args) == 1 else None


@follows(_T.to, _T.type)
def _to(call: Call) -> DeferredScores | None:
    scores, *others = call.args
    dtype = scores.dtype if isinstance(scores, DeferredScores) else None
    options = dict(call.kwargs)
    options.pop("non_blocking", None)
    others += [options.pop(name) for name in ("dtype", "device", "other") if name in options]
    if dtype is None or options or not others:
        return None
    for other in others:
        if isinstance(other, (torch.Tensor, DeferredScores)):
            others.append(other.device)
            dtype = other.dtype
        elif isinstance(other, torch.dtype):
            dtype = other
        elif other is not None and not (
            isinstance(other, (str, torch.device, int))
            and not isinstance(other, bool)
            and call.function is _T.to
            and torch.device(other) == scores.device
        ):
            return None
    return _cast(call, dtype)


@follows(_T.type_as)
def _type_as(call: Call) -> Any:
    value, other = call.args
    if not isinstance(value, DeferredScores):
        return value.to(other.dtype) if value.device == other.device else None
    return _cast(call, other.dtype) if value.device == other.device else None


def _cast(call: Call, dtype: torch.dtype) -> DeferredScores | None:
    scores = call.args[0]
    plan = scores.plan()
    if plan is None or not dtype.is_floating_point:
        return None
    return scores if dtype == scores.dtype else scores.derived(call, plan, dtype)


@follows(_T.contiguous)
def _contiguous(call: Call) -> DeferredScores | None:
    return call.args[0] if len(call.args) == 1 and not call.kwargs else None


@follows(_T.view, _T.reshape, torch.reshape)
def _view(call: Call) -> DeferredScores | None:
    scores, *sizes = call.args
    if call.kwargs or not sizes:
        return None
    if isinstance(sizes[0], (tuple, list)):
        sizes = list(sizes[0])
    plan = scores.plan() if isinstance(scores, DeferredScores) else None
    if plan is None or not all(type(size) is int for size in sizes) or 0 in plan.shape:
        return None
    shape = _resolved(sizes, math.prod(plan.shape))
    regrouped = None if shape is None else plan.regrouped(shape)
    return None if regrouped is None else scores.derived(call, regrouped)


def _resolved(sizes: Sequence[int], numel: int) -> list[int] | None:
    """Return the sizes of a view with a number for -1, ``None`` if they do not fit."""
    known = math.prod(size for size in sizes if size != -1)
    if known <= 0 or numel % known or sizes.count(-1) > 1:
        return None
    shape = [numel // known if size == -1 else size for size in sizes]
    return shape if math.prod(shape) == numel else None


@follows(_T.size)
def _size(call: Call) -> Any:
    shape = call.args[0].shape
    dims = [*call.args[1:], *call.kwargs.values()]
    return shape if not dims or dims[0] is None else shape[dims[0]]


@follows(_T.dim, _T.ndimension)
def _dim(call: Call) -> int:
    return len(call.args[0].shape)


@follows(_T.numel, _T.nelement, torch.numel)
def _numel(call: Call) -> int:
    return call.args[0].shape.numel()


@follows(_T.expand_as)
def _expand_as(call: Call) -> Any:
    value, other = call.args
    return None if isinstance(value, DeferredScores) else value.expand(other.shape)


def _in_place(handler: Handler) -> Handler:
    def follow(call: Call) -> DeferredScores | None:
        scores = call.args[0]
        return scores.written(handler, call) if isinstance(scores, DeferredScores) else None

    return follow


for _functions, _handler in (
    ((_T.add_, _T.__iadd__), _add),
    ((_T.sub_, _T.__isub__), _sub),
    ((_T.mul_, _T.__imul__), _mul),
    ((_T.div_, _T.__itruediv__), _div),
    ((_T.masked_fill_,), _masked_fill),
):
    follows(*_functions)(_in_place(_handler))
