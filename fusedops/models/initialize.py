"""First weights that do not depend on the layout: each number is drawn by where it stands.

Element ``(row, column)`` of a parameter (leading dimensions together are the rows) comes from word
``column % 4`` of Philox with the key of the parameter's name and seed and the counter ``(column //
4, row)``: a shard draws its own part of the whole, and the same.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import nn

from fusedops._core import checks, philox

# Counters at a time: what one takes stays in the cache.
_CHUNK = 1 << 15
# What ends a branch of the residual stream.
_BRANCH_ENDS = (
    "attention.output.weight",
    "feed_forward.w2",
    "shared_experts.w2",
    "down_proj.weight",
    "down_proj",
)
_EMBEDDING = "embedding.tokens.weight"


def initialize(model: nn.Module, seed: int | None = None) -> None:
    """Give all parameters of a ``Transformer`` new values.

    Weights are normal with the configuration's ``initializer_range`` as standard deviation, divided
    by ``sqrt(2 num_layers)`` where they end a branch of the residual stream, as GPT-2's are. Biases
    and buffers (what balances routers) are 0, weights of norms 1, and the embedding's row of
    ``pad_token_id`` is 0.

    Args:
        model: a ``Transformer``, sharded or not; its parameters have memory (``to_empty``).
        seed: of the numbers; ``None``: drawn from torch's generator, which must then be the same in
            all processes.

    Raises:
        ValueError: a parameter is on ``meta``.
        TypeError: ``seed`` is no int.

    Note:
        The same values for any sharding of the parameters, for any number of processes, and for a
        part of the model alone. Devices agree but for the last bits of logarithm and cosine.

    Reference:
        Radford et al.: Language Models are Unsupervised Multitask Learners, 2019.
    """
    if seed is None:
        seed = int(philox.new_seed(torch.device("cpu"))[0])
    checks.integer("initialize", "seed", seed)
    config: Any = model.config
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            checks.fail("initialize", name, "on a device with memory (to_empty)", "meta")
        with torch.no_grad():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif parameter.dim() < 2 or name.endswith("bias"):
                parameter.fill_(0.0)
            else:
                ends_branch = name.endswith(_BRANCH_ENDS)
                scale = math.sqrt(2 * config.num_layers) if ends_branch else 1.0
                _fill_normal(parameter, name, seed, config.initializer_range / scale)
                if name == _EMBEDDING and config.pad_token_id is not None:
                    local_part(parameter)[local_indices(parameter)[0] == config.pad_token_id] = 0.0


def _fill_normal(parameter: torch.Tensor, name: str, seed: int, std: float) -> None:
    """Fill a parameter, or this process's part of it."""
    shape = parameter.shape
    local = local_part(parameter)
    if local.numel() == 0:
        return
    indices = local_indices(parameter)
    rows = torch.zeros((), dtype=torch.int64)
    for size, index in zip(shape[:-1], indices[:-1], strict=True):
        rows = rows[..., None] * size + index
    rows, columns = rows.flatten().to(local.device), indices[-1].to(local.device)
    first = int(columns[0]) // 4
    blocks = torch.arange(first, int(columns[-1]) // 4 + 1, device=local.device)
    has_full_blocks = len(columns) == 4 * len(blocks)
    key = _key(name, seed)
    flat = local.view(-1, len(columns))
    step = max(1, _CHUNK // len(blocks))
    for begin in range(0, len(rows), step):
        values = _normal(rows[begin : begin + step], blocks, key)
        if not has_full_blocks:
            values = values[:, columns - 4 * first]
        flat[begin : begin + step] = values * std


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this process has."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def local_indices(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return, for each dimension, where in the whole the elements stand that are here."""
    indices = [torch.arange(size) for size in parameter.shape]
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return indices
    for axis, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        dim = getattr(placement, "dim", None)
        if dim is not None:
            part = mesh.size(axis), mesh.get_local_rank(axis)
            indices[dim] = _part(indices[dim], *part, getattr(placement, "split_factor", 1))
    return indices


def _part(indices: torch.Tensor, parts: int, index: int, factor: int) -> torch.Tensor:
    """Return one of the parts of a dimension, as DTensor and FSDP2 divide it.

    Where a later axis of the mesh was divided first (FSDP2 after tensor parallelism), ``factor`` is
    its size, and each of its parts is divided for itself.
    """
    pieces = [piece.chunk(parts) for piece in indices.chunk(factor)]
    return torch.cat([chunks[index] if index < len(chunks) else chunks[0][:0] for chunks in pieces])


def _key(name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    low, high = (int.from_bytes(digest[start : start + 4], "little") for start in (0, 4))
    return torch.tensor(low), torch.tensor(high)


def _normal(
    rows: torch.Tensor, blocks: torch.Tensor, key: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return float32 ``[rows, 4 * blocks]``: two pairs of Box and Muller from each counter."""
    # Whole tensors of one layout: torch's vectors and its tails give the same bits then.
    row = rows[:, None].expand(-1, len(blocks)).contiguous()
    block = blocks.expand(len(rows), -1).contiguous()
    counter = (block & 0xFFFFFFFF, block >> 32, row & 0xFFFFFFFF, row >> 32)
    w0, w1, w2, w3 = (word.to(torch.float32) for word in philox.philox4x32(counter, key))
    pairs = []
    for radius, angle in ((w0, w1), (w2, w3)):
        radius = ((radius + 0.5) * 2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = angle * (2.0 * math.pi * 2.0**-32)
        pairs += [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(pairs, -1).flatten(1)
