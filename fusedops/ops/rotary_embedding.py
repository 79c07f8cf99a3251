"""Rotary position embedding: rotates pairs of elements of each head by an angle of the position.

The backward is the transposed map, which for a table of cosines and sines is the rotation by the
negative angle, and uses the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import backends, checks, dtypes
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Placement, Sharding


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the heads of query and key by the angles of their positions.

    ``y[j] = x[j] * cos[j] - x[j'] * sin[j]`` and ``y[j'] = x[j'] * cos[j'] + x[j] * sin[j']`` for
    each pair ``(j, j')`` of the first ``rotary_dim`` elements of a head; the others are copied.

    Args:
        query: ``[batch, num_heads, seq_len, head_dim]``, any floating dtype, any strides: usually
            a transposed view of ``[batch, seq_len, num_heads, head_dim]``, which is not copied.
        key: ``[batch, num_key_heads, seq_len, head_dim]``, dtype of ``query``.
        cos: ``[batch, seq_len, rotary_dim]``, ``[1, seq_len, rotary_dim]`` or ``[seq_len,
            rotary_dim]`` with an even ``rotary_dim <= head_dim``, dtype of ``query`` (float32 is
            also accepted if that is a half-precision dtype). As in Hugging Face's models, an angle
            is stored for both elements of its pair. Expand a table ``t`` of ``rotary_dim / 2``
            angles first, by ``torch.cat((t, t), -1)``, or ``t.repeat_interleave(2, -1)`` with
            ``interleaved``.
        sin: as ``cos``.
        interleaved: pairs are ``(2i, 2i + 1)``, as in GPT-J; otherwise they are ``(i, i +
            rotary_dim / 2)``, as in GPT-NeoX and Llama.

    Returns:
        The rotated query and key: shapes and dtypes of ``query`` and ``key``, and their strides
        where these are dense with ``stride(-1) == 1``; else contiguous.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: an argument is no tensor, or its dtype does not fit.
        UnsupportedError: ``cos`` or ``sin`` requires a gradient and a backend other than
            ``"torch"`` is requested.

    Note:
        Arithmetic is float32 (float64 for float64); the result is rounded once, where eager torch
        rounds three times. Saves ``cos`` and ``sin`` only. Gradients of ``cos`` and ``sin``, which
        need query and key to be saved, are computed by the eager reference: if one of them requires
        a gradient, the call runs on the reference. Autocast does not change the call.

    Reference:
        Su et al.: RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv:2104.09864.

    Example:
        >>> import torch, fusedops
        >>> x = torch.tensor([1.0, 2.0]).reshape(1, 1, 1, 2)
        >>> quarter = torch.zeros(1, 2), torch.ones(1, 2)
        >>> fusedops.rotary_embedding(x, x, *quarter)[0].flatten()
        tensor([-2.,  1.])
    """
    checks.flag("rotary_embedding", "interleaved", interleaved)
    _check(query, key, cos, sin)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        requested = backends.requested()
        if requested not in (None, "torch"):
            raise checks.UnsupportedError(
                f"rotary_embedding: backend {requested!r} was requested but gives no gradient to "
                "cos and sin; detach them or use the backend 'torch'"
            )
        return _reference(query, key, cos, sin, interleaved)
    return _OP(query, key, cos, sin, interleaved)


