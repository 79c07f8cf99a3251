"""What ``fusedops bench`` compares ops with in a checkout: other libraries, with our signatures.

``fusedops.bench.contenders.peers_of`` loads this file where it exists; a wheel has none. A library
of GPU kernels is imported when its peer runs. One that is not installed, or lacks what a call asks
for, raises ``UnsupportedError`` with the reason, which the benchmark prints instead of a row.

Liger's swiglu, geglu, rope and cross-entropy overwrite what they are given, in the forward or in
the backward: they say so, and get copies that are made outside of what is timed.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from fusedops._core.activation import ACTIVATIONS
from fusedops._core.checks import UnsupportedError
from fusedops.bench.layers import MOE_LAYER, Experts, routed
from fusedops.ops import RoutingPlan
from fusedops.specs.attention import written_out

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
    """Make an adapter of a peer's function an entry of ``PEERS``."""

    def wrap(adapt: Callable[..., Any]) -> Callable[[], dict[str, Any]]:
        return lambda: {label: Peer(label, module, name, adapt, overwrites)}

    return wrap


@_adapter("liger", "liger_kernel.ops.layer_norm", "LigerLayerNormFunction")
def _layer_norm(
    function: Any, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float = 1e-5
) -> Any:
    """Adapt Liger's layer norm, which needs both parameters."""
    if len(normalized_shape) != 1 or weight is None or bias is None:
        raise UnsupportedError("the peer normalises one dim and needs weight and bias")
    return function.apply(input, weight, bias, eps)


