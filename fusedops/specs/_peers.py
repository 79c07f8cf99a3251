"""Adapters of other libraries' GPU kernels to the signatures of our ops, for the benchmark.

Nothing is imported before a peer runs. One that is not installed, or lacks what a call asks for,
raises ``UnsupportedError`` with the reason, which the benchmark prints instead of a row.

Liger's swiglu, geglu, rope and cross-entropy overwrite what they are given, in the forward or in
the backward: they say so, and get copies that are made outside of what is timed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fusedops._core.checks import UnsupportedError

# label of a row -> name of the installed package
PACKAGES = {"liger": "liger-kernel", "flash_attn": "flash-attn", "flex": "torch"}


@dataclass
class Peer:
    """A peer's function with an op's signature."""

    label: str  # name of its benchmark row
    module: str  # where it is imported from
    name: str  # what is imported
    # Calls what is imported, its first argument, with the arguments of the op
    adapt: Callable[..., Any]
    overwrites: bool = False  # whether it writes on its arguments or on the gradients that come in
    devices: ClassVar[tuple[str, ...]] = ("cuda",)  # types of devices that it is worth timing on

    def load(self) -> Any:
        """Return what is imported.

        Raises:
            UnsupportedError: it cannot be imported.
        """
        try:
            return getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"{PACKAGES[self.label]} is not installed, or has no {self.module}.{self.name}: "
                f"{error}"
            ) from error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it with the arguments of our op."""
        return self.adapt(self.load(), *args, **kwargs)


def _adapter(
    label: str, module: str, name: str, overwrites: bool = False
) -> Callable[[Callable[..., Any]], Callable[[], dict[str, Any]]]:
    """Make an adapter of a peer's function the ``peers`` of a spec."""

    def wrap(adapt: Callable[..., Any]) -> Callable[[], dict[str, Any]]:
        return lambda: {label: Peer(label, module, name, adapt, overwrites)}

    return wrap


@_adapter("liger", "liger_kernel.ops.layer_norm", "LigerLayerNormFunction")
def layer_norm(
    function: Any, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float = 1e-5
) -> Any:
    """Adapt Liger's layer norm, which needs both parameters."""
    if len(normalized_shape) != 1 or weight is None or bias is None:
        raise UnsupportedError("the peer normalises one dim and needs weight and bias")
    return function.apply(input, weight, bias, eps)


