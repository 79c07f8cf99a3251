"""``TransformerEncoderLayer`` and ``TransformerDecoderLayer``: torch's layers on the fused ops.

Dropout, residual sum and the norm that follows are one pass (``add_layer_norm``); the feed-forward
layer is one op (``mlp``) unless a dropout acts inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusedops.nn.multihead_attention import MultiheadAttention, check_inputs
from fusedops.ops.add_layer_norm import add_layer_norm
from fusedops.ops.bias_dropout_add import bias_dropout_add
from fusedops.ops.layer_norm import layer_norm
from fusedops.ops.linear_act import linear_act
from fusedops.ops.mlp import mlp

_FUNCTIONS: dict[Any, str] = {
    torch.relu: "relu",
    nn.functional.relu: "relu",
    nn.functional.gelu: "gelu",
    nn.functional.silu: "silu",
}


class _Layer(nn.Module):
    """What both layers do with a branch's output."""

    linear1: nn.Linear
    linear2: nn.Linear
    dropout: nn.Dropout
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for child in self.children():
            if isinstance(child, nn.MultiheadAttention):
                # The same parameters, drawn as torch draws them, under our forward.
                child.__class__ = MultiheadAttention

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward layer's output, its last dropout aside."""
        name = _activation_name(self.activation)
        first, second = self.linear1, self.linear2
        drops = self.dropout.training and self.dropout.p > 0.0
        if name is not None and not drops:
            return mlp(x, first.weight, first.bias, second.weight, second.bias, activation=name)
        hidden = linear_act(x, first.weight, first.bias, activation=name or "identity")
        if name is None:
            hidden = self.activation(hidden)
        return linear_act(self.dropout(hidden), second.weight, second.bias, activation="identity")


def _activation_name(activation: Any) -> str | None:
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if isinstance(activation, nn.ReLU):
        return "relu"
    if isinstance(activation, nn.SiLU):
        return "silu"
    return None if isinstance(activation, nn.Module) else _FUNCTIONS.get(activation)


def _attend(
    attention: nn.MultiheadAttention, queries: torch.Tensor, keys: torch.Tensor, *masks: Any
) -> torch.Tensor:
    mask, key_padding_mask, is_causal = masks
    options = {"need_weights": False, "attn_mask": mask, "is_causal": is_causal}
    output, _ = attention(queries, keys, keys, key_padding_mask, **options)
    return output


def _arguments(norm: nn.LayerNorm) -> tuple[Any, ...]:
    return norm.normalized_shape, norm.weight, norm.bias, norm.eps


def _norm(x: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    return layer_norm(x, *_arguments(norm))


def _add_norm(
    branch: torch.Tensor, stream: torch.Tensor, dropout: nn.Dropout, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    options: dict[str, Any] = {"dropout_p": dropout.p, "training": dropout.training}
    return add_layer_norm(branch, stream, *_arguments(norm), **options)


def _add(branch: torch.Tensor, stream: torch.Tensor, dropout: nn.Dropout) -> torch.Tensor:
    return bias_dropout_add(branch, None, stream, dropout.p, dropout.training)


class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """Apply self-attention and a feed-forward layer: ``torch.nn.TransformerEncoderLayer``.

    Constructor arguments, initialisation and state_dict are torch's.

    Args:
        d_model: size of the residual stream.
        nhead: number of heads; divides ``d_model``.
        dim_feedforward: size of the feed-forward layer's hidden layer.
        dropout: probability with which attention weights, hidden values and branches are dropped.
        activation: ``"relu"``, ``"gelu"`` or a callable; unknown callables run unfused.
        layer_norm_eps: added to the variance.
        batch_first: whether inputs are ``[N, L, E]`` rather than ``[L, N, E]``.
        norm_first: normalise before each branch instead of after the residual sum.
        bias: whether products and norms have biases.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        RuntimeError: ``activation`` is another string, as torch's.
        ValueError: a shape does not fit.

    Note:
        Nested tensors run torch's own forward. Numerics and backends are those of the ops; dropout
        draws other random numbers than torch.

    Reference:
        Vaswani et al.: Attention Is All You Need, arXiv:1706.03762; Xiong et al. (``norm_first``),
        arXiv:2002.04745.

    Example:
        >>> import torch, fusedops
        >>> layer = fusedops.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> layer(torch.ones(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Return the layer's output, with the shape of ``src``; masks as in torch."""
        masks = {"src_mask": src_mask, "src_key_padding_mask": src_key_padding_mask}
        check_inputs("TransformerEncoderLayer", {"src": src}, masks, is_causal=is_causal)
        if src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)

        x = src
        normed = _norm(x, self.norm1) if self.norm_first else x
        attended = _attend(
            self.self_attn, normed, normed, src_mask, src_key_padding_mask, is_causal
        )
        if self.norm_first:
            normed, x = _add_norm(attended, x, self.dropout1, self.norm2)
            return _add(self._feed_forward(normed), x, self.dropout2)
        x, _ = _add_norm(attended, x, self.dropout1, self.norm1)
        return _add_norm(self._feed_forward(x), x, self.dropout2, self.norm2)[0]


class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """Apply self-attention, cross-attention and a feed-forward layer, as torch's layer.

    Constructor arguments, initialisation and state_dict are ``torch.nn.TransformerDecoderLayer``'s.

    Args:
        args: those of :class:`TransformerEncoderLayer`, in the same order.
        kwargs: likewise.

    Raises:
        RuntimeError: ``activation`` is another string, as torch's.
        ValueError: a shape does not fit.

    Note:
        As ``TransformerEncoderLayer``.

    Reference:
        Vaswani et al.: Attention Is All You Need, arXiv:1706.03762.

    Example:
        >>> import torch, fusedops
        >>> layer = fusedops.nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
        >>> layer(torch.ones(1, 3, 8), torch.ones(1, 5, 8)).shape
        torch.Size([1, 3, 8])
    """

    def forward(
        self,
        tgt: torch.Tensor,
        memory: torch.Tensor,
        tgt_mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        tgt_key_padding_mask: torch.Tensor | None = None,
        memory_key_padding_mask: torch.Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> torch.Tensor:
        """Return the layer's output, with the shape of ``tgt``; masks as in torch."""
        masks = {"tgt_mask": tgt_mask, "memory_mask": memory_mask}
        masks["tgt_key_padding_mask"] = tgt_key_padding_mask
        masks["memory_key_padding_mask"] = memory_key_padding_mask
        flags = {"tgt_is_causal": tgt_is_causal, "memory_is_causal": memory_is_causal}
        check_inputs("TransformerDecoderLayer", {"tgt": tgt, "memory": memory}, masks, **flags)

        of_memory = (memory, memory_mask, memory_key_padding_mask, memory_is_causal)
        x = tgt
        normed = _norm(x, self.norm1) if self.norm_first else x
        attended = _attend(
            self.self_attn, normed, normed, tgt_mask, tgt_key_padding_mask, tgt_is_causal
        )
        if self.norm_first:
            normed, x = _add_norm(attended, x, self.dropout1, self.norm2)
            attended = _attend(self.multihead_attn, normed, *of_memory)
            normed, x = _add_norm(attended, x, self.dropout2, self.norm3)
            return _add(self._feed_forward(normed), x, self.dropout3)
        x, _ = _add_norm(attended, x, self.dropout1, self.norm1)
        attended = _attend(self.multihead_attn, x, *of_memory)
        x, _ = _add_norm(attended, x, self.dropout2, self.norm2)
        return _add_norm(self._feed_forward(x), x, self.dropout3, self.norm3)[0]
