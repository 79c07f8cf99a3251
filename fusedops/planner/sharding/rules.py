"""Placements of operators that DTensor has no rule for, or would split into smaller ones.

A rule is for one mesh dimension, in the words of ``fusedops._core.sharding``: an int shards that
dim, ``"replicate"``, or ``"partial"``. With the placements of a rule the operator itself runs on
each rank's part and gives each rank's part of the result. All operators may also run replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fusedops._core.sharding import PARTIAL, REPLICATE, Placement, Sharding
from fusedops.planner.sharding.trace import ValueMeta

# rule(metadata of the tensors, all arguments by name) -> [(placements of the tensors, of results)]
OperatorRule = Callable[[list[ValueMeta], dict[str, Any]], Iterator[Sharding]]


def _linear(tensors: list[ValueMeta], _: dict[str, Any]) -> Iterator[Sharding]:
    last = len(tensors[0].shape) - 1
    bias = len(tensors) == 3
    for dim in range(last):
        yield (dim, *[REPLICATE] * (len(tensors) - 1)), (dim,)
    if len(tensors[1].shape) == 2:
        yield (REPLICATE, *[0] * (len(tensors) - 1)), (last,)
        yield (last, 1, *[PARTIAL] * bias), (PARTIAL,)


def _addmm(tensors: list[ValueMeta], _: dict[str, Any]) -> Iterator[Sharding]:
    bias = tensors[0]
    if len(bias.shape) == 1:
        yield (REPLICATE, 0, REPLICATE), (0,)
        yield (0, REPLICATE, 1), (1,)
        yield (PARTIAL, 1, 0), (PARTIAL,)


def _matmul(tensors: list[ValueMeta], _: dict[str, Any]) -> Iterator[Sharding]:
    left, right = (len(tensor.shape) for tensor in tensors)
    if left < 2 or right < 2:
        return
    last = max(left, right) - 1
    for dim in range(max(left, right) - 2):
        sides: list[Placement] = []
        for tensor in tensors:
            own = dim - (last + 1 - len(tensor.shape))
            sides.append(own if own >= 0 and tensor.shape[own] > 1 else REPLICATE)
        yield sides, (dim,)
    yield (left - 2, REPLICATE), (last - 1,)
    yield (REPLICATE, right - 1), (last,)
    yield (left - 1, right - 2), (PARTIAL,)


def _norm(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
    for dim in range(len(tensors[0].shape) - len(arguments["normalized_shape"])):
        yield (dim, *[REPLICATE] * (len(tensors) - 1)), (dim,)


def _softmax(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
    rank = len(tensors[0].shape)
    for dim in range(rank):
        if dim != arguments["dim"] % rank:
            yield (dim,), (dim,)


def _attention(tensors: list[ValueMeta], _: dict[str, Any]) -> Iterator[Sharding]:
    """Batch and heads; a mask is sharded where it is not broadcast."""
    rank = len(tensors[0].shape)
    for dim in range(rank - 2):
        placements: list[Placement] = [dim, dim, dim]
        for mask in tensors[3:]:
            own = dim - (rank - len(mask.shape))
            placements.append(own if own >= 0 and mask.shape[own] > 1 else REPLICATE)
        yield placements, (dim,)


def _embedding(tensors: list[ValueMeta], _: dict[str, Any]) -> Iterator[Sharding]:
    last = len(tensors[1].shape)
    for dim in range(last):
        yield (REPLICATE, dim), (dim,)
    yield (1, REPLICATE), (last,)
    yield (0, REPLICATE), (PARTIAL,)


def _cross_entropy(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
    if len(tensors[0].shape) < 2:
        return
    inputs: tuple[Placement, ...] = (0, 0, *[REPLICATE] * (len(tensors) - 2))
    yield inputs, ((0,) if arguments["reduction"] == 0 else (PARTIAL,))


def _convolution(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
    bias = len(tensors) == 3
    if len(tensors[0].shape) != len(tensors[1].shape) or arguments.get("transposed"):
        return
    yield (0, *[REPLICATE] * (len(tensors) - 1)), (0,)
    if arguments["groups"] == 1:
        yield (REPLICATE, *[0] * (len(tensors) - 1)), (1,)
        yield (1, 1, *[PARTIAL] * bias), (PARTIAL,)
    elif tensors[1].shape[1] == 1 and arguments["groups"] == tensors[0].shape[1]:
        yield (1, *[0] * (len(tensors) - 1)), (1,)


def _batch_norm(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
    if not arguments.get("training"):
        yield (0, *[REPLICATE] * (len(tensors) - 1)), (0,)
    yield (1, *[0] * (len(tensors) - 1)), (1,)


def _group_norm(tensors: list[ValueMeta], _: dict[str, Any]) -> Iterator[Sharding]:
    yield (0, *[REPLICATE] * (len(tensors) - 1)), (0,)


def _image(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
    """Pooling and interpolation work on the last dims of ``[batch, channels, ...]``."""
    for dim in range(min(2, len(tensors[0].shape) - 2)):
        yield (dim, *[REPLICATE] * (len(tensors) - 1)), (dim, dim)


def _pad(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
    for dim in range(len(tensors[0].shape) - len(arguments["pad"]) // 2):
        yield (dim,), (dim,)


def _elementwise(tensors: list[ValueMeta], _: dict[str, Any]) -> Iterator[Sharding]:
    for dim in range(len(tensors[0].shape)):
        yield (dim,), (dim, dim)


def _recurrent(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
    """The batch: dim 0 or 1 of the sequence, dim 1 of the states."""
    if "batch_sizes" in arguments or len(tensors[0].shape) != 3:
        return
    batch = 0 if arguments["batch_first"] else 1
    states = 2 if isinstance(arguments["hx"], tuple) else 1
    weights = len(tensors) - 1 - states
    yield (batch, *[1] * states, *[REPLICATE] * weights), (batch, *[1] * states)


RULES: dict[str, OperatorRule] = {
    "aten::linear": _linear,
    "aten::addmm": _addmm,
    "aten::matmul": _matmul,
    "aten::layer_norm": _norm,
    "aten::rms_norm": _norm,
    "aten::softmax": _softmax,
    "aten::log_softmax": _softmax,
    "aten::scaled_dot_product_attention": _attention,
    "aten::embedding": _embedding,
    "aten::cross_entropy_loss": _cross_entropy,
    "aten::conv1d": _convolution,
    "aten::conv2d": _convolution,
    "aten::conv3d": _convolution,
    "aten::convolution": _convolution,
    "aten::batch_norm": _batch_norm,
    "aten::group_norm": _group_norm,
    "aten::max_pool1d": _image,
    "aten::max_pool2d": _image,
    "aten::max_pool2d_with_indices": _image,
    "aten::avg_pool1d": _image,
    "aten::avg_pool2d": _image,
    "aten::adaptive_avg_pool1d": _image,
    "aten::adaptive_avg_pool2d": _image,
    "aten::_adaptive_avg_pool2d": _image,
    "aten::upsample_nearest2d": _image,
    "aten::upsample_bilinear2d": _image,
    "aten::pad": _pad,
    "aten::constant_pad_nd": _pad,
    "aten::lstm": _recurrent,
    "aten::gru": _recurrent,
    "aten::rnn_tanh": _recurrent,
    "aten::rnn_relu": _recurrent,
    "aten::dropout": _elementwise,
    "aten::native_dropout": _elementwise,
    "aten::bernoulli": _elementwise,
    "aten::rand_like": _elementwise,
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Their gradients do not need what they have read or returned.
SAVES_NOTHING = _words(
    "add sub neg sum mean cat stack clone _to_copy expand slice select split split_with_sizes "
    "unbind chunk view _unsafe_view reshape transpose permute t squeeze unsqueeze alias detach "
    "flatten unflatten pad constant_pad_nd embedding contiguous repeat"
)
# Their gradients need their results.
SAVES_RESULT = _words(
    "softmax _softmax log_softmax _log_softmax tanh sigmoid exp sqrt rsqrt relu layer_norm "
    "scaled_dot_product_attention dropout native_dropout cross_entropy_loss"
)
# ... and only these.
SAVES_RESULT_ONLY = _words(
    "softmax _softmax log_softmax _log_softmax tanh sigmoid exp sqrt rsqrt relu dropout "
    "native_dropout"
)
# Their results share the memory of what they read.
VIEWS = _words(
    "view _unsafe_view transpose permute t squeeze unsqueeze alias detach expand slice select "
    "split split_with_sizes unbind chunk flatten unflatten reshape"
)


def short_name(op: Any) -> str:
    """Return the name of an overload's operator without its namespace."""
    return str(op._schema.name).partition("::")[2]
