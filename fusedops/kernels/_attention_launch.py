"""What the launches of the attention kernels share: their arguments, options and block sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from fusedops._core import env
from fusedops._core.capability import compute_capability
from fusedops._core.layouts import heads_inside
from fusedops.kernels import _descriptors, _launch
from fusedops.kernels._attention_device import LOG2E
from fusedops.kernels._triton_version import at_least

# Numbers of which a kernel gains nothing by knowing that they are 1 or a multiple of 16: a new
# sequence length then needs no new compilation.
NOT_SPECIALIZED = ("num_blocks", "num_heads", "num_rows", "num_keys", "left", "right", "limit")

_UNBOUNDED = 1 << 30  # beyond any distance, and far enough from overflow
_LARGEST_STRIDE = 1 << 22  # times 256 rows: positions inside a block are 32-bit

# What each kernel walks, heads of keys' and of values' size.
WALKED = {"forward": ("k_ptr", "v_ptr"), "keys": ("q_ptr", "do_ptr"), "queries": ("k_ptr", "v_ptr")}

# Kernel, options, GPU -> for heads of 64, of 128 and of 256: BLOCK_M queries, BLOCK_N keys, warps,
# stages. They are large blocks that compile without stack (docs/reports); nothing here was measured
# on a GPU.
# * 80 must fit the 99 KB of shared memory of sm_86 and sm_89. 120 has the rows of 80, except where
#   those would spill.
# * 90: warp-group instructions want 64 rows of scores for every four warps (of queries in "forward"
#   and "queries", of keys in "keys"), and more warps would compute the same sums. Two blocks that
#   fit a multiprocessor compute their products during each other's softmax, unless their tiles get
#   so small that the L2 cache or shared memory is asked for more than it gives.
# * 90 by pointers: addresses leave no registers for two blocks.
# * 100 keeps sums out of the registers.
# * float32: exact products run on the ordinary units, and each of them is an instruction.
_Tile = tuple[int, int, int, int]
_TILES: dict[tuple[str, str, str], tuple[_Tile, _Tile, _Tile]] = {
    ("forward", "plain", "80"): ((128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 8, 2)),
    ("keys", "plain", "80"): ((32, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
    ("queries", "plain", "80"): ((128, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 2)),
    ("forward", "light", "80"): ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
    ("keys", "light", "80"): ((32, 64, 8, 2), (32, 64, 8, 2), (32, 32, 4, 2)),
    ("queries", "light", "80"): ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
    ("forward", "rich", "80"): ((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
    ("keys", "rich", "80"): ((64, 32, 8, 2), (32, 64, 8, 2), (32, 32, 4, 2)),
    ("queries", "rich", "80"): ((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
    ("forward", "drop", "80"): ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
    ("keys", "drop", "80"): ((32, 32, 8, 2), (32, 32, 8, 2), (16, 32, 8, 2)),
    ("queries", "drop", "80"): ((32, 32, 8, 2), (32, 32, 8, 2), (16, 32, 8, 2)),
    ("forward", "plain", "90"): ((128, 64, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2)),
    ("keys", "plain", "90"): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ("queries", "plain", "90"): ((64, 64, 4, 2), (64, 64, 4, 2), (128, 32, 8, 2)),
    ("forward", "light", "90"): ((128, 64, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2)),
    ("keys", "light", "90"): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ("queries", "light", "90"): ((64, 64, 4, 2), (64, 64, 4, 2), (128, 32, 8, 2)),
    ("forward", "rich", "90"): ((64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)),
    ("keys", "rich", "90"): ((64, 64, 4, 2), (32, 128, 8, 2), (16, 128, 8, 2)),
    ("queries", "rich", "90"): ((64, 32, 4, 2), (64, 16, 4, 2), (128, 16, 8, 2)),
    ("forward", "drop", "90"): ((64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)),
    ("keys", "drop", "90"): ((32, 64, 4, 2), (32, 128, 8, 2), (16, 128, 8, 2)),
    ("queries", "drop", "90"): ((64, 32, 4, 2), (64, 32, 4, 2), (128, 16, 8, 2)),
    ("forward", "plain", "90 by pointers"): ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2)),
    ("keys", "plain", "90 by pointers"): ((64, 64, 4, 2), (64, 128, 8, 2), (32, 128, 8, 2)),
    ("forward", "light", "90 by pointers"): ((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
    ("keys", "light", "90 by pointers"): ((64, 64, 4, 2), (32, 128, 8, 2), (32, 128, 8, 2)),
    ("queries", "light", "90 by pointers"): ((64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)),
    ("forward", "plain", "100"): ((128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2)),
    ("keys", "plain", "100"): ((64, 128, 8, 2), (64, 128, 8, 2), (32, 64, 8, 2)),
    ("queries", "plain", "100"): ((128, 32, 8, 2), (128, 64, 8, 2), (64, 32, 4, 2)),
    ("forward", "light", "100"): ((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
    ("keys", "light", "100"): ((64, 64, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
    ("queries", "light", "100"): ((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
    ("forward", "rich", "100"): ((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
    ("keys", "rich", "100"): ((64, 64, 8, 2), (32, 32, 8, 2), (16, 32, 4, 2)),
    ("queries", "rich", "100"): ((64, 64, 8, 2), (64, 32, 8, 2), (16, 32, 4, 2)),
    ("forward", "drop", "100"): ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
    ("keys", "drop", "100"): ((32, 32, 8, 2), (32, 32, 8, 2), (16, 32, 8, 2)),
    ("queries", "drop", "100"): ((32, 32, 8, 2), (32, 32, 4, 2), (16, 32, 8, 2)),
    ("forward", "plain", "120"): ((128, 64, 8, 3), (128, 32, 8, 2), (64, 32, 8, 2)),
    ("keys", "plain", "120"): ((32, 64, 4, 2), (32, 64, 8, 2), (32, 32, 4, 2)),
    ("keys", "rich", "120"): ((64, 32, 8, 2), (32, 64, 8, 2), (16, 32, 4, 2)),
    ("queries", "rich", "120"): ((64, 32, 8, 2), (32, 32, 8, 2), (16, 32, 4, 2)),
    ("forward", "drop", "120"): ((64, 64, 8, 2), (64, 32, 4, 2), (32, 32, 8, 2)),
    ("queries", "drop", "120"): ((32, 32, 8, 2), (32, 32, 4, 2), (16, 32, 4, 2)),
    ("forward", "float32", "any"): ((32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
    ("keys", "float32", "any"): ((16, 16, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)),
    ("queries", "float32", "any"): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
_FALLBACKS = {"90 by pointers": "90", "120": "80"}
# Versions of Triton (from one, before another); kernel, options, GPU, width -> tile. What it
# replaces would spill there: 3.9 keeps more in registers than 3.7 and 3.8, 3.6 needs more.
_EXCEPTIONS = (
    ((0, 0), (3, 7), ("keys", "plain", "100", 128), (32, 128, 8, 2)),
    ((0, 0), (3, 7), ("keys", "rich", "120", 128), (32, 32, 8, 2)),
    ((0, 0), (3, 7), ("queries", "rich", "100", 256), (16, 32, 8, 2)),
    ((3, 8), (3, 9), ("keys", "rich", "90 by pointers", 64), (32, 64, 4, 2)),
    ((3, 8), (99, 0), ("keys", "rich", "90 by pointers", 128), (16, 128, 8, 2)),
    ((3, 9), (99, 0), ("forward", "plain", "90 by pointers", 128), (128, 64, 8, 2)),
    ((3, 9), (99, 0), ("keys", "plain", "90 by pointers", 128), (32, 128, 8, 2)),
)


@dataclass(frozen=True)
class AttentionCall:
    """One attention over dense batches or packed sequences, as the kernels see it."""

    query: torch.Tensor  # ``[B, H, Sq, D]``; packed sequences are one batch, ``[1, H, tokens, D]``
    key: torch.Tensor  # ``[B, Hkv, Sk, D]``
    value: torch.Tensor  # ``[B, Hkv, Sk, Dv]``
    mask: torch.Tensor | None  # in four dims, each 1 or whole, or ``None``
    slopes: torch.Tensor | None  # ``[H]`` or ``[sequences, H]``, or ``None``
    sinks: torch.Tensor | None  # ``[H]``, or ``None``
    seed: torch.Tensor | None  # of dropout, or ``None``
    # Where packed sequences end, of queries and of keys; ``None`` for dense batches
    ends: tuple[torch.Tensor, torch.Tensor] | None
    max_rows: int  # the longest sequence of queries
    max_keys: int  # the longest sequence of keys; dropout counts rows of that many
    dropout_p: float  # probability with which a weight is dropped
    scale: float  # factor of the scores
    left: int  # bound of the window, negative without
    right: int  # the same for later keys
    softcap: float  # bound of the scores, 0 without

    @property
    def sequences(self) -> int:
        return self.query.shape[0] if self.ends is None else self.ends[0].shape[0] - 1

    @property
    def additive(self) -> bool:
        return self.mask is not None and self.mask.dtype != torch.bool

    @property
    def one_key(self) -> bool:
        """Whether no query may attend more than one key, and there is no sink."""
        return self.sinks is None and (self.max_keys == 1 or self.left == self.right == 0)

    @property
    def folds(self) -> bool:
        """Whether the maximum may be taken of the bare products: nothing but a positive factor."""
        bare = self.slopes is None and self.softcap == 0.0 and not self.additive
        return bare and self.scale > 0.0

    @property
    def dropout(self) -> dict[str, Any]:
        """Return what dropout needs; ``"tables"``: the seed has a place for each row and column."""
        arguments = _launch.dropout_arguments(self.dropout_p, self.max_keys, self.seed)
        placed = arguments["DROPOUT"] in ("draw placed", "select placed")
        if placed and self.seed is not None and self.seed.numel() > 5:
            arguments["DROPOUT"] = "tables"
        return arguments

    @property
    def options(self) -> str:
        """How much the options add to the inner loops, a key of the tables of block sizes."""
        if self.dropout["DROPOUT"] != "none":
            return "drop"
        if not self.folds or (self.mask is not None and self.mask.shape[2] != 1):
            return "rich"
        few = self.left < 0 and self.mask is None and self.sinks is None
        return "plain" if few else "light"

    def arguments(self) -> dict[str, Any]:
        query, key, value = (readable(tensor) for tensor in (self.query, self.key, self.value))
        mask = self._mask()
        dropout = self.dropout
        factor = self.scale * LOG2E.value
        if self.softcap > 0.0:
            factor *= 2.0 / self.softcap
        # What stands in for absent tables is never read: any tensor, and no copy of one.
        ends_q, ends_k = (
            (query, query) if self.ends is None else map(torch.Tensor.contiguous, self.ends)
        )
        slopes, seed = (_launch.dense(tensor, query) for tensor in (self.slopes, self.seed))
        _, heads, rows, size = query.shape
        result: dict[str, Any] = {"q_ptr": query, "k_ptr": key, "v_ptr": value, "seed_ptr": seed}
        result |= {"slopes_ptr": slopes, "stride_slope": heads if has_batch(self.slopes) else 0}
        result |= {"ends_q_ptr": ends_q, "ends_k_ptr": ends_k, "VARLEN": self.ends is not None}
        result |= {"num_heads": heads, "num_rows": rows, "num_keys": self.max_keys}
        result |= {"left": min(self.left, _UNBOUNDED), "right": min(self.right, _UNBOUNDED)}
        result |= {"LEFT": self.left >= 0, "RIGHT": self.right >= 0}
        result |= {"factor": factor, "bound": self.softcap * LOG2E.value}
        result |= {"ALIBI": self.slopes is not None, "SOFTCAP": self.softcap > 0.0}
        result |= {"limit": dropout["limit"], "drop_scale": dropout["scale"]}
        result |= {"DROPOUT": dropout["DROPOUT"], "PRECISION": _launch.precision(query.dtype)}
        result |= {"GROUP": heads // max(1, key.shape[1])}
        result |= {"HEAD_DIM": size, "VALUE_DIM": value.shape[3]}
        result["mask_ptr"] = query if mask is None else mask
        kind = "none" if mask is None else "bool" if mask.dtype == torch.uint8 else "add"
        result |= {"MASK": kind, "PER_QUERY": mask is not None and mask.shape[2] != 1}
        for name, tensor in (("q", query), ("k", key), ("v", value)):
            result |= self.strides(name, tensor)
        strides = (0, 0, 0, 0) if mask is None else broadcast_strides(mask)
        names = ("stride_mb", "stride_mh", "stride_mm", "stride_mn")
        return result | dict(zip(names, strides, strict=True))

    def strides(self, name: str, tensor: torch.Tensor) -> dict[str, int]:
        """Return the strides of batch, head and row; packed sequences have no batch."""
        batch, head, row, _ = tensor.stride()
        batch = batch if self.ends is None else 0
        return {f"stride_{name}b": batch, f"stride_{name}h": head, f"stride_{name}s": row}

    def _mask(self) -> torch.Tensor | None:
        if self.mask is None:
            return None
        mask = self.mask.view(torch.uint8) if self.mask.dtype == torch.bool else self.mask
        return mask.contiguous() if _is_far(mask) else mask


def has_batch(slopes: torch.Tensor | None) -> bool:
    return slopes is not None and slopes.dim() == 2


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a dense copy where the kernels could not read it as it lies.

    They want the last dim dense, and rows near enough for 32-bit positions inside a block.
    """
    dense = tensor.shape[3] <= 1 or tensor.stride(3) == 1
    return tensor if dense and not _is_far(tensor) else heads_inside(tensor)


