"""Placements of operators that DTensor has no rule for, or would split into smaller ones.

A rule is for one mesh dimension, in the words of ``fusedops._core.sharding``: an int shards that
dim, ``"replicate"``, or ``"partial"``. With the placements of a rule the operator itself runs on
each rank's part and gives each rank's part of the result. All operators may also run replicated.
Where the arguments on a rank's part differ from those of the graph, a local form runs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fusedops._core.sharding import PARTIAL, REPLICATE, Placement, Sharding
from fusedops.planner.sharding.trace import ValueMeta

# rule(metadata of the tensors, all arguments by name) -> [(placements of the tensors, of results)]
OperatorRule = Callable[[list[ValueMeta], dict[str, Any]], Iterator[Sharding]]
# form(operator, its arguments by name with local tensors, placements of the first tensor, mesh)
LocalForm = Callable[[Any, dict[str, Any], tuple[Any, ...], DeviceMesh], Any]


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


def _reshape(op: Any, arguments: dict[str, Any], place: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    """A local tensor may have other strides than the global one: copy where a view cannot be."""
    x, size = arguments.values()
    return x.reshape(size)


def _rows_of_table(
    op: Any, arguments: dict[str, Any], place: tuple[Any, ...], mesh: DeviceMesh
) -> Any:
    """Rows of the table that other ranks have are zero here."""
    part = 0
    for dim, own in enumerate(mesh.get_coordinate() or ()):
        if place[dim] == Shard(0):
            part = part * mesh.size(dim) + own
    if Shard(0) not in place:
        return op(*arguments.values())
    rows, padding = arguments["weight"].shape[0], arguments["padding_idx"]
    local = arguments["indices"] - part * rows
    outside = (local < 0) | (local >= rows)
    own_padding = padding - part * rows if padding >= 0 else -1
    own_padding = own_padding if 0 <= own_padding < rows else -1
    result = op(arguments["weight"], local.masked_fill(outside, 0), own_padding)
    return result.masked_fill(outside.unsqueeze(-1), 0.0)


def _mean_over_all_rows(
    op: Any, arguments: dict[str, Any], place: tuple[Any, ...], mesh: DeviceMesh
) -> Any:
    """The mean over all ranks' rows: the local sum, divided by the number of all that count."""
    if arguments["reduction"] != 1 or Shard(0) not in place:
        return op(*arguments.values())
    target, weight = arguments["target"], arguments["weight"]
    summed = op(*{**arguments, "reduction": 2}.values())
    if target.dtype.is_floating_point:  # probabilities: the mean is over all rows
        count = summed.new_tensor(float(target.numel() // target.shape[1]))
    else:
        counted = target != arguments["ignore_index"]
        if weight is not None:
            counted = weight[target.clamp_min(0)] * counted
        count = counted.sum().to(summed.dtype)
    for dim, own in enumerate(place):
        if own == Shard(0):
            count = functional.wait_tensor(functional.all_reduce(count, "sum", (mesh, dim)))
    return summed / count


def _depthwise(op: Any, arguments: dict[str, Any], place: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    """A depthwise convolution has one group for each local channel."""
    if arguments["groups"] > 1 and Shard(1) in place:
        arguments = {**arguments, "groups": arguments["input"].shape[1]}
    return op(*arguments.values())


LOCAL_FORMS: dict[str, LocalForm] = {
    "view": _reshape,
    "_unsafe_view": _reshape,
    "embedding": _rows_of_table,
    "cross_entropy_loss": _mean_over_all_rows,
    "conv1d": _depthwise,
    "conv2d": _depthwise,
    "conv3d": _depthwise,
}