@_adapter("liger", "liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
def rms_norm(
    function: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    eps: float | None = None,
    **options: Any,
) -> Any:
    """Adapt Liger's rms norm."""
    if len(normalized_shape) != 1 or weight is None:
        raise UnsupportedError("the peer normalises one dim and needs a weight")
    return function.apply(input, weight, *_rms_options(input, eps, **options))


def _rms_options(
    input: Any, eps: float | None, *, weight_offset: float = 0.0, rounding: str = "torch"
) -> Any:
    """Return what follows the tensors; "gemma" computes all in float32, as torch does."""
    mode = {"torch": "gemma", "hf": "llama"}[rounding]
    return torch.finfo(input.dtype).eps if eps is None else eps, weight_offset, mode, False


@_adapter("liger", "liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
def add_rms_norm(
    function: Any,
    input: Any,
    residual: Any,
    normalized_shape: Any,
    weight: Any = None,
    eps: float | None = None,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: Any = None,
    **options: Any,
) -> Any:
    """Adapt Liger's sum and rms norm."""
    _refuse(seed=seed)
    if len(normalized_shape) != 1 or weight is None or (dropout_p and training):
        raise UnsupportedError("the peer normalises one dim, needs a weight and drops nothing")
    return function.apply(input, residual, weight, *_rms_options(input, eps, **options))


@_adapter("liger", "liger_kernel.ops.swiglu", "LigerSiLUMulFunction", overwrites=True)
def swiglu(function: Any, gate: Any, up: Any) -> Any:
    """Adapt Liger's swiglu, whose backward overwrites both inputs."""
    return function.apply(gate, up)


@_adapter("liger", "liger_kernel.ops.geglu", "LigerGELUMulFunction", overwrites=True)
def geglu(function: Any, gate: Any, up: Any, approximate: str = "none") -> Any:
    """Adapt Liger's geglu, which has the tanh form; its backward overwrites both inputs."""
    if approximate != "tanh":
        raise UnsupportedError("the peer has the tanh form only")
    return function.apply(gate, up)


@_adapter("liger", "liger_kernel.ops.rope", "LigerRopeFunction", overwrites=True)
def rotary_embedding(
    function: Any, query: Any, key: Any, cos: Any, sin: Any, *, interleaved: bool = False
) -> Any:
    """Adapt Liger's rope, which overwrites what lies as ``[B, S, H, D]``, gradients too."""
    if interleaved or cos.shape[-1] != query.shape[-1]:
        raise UnsupportedError("the peer has the half form of whole heads only")
    return function.apply(query, key, cos, sin)


@_adapter("liger", "liger_kernel.transformers.functional", "liger_cross_entropy", overwrites=True)
def cross_entropy(
    function: Any, logits: Any, target: Any, *, z_loss: float = 0.0, **options: Any
) -> Any:
    """Adapt Liger's cross-entropy, which overwrites the logits."""
    if logits.dim() != 2:
        raise UnsupportedError("the peer takes 2 dims")
    return function(logits, target, lse_square_scale=z_loss, **options)


@_adapter("liger", "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
def linear_cross_entropy(
    function: Any,
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any = None,
    *,
    chunk_size: int | None = None,
    recompute: bool | None = None,
    z_loss: float = 0.0,
    **options: Any,
) -> Any:
    """Adapt Liger's head and cross-entropy, which chooses its chunks itself."""
    if hidden.dim() != 2:
        raise UnsupportedError("the peer takes 2 dims")
    return function(hidden, weight, target, bias, lse_square_scale=z_loss, **options)


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if isinstance(value, torch.Tensor) or value:
            raise UnsupportedError(f"the peer, or its adapter, has no {name}")


def _in_flash_words(
    *,
    is_causal: bool,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the options that all of flash-attn's functions take; refuse any other."""
    _refuse(**others)
    return {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": window or (-1, -1),
        "softcap": softcap or 0.0,
    }


@_adapter("flash_attn", "flash_attn", "flash_attn_func")
def _flash(
    function: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int, int] | None = None,
    alibi_slopes: Any = None,
    **others: Any,
) -> Any:
    _refuse(attn_mask=attn_mask)
    words = _in_flash_words(is_causal=is_causal, scale=scale, window=window, **others)
    if query.dim() != 4:
        raise UnsupportedError("the peer takes 4 dims")
    if (is_causal or window) and query.shape[2] != key.shape[2]:
        raise UnsupportedError("the peer aligns a causal mask to the lower right")
    heads_inside = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output = function(*heads_inside, dropout_p=dropout_p, alibi_slopes=alibi_slopes, **words)
    return output.transpose(1, 2)


@_adapter("flash_attn", "flash_attn", "flash_attn_varlen_func")
def attention_varlen(
    function: Any,
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    alibi_slopes: Any = None,
    **others: Any,
) -> Any:
    """Adapt flash-attn's for packed sequences."""
    words = _in_flash_words(is_causal=is_causal, **others)
    packed = (query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return function(*packed, alibi_slopes=alibi_slopes, **words)


@_adapter("flash_attn", "flash_attn", "flash_attn_with_kvcache")
def attention_decode(
    function: Any, query: Any, key_cache: Any, value_cache: Any, cache_seqlens: Any, **others: Any
) -> Any:
    """Adapt flash-attn's for a cache."""
    words = _in_flash_words(is_causal=True, **others)
    one = query.dim() == 3
    rows = query.unsqueeze(2) if one else query
    heads_inside = (tensor.transpose(1, 2) for tensor in (rows, key_cache, value_cache))
    output = function(*heads_inside, cache_seqlens=cache_seqlens, **words)
    return output.squeeze(1) if one else output.transpose(1, 2)


@_adapter("flex", "torch.nn.attention.flex_attention", "flex_attention")
def _flex(
    function: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    **others: Any,
) -> Any:
    _refuse(dropout_p=dropout_p, **others)
    if query.dim() != 4 or query.shape[0] != key.shape[0]:
        raise UnsupportedError("the peer takes 4 dims and as many keys as queries in the batch")
    left, right = window or (-1, -1)
    sizes = (*query.shape[:3], key.shape[2])
    scores, blocks = None, None
    if attn_mask is not None:
        attn_mask = attn_mask.expand(sizes)
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    pattern = (left, 0 if is_causal else right)
    if boolean:
        # The blocks depend on the values of the mask: they are computed for every call.
        blocks = _blocks(sizes, *pattern, query.device, attn_mask)
    elif pattern != (-1, -1):
        blocks = _blocks_of_pattern(sizes, *pattern, query.device)
    if softcap is not None or (attn_mask is not None and not boolean):

        def scores(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            return score if attn_mask is None or boolean else score + attn_mask[b, h, q, k]

    run = _compiled(function) if query.is_cuda else function
    return run(query, key, value, scores, blocks, scale, enable_gqa)


def attention() -> dict[str, Any]:
    """Return flash-attn's and torch's FlexAttention's."""
    return _flash() | _flex()


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


@functools.lru_cache(maxsize=16)
def _blocks_of_pattern(sizes: Any, left: int, right: int, device: Any) -> Any:
    return _blocks((None, None, *sizes[2:]), left, right, device)


def _blocks(sizes: Any, left: int, right: int, device: Any, mask: Any = None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def kept(b: Any, h: Any, q: Any, k: Any) -> Any:
        allowed = (k - q <= right) if right >= 0 else (k >= 0)
        if left >= 0:
            allowed = allowed & (q - k <= left)
        return allowed if mask is None else allowed & mask[b, h, q, k]

    batch, heads, rows, columns = sizes
    return create_block_mask(kept, batch, heads, rows, columns, device=device)