def _check(query: Any, key: Any, cos: Any, sin: Any) -> None:
    op = "rotary_embedding"
    checks.tensor(op, "query", query)
    if query.dim() != 4:
        expected = "of 4 dimensions [batch, num_heads, seq_len, head_dim]"
        checks.fail(op, "query", expected, f"{query.dim()} dimensions")
    checks.like(op, "key", key, "query", query, dtype=True)
    batch, _, length, head_dim = query.shape
    heads = key.shape[1] if key.dim() == 4 else "num_key_heads"
    checks.shape(op, "key", key, (batch, heads, length, head_dim), "query but for its heads")
    for name, table in (("cos", cos), ("sin", sin)):
        checks.parameter(op, name, table, "query", query)
        if table.dim() not in (2, 3):
            expected = "of shape [batch, seq_len, rotary_dim] or [seq_len, rotary_dim]"
            checks.fail(op, name, expected, f"{table.dim()} dimensions")
        entries = () if table.dim() == 2 else (1 if table.shape[0] == 1 else batch,)
        rotary_dim = table.shape[-1]
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            expected = f"of an even last size from 2 to head_dim, {head_dim}"
            checks.fail(op, name, expected, rotary_dim)
        shape = (*entries, length, rotary_dim)
        checks.shape(op, name, table, shape, "seq_len and, unless it is 1, batch of query")
    checks.like(op, "sin", sin, "cos", cos, dtype=True)
    checks.shape(op, "sin", sin, cos.shape, "that of cos")


def _turn(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _empty(x: torch.Tensor) -> torch.Tensor:
    if x.stride(-1) == 1:
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool = False
) -> torch.Tensor:
    """Return ``x`` rotated, contiguous, in differentiable torch operations."""
    dtype = dtypes.statistics_dtype(x.dtype)
    cos, sin = cos.to(dtype).unsqueeze(-3), sin.to(dtype).unsqueeze(-3)
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim].to(dtype)
    if inverse:
        part = part * cos - _turn(part * sin, interleaved)
    else:
        part = part * cos + _turn(part, interleaved) * sin
    return torch.cat((part.to(x.dtype), x[..., rotary_dim:]), -1)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool = False
) -> torch.Tensor:
    return _empty(x).copy_(rotated(x, cos, sin, interleaved, inverse))


def _reference(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved)


def _fake(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(query), _empty(key)


def _computed(
    grad_rotated_query: Any, grad_rotated_key: Any, output_mask: Sequence[bool]
) -> tuple[bool, bool]:
    """Return which gradients are asked for and have an incoming one."""
    query, key = grad_rotated_query is not None, grad_rotated_key is not None
    return output_mask[0] and query, output_mask[1] and key


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_query, grad_key, cos, sin, interleaved, output_mask = args
    computed = _computed(grad_query, grad_key, output_mask)
    return tuple(
        _rotate(grad, cos, sin, interleaved, True) if on else None
        for grad, on in zip((grad_query, grad_key), computed, strict=True)
    )


def _backward_fake(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_query, grad_key, *_, output_mask = args
    computed = _computed(grad_query, grad_key, output_mask)
    pairs = zip((grad_query, grad_key), computed, strict=True)
    return tuple(_empty(grad) if on else None for grad, on in pairs)


def _shard(cos: Any) -> list[Sharding]:
    """Batch entries, heads and positions are independent; a table of all entries is replicated."""
    of_entries = 0 if cos.ndim == 3 and cos.shape[0] != 1 else REPLICATE
    cuts: list[tuple[Placement, Placement]] = [
        (REPLICATE, REPLICATE),
        (0, of_entries),
        (1, REPLICATE),
        (2, cos.ndim - 2),
    ]
    return [([dim, dim], [dim, dim, table, table]) for dim, table in cuts]


_OP = define_op(
    "rotary_embedding",
    "(Tensor query, Tensor key, Tensor cos, Tensor sin, bool interleaved)"
    " -> (Tensor rotated_query, Tensor rotated_key)",
    contract={
        "query, rotated_query": "T [batch, num_heads, seq_len, head_dim]",
        "key, rotated_key": "T [batch, num_key_heads, seq_len, head_dim]",
        "cos": "param(T) as P [seq_len, rotary_dim] | [~batch, seq_len, rotary_dim]",
        "sin": "P [seq_len, rotary_dim] | [~batch, seq_len, rotary_dim]",
        "rotary_dim": "0 < rotary_dim <= head_dim and rotary_dim % 2 == 0",
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("query", "key"),
        outputs=("rotated_query", "rotated_key"),
        saves=("cos", "sin"),
        reference=_backward,
        fake=_backward_fake,
        computed=_computed,
    ),
    triton="fusedops.kernels.rotary_embedding",
    shard=_shard,
)