@_adapter("liger", "liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
def _rms_norm(
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
def _add_rms_norm(
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
def _swiglu(function: Any, gate: Any, up: Any) -> Any:
    """Adapt Liger's swiglu, whose backward overwrites both inputs."""
    return function.apply(gate, up)


@_adapter("liger", "liger_kernel.ops.geglu", "LigerGELUMulFunction", overwrites=True)
def _geglu(function: Any, gate: Any, up: Any, approximate: str = "none") -> Any:
    """Adapt Liger's geglu, which has the tanh form; its backward overwrites both inputs."""
    if approximate != "tanh":
        raise UnsupportedError("the peer has the tanh form only")
    return function.apply(gate, up)


@_adapter("liger", "liger_kernel.ops.rope", "LigerRopeFunction", overwrites=True)
def _rotary_embedding(
    function: Any, query: Any, key: Any, cos: Any, sin: Any, *, interleaved: bool = False
) -> Any:
    """Adapt Liger's rope, which overwrites what lies as ``[B, S, H, D]``, gradients too."""
    if interleaved or cos.shape[-1] != query.shape[-1]:
        raise UnsupportedError("the peer has the half form of whole heads only")
    return function.apply(query, key, cos, sin)


@_adapter("liger", "liger_kernel.transformers.functional", "liger_cross_entropy", overwrites=True)
def _cross_entropy(
    function: Any, logits: Any, target: Any, *, z_loss: float = 0.0, **options: Any
) -> Any:
    """Adapt Liger's cross-entropy, which overwrites the logits."""
    if logits.dim() != 2:
        raise UnsupportedError("the peer takes 2 dims")
    return function(logits, target, lse_square_scale=z_loss, **options)


@_adapter("liger", "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
def _linear_cross_entropy(
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
def _attention_varlen(
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
def _attention_decode(
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


# What oneDNN fuses with a product: activation -> its name there, and its algorithm.
_ONEDNN = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}


def _onednn_linear_act(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "fast_gelu",
) -> torch.Tensor:
    """Run oneDNN's product through torch's own op; by default MKL serves float32."""
    post, algorithm = _ONEDNN.get(activation, ("none", ""))
    product = torch.ops.mkldnn._linear_pointwise(input, weight, bias, post, [], algorithm)
    return product if activation in _ONEDNN else ACTIVATIONS[activation](product)


def _onednn_linear_glu(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    *,
    activation: str = "silu",
) -> torch.Tensor:
    """Run oneDNN's products through torch's own op, with all that it fuses."""
    pointwise = torch.ops.mkldnn._linear_pointwise
    fused = _ONEDNN | {"silu": ("swish", "")}
    post, algorithm = fused.get(activation, ("none", ""))
    gate = pointwise(input, gate_weight, None, post, [], algorithm)
    gate = gate if activation in fused else ACTIVATIONS[activation](gate)
    return pointwise.binary(input, gate, up_weight, None, "mul")


def _matmul_add(
    input: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """Run matmul and add the addend, which broadcasts; the scale goes to the operand."""
    product = torch.matmul(batch1 if alpha == 1 else alpha * batch1, batch2)
    return product if beta == 0 else torch.add(product, input, alpha=beta)


def _torch_grouped_mm(
    input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Run torch's own, which wants strides of 16 bytes."""
    return F.grouped_mm(input, weight, offs=offsets)


def _hf_experts() -> dict[str, Experts]:
    """Return label -> experts of transformers: its loop and its ``grouped_mm``; or nothing."""
    try:
        from transformers.integrations.moe import grouped_mm_experts_forward
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    except ImportError:
        return {}
    experts: dict[str, Experts] = {}
    loop = getattr(MixtralExperts.forward, "__wrapped__", None)
    if loop is not None:
        experts["hf_loop"] = functools.partial(_run_hf_experts, loop)
    experts["hf_grouped_mm"] = functools.partial(_run_hf_experts, grouped_mm_experts_forward)
    return experts


def _run_hf_experts(
    experts_forward: Callable[..., torch.Tensor],
    input: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Run the forward of a Mixtral layer's experts: silu, [gate | up], no bias."""
    experts = types.SimpleNamespace(
        num_experts=gate_up.shape[0],
        gate_up_proj=gate_up,
        down_proj=down,
        act_fn=F.silu,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        _apply_gate=_apply_gate,
    )
    return experts_forward(experts, input, ids, weights)


def _apply_gate(z: torch.Tensor) -> torch.Tensor:
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate) * up


def _einsum_experts(
    input: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Let every expert compute every token, and weigh most of it by 0."""
    dense = weights.new_zeros(len(ids), len(gate_up)).scatter(1, ids, weights)
    gate, up = torch.einsum("th,eoh->eto", input, gate_up).chunk(2, -1)
    hidden = F.silu(gate) * up * dense.t().unsqueeze(-1).to(input.dtype)
    return torch.einsum("eti,ehi->th", hidden, down)


def _moe_layer() -> dict[str, Any]:
    experts = {"einsum": _einsum_experts, **_hf_experts()}
    return {name: routed(function) for name, function in experts.items()}


def _by_experts(
    experts: Experts,
    input: torch.Tensor,
    plan: RoutingPlan,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *biases: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    if any(bias is not None for bias in biases):
        raise UnsupportedError("the peer has no biases")
    weights = plan.probs.to(input.dtype)
    return experts(input, plan.expert_ids.long(), weights, w1.mT, w2.mT)


def _moe_mlp() -> dict[str, Any]:
    experts = {"dense_einsum": _einsum_experts, **_hf_experts()}
    return {name: functools.partial(_by_experts, function) for name, function in experts.items()}


def _onednn(function: Callable[..., torch.Tensor]) -> Callable[[], dict[str, Any]]:
    return lambda: {"onednn": function} if torch.backends.mkldnn.is_available() else {}


# Name of an op or a layer -> returns label -> function of its signature. A function may have
# ``devices``, the types of device that it is timed on, and ``overwrites``, as ``Peer`` does.
PEERS: dict[str, Callable[[], dict[str, Any]]] = {
    "add_rms_norm": _add_rms_norm,
    "attention": lambda: {"naive": written_out, **_flash(), **_flex()},
    "attention_decode": _attention_decode,
    "attention_varlen": _attention_varlen,
    "baddbmm": lambda: {"matmul_add": _matmul_add},
    "cross_entropy": _cross_entropy,
    "geglu": _geglu,
    "grouped_mm": lambda: (
        {"torch_grouped_mm": _torch_grouped_mm} if hasattr(F, "grouped_mm") else {}
    ),
    "layer_norm": _layer_norm,
    "linear_act": _onednn(_onednn_linear_act),
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_glu": _onednn(_onednn_linear_glu),
    MOE_LAYER.name: _moe_layer,
    "moe_mlp": _moe_mlp,
    "rms_norm": _rms_norm,
    "rotary_embedding": _rotary_embedding,
    "swiglu": _swiglu,
}
