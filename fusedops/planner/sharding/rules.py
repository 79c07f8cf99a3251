"""Placements of operators that DTensor has no rule for, or would split into smaller ones.

A rule is for one mesh dimension, in the words of ``fusedops._core.sharding``: an int shards that
dim, ``"replicate"``, or ``"partial"``. With the placements of a rule the operator itself runs on
each rank's part and gives each rank's part of the result. All operators may also run replicated.
Where the arguments on a rank's part differ from those of the graph, a local form runs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    if len(tensors[0].shape) == 1:  # the bias
        yield (REPLICATE, 0, REPLICATE), (0,)
        yield (0, REPLICATE, 1), (1,)
        yield (PARTIAL, 1, 0), (PARTIAL,)


def _broadcast(tensor: ValueMeta, rank: int, dim: int) -> Placement:
    """Return where a tensor is if the result of ``rank`` dims is sharded in ``dim``."""
    own = dim - (rank - len(tensor.shape))
    return own if own >= 0 and tensor.shape[own] > 1 else REPLICATE


def _matmul(tensors: list[ValueMeta], _: dict[str, Any]) -> Iterator[Sharding]:
    left, right = (len(tensor.shape) for tensor in tensors)
    if left < 2 or right < 2:
        return
    rank = max(left, right)
    for dim in range(rank - 2):
        yield [_broadcast(tensor, rank, dim) for tensor in tensors], (dim,)
    yield (left - 2, REPLICATE), (rank - 2,)
    yield (REPLICATE, right - 1), (rank - 1,)
    yield (left - 1, right - 2), (PARTIAL,)


def _attention(tensors: list[ValueMeta], _: dict[str, Any]) -> Iterator[Sharding]:
    """Batch and heads; a mask is sharded where it is not broadcast."""
    rank = len(tensors[0].shape)
    for dim in range(rank - 2):
        yield (dim, dim, dim, *(_broadcast(mask, rank, dim) for mask in tensors[3:])), (dim,)


def _embedding(tensors: list[ValueMeta], _: dict[str, Any]) -> Iterator[Sharding]:
    last = len(tensors[1].shape)
    for dim in range(last):
        yield (REPLICATE, dim), (dim,)
    yield (1, REPLICATE), (last,)
    yield (0, REPLICATE), (PARTIAL,)


def _cross_entropy(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
    if len(tensors[0].shape) > 1:
        inputs: tuple[Placement, ...] = (0, 0, *[REPLICATE] * (len(tensors) - 2))
        yield inputs, ((0,) if arguments["reduction"] == 0 else (PARTIAL,))


def _convolution(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
    bias = len(tensors) == 3
    if len(tensors[0].shape) != len(tensors[1].shape):
        return
    yield (0, *[REPLICATE] * (len(tensors) - 1)), (0,)
    if arguments["groups"] == 1:
        yield (REPLICATE, *[0] * (len(tensors) - 1)), (1,)
        yield (1, 1, *[PARTIAL] * bias), (PARTIAL,)


def _batch_norm(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
    if not arguments.get("training"):
        yield (0, *[REPLICATE] * (len(tensors) - 1)), (0,)
    yield (1, *[0] * (len(tensors) - 1)), (1,)


def _along(dims: Callable[[int, dict[str, Any]], Iterable[int]]) -> OperatorRule:
    """Return the rule of operators that treat slices along ``dims(rank, arguments)`` alike."""

    def rule(tensors: list[ValueMeta], arguments: dict[str, Any]) -> Iterator[Sharding]:
        for dim in dims(len(tensors[0].shape), arguments):
            yield (dim, *[REPLICATE] * (len(tensors) - 1)), (dim, dim)

    return rule


_elementwise = _along(lambda rank, _: range(rank))
_norm = _along(lambda rank, arguments: range(rank - len(arguments["normalized_shape"])))
_softmax = _along(lambda rank, arguments: {*range(rank)} - {arguments["dim"] % rank})
_pad = _along(lambda rank, arguments: range(rank - len(arguments["pad"]) // 2))
_image = _along(lambda rank, _: range(min(2, rank - 2)))  # of ``[batch, channels, ...]``
_by_rule: dict[OperatorRule, str] = {
    _linear: "linear",
    _addmm: "addmm",
    _matmul: "matmul",
    _attention: "scaled_dot_product_attention",
    _embedding: "embedding",
    _cross_entropy: "cross_entropy_loss",
    _convolution: "conv1d conv2d conv3d",
    _batch_norm: "batch_norm",
    _norm: "layer_norm rms_norm",
    _softmax: "softmax log_softmax",
    _along(lambda rank, _: (0,)): "group_norm",
    _image: "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d "
    "adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d "
    "upsample_nearest2d upsample_bilinear2d",
    _pad: "pad constant_pad_nd",
    _elementwise: "dropout native_dropout bernoulli rand_like",
}
RULES = {f"aten::{name}": rule for rule, names in _by_rule.items() for name in names.split()}


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


LOCAL_FORMS: dict[str, LocalForm] = {
    "view": _reshape,
    "_unsafe_view": _reshape,
    "embedding": _rows_of_table,
    "cross_entropy_loss": _mean_over_all_rows,
}