def _is_far(tensor: torch.Tensor) -> bool:
    pairs = zip(tensor.stride()[2:], tensor.shape[2:], strict=True)
    return any(size > 1 and stride > _LARGEST_STRIDE for stride, size in pairs)


def broadcast_strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides, 0 along dims of one element: these are broadcast."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride if size != 1 else 0 for stride, size in pairs]


def blocks(
    kernel: str, call: AttentionCall, arguments: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return arguments, block sizes and launch options of "forward", "keys" or "queries".

    ``"keys"`` is the backward kernel that owns keys, ``"queries"`` the one that owns queries. What
    a kernel walks it reads by descriptors where that is possible: the arguments then hold these.
    """
    shape = (call.query.shape[3], call.value.shape[3])
    generation = generation_of(call.query.device)
    walked = WALKED[kernel]
    described = (
        call.ends is None
        and describes(kernel, generation, max(shape), call.options)
        and _descriptors.describable(*(arguments[name] for name in walked))
    )
    entry = block_table(kernel, generation, call.query.dtype, *shape, call.options, described)
    sizes, options = entry
    if described:
        for name, columns in zip(walked, ("BLOCK_D", "BLOCK_DV"), strict=True):
            block = walked_block(kernel, sizes, columns)
            arguments = arguments | {name: _descriptors.describe(arguments[name], block)}
    if kernel == "keys":
        return arguments, sizes, options
    mask = None
    if describes_mask(kernel, generation, arguments["PER_QUERY"]):
        mask = _describable_mask(arguments["mask_ptr"])
    if mask is not None:
        # Its strides of batch and head become steps of the index.
        steps = {f"stride_m{dim}": int(arguments[f"stride_m{dim}"] != 0) for dim in "bh"}
        block = mask_block(sizes)
        arguments = arguments | steps | {"mask_ptr": _descriptors.describe(mask, block)}
    return arguments, sizes | {"MASK_DESCRIBED": mask is not None}, options


def mask_block(sizes: dict[str, Any]) -> list[int]:
    """Return the block of a descriptor over a mask ``[B, H, Sq, Sk]``: that of the scores."""
    return [1, 1, sizes["BLOCK_M"], sizes["BLOCK_N"]]


def describes_mask(kernel: str, generation: int, per_query: bool) -> bool:
    """Return whether a kernel takes a descriptor of a mask with a row per query: on sm_90.

    Pointers read it an element at a time: where keys end is not known, nor how much of a vector
    exists. What a descriptor reads past them is 0, and does not matter. The kernel that owns keys
    wants the mask transposed, which gains nothing there and spills.
    """
    return per_query and kernel != "keys" and (generation == 90 or env.triton_interpreted())


def _describable_mask(mask: torch.Tensor) -> torch.Tensor | None:
    """Return a mask as a descriptor can read it, ``None`` where none can."""
    # Broadcast dims as ones, whose stride means nothing but must be one that a descriptor takes.
    shape = [size if stride else 1 for stride, size in zip(mask.stride(), mask.shape, strict=True)]
    if shape[2:] != list(mask.shape[2:]):
        return None
    row = mask.stride(2) * mask.shape[2]
    strides = [row if size == 1 else mask.stride(dim) for dim, size in enumerate(shape[:2])]
    view = mask.as_strided(shape, (*strides, *mask.stride()[2:]))
    return view if _descriptors.describable(view) else None


def describes(kernel: str, generation: int, width: int, options: str) -> bool:
    """Return whether a kernel takes descriptors of what it walks: on sm_90, where none spills."""
    if generation != 90 and not env.triton_interpreted():
        return False
    if kernel == "keys":
        return options in ("plain", "light")
    return kernel == "forward" or width <= 128


def walked_block(kernel: str, sizes: dict[str, Any], columns: str) -> list[int]:
    """Return the block of a descriptor over ``[B, H, S, D]`` that a kernel reads in each step."""
    return [1, 1, sizes["BLOCK_M" if kernel == "keys" else "BLOCK_N"], sizes[columns]]


def block_table(
    kernel: str,
    generation: int,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    options: str,
    described: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return block sizes and launch options of a kernel; ``generation`` is 80, 90, 100 or 120.

    ``described`` is whether descriptors read what the kernel walks.
    """
    widths = [max(16, triton.next_power_of_2(size)) for size in (head_dim, value_dim)]
    gpu = "90 by pointers" if generation == 90 and not described else str(generation)
    key = (kernel, "float32", "any") if dtype == torch.float32 else (kernel, options, gpu)
    row = _tile(key, max(64, *widths))
    if env.triton_interpreted():
        row = (16, 16, 4, 1)  # small: tests with few rows then walk several blocks
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_D", "BLOCK_DV")
    sizes: dict[str, Any] = dict(zip(names, (*row[:2], *widths), strict=True))
    sizes["CHUNKED"] = dtype == torch.float32
    sizes["SPLIT"] = _splits(kernel, generation, max(widths), options, described)
    sizes["DESCRIBED"] = described
    if kernel == "keys":
        # Fewer rows than threads, but not fewer than half as many.
        sizes["TWO_COLUMNS"] = row[0] < 32 * row[2] <= 2 * row[0] or env.triton_interpreted()
        sizes["ALLOW_LICM"] = _allows_licm(generation, max(widths), options, described)
    return sizes, {"num_warps": row[2], "num_stages": row[3], "enable_fp_fusion": True}


def _tile(key: tuple[str, str, str], width: int) -> _Tile:
    for since, until, exception, tile in _EXCEPTIONS:
        if exception == (*key, width) and at_least(*since) and not at_least(*until):
            return tile
    if key not in _TILES:
        key = (*key[:2], _FALLBACKS[key[2]])
    return _TILES[key][(64, 128, 256).index(width)]


def _splits(kernel: str, generation: int, width: int, options: str, described: bool) -> bool:
    """Return whether blocks that need no look at positions get a loop of their own.

    Two or three loops hold more in registers than one: where they would spill, or where the options
    cost more than the look, there is one.
    """
    if options == "light":
        return kernel != "keys" and width <= (64 if kernel == "forward" and described else 128)
    widest = 128 if described else 64
    return options == "plain" and not (kernel == "keys" and generation == 90 and width > widest)


def _allows_licm(generation: int, width: int, options: str, described: bool) -> bool:
    """Return whether Triton may hoist loop invariants of ``keys_kernel`` (LICM).

    They are mostly addresses in shared memory, for which some tiles have no registers.
    """
    if described:
        return width < 128
    if generation != 90 or width > 128:
        return True
    spills = (options == "rich" and at_least(3, 8)) or (
        width == 128 and options in ("plain", "drop") and at_least(3, 9)
    )
    return not spills


@functools.cache
def generation_of(device: torch.device) -> int:
    """Return the architecture (80, 90, 100, 120) whose tiles a GPU uses."""
    capability = compute_capability(device)
    return 80 if capability is None else {9: 90, 10: 100, 12: 120}.get(capability[0], 80)


def supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> str | None:
    size = max(query.shape[-1], value.shape[-1])
    if size > 256:
        return f"its kernels keep a whole head in registers: sizes up to 256, not {size}"
    return None


def supports_backward(grad_output: Any, grad_lse: Any, *args: Any) -> str | None:
    return supports(*args)
