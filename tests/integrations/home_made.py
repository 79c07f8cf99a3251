"""Modules as users write them: every way to write a norm or a feed-forward layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 32


class Scaled(nn.Module):
    """The parameters of a norm."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None
        self.eps = 1e-5
        self.add_unit_offset = False


class TorchtitanRMSNorm(Scaled):
    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class LitgptRMSNorm(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=-1, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + self.eps)
        weight = (1 + self.weight.float()) if self.add_unit_offset else self.weight.float()
        return (x_normed * weight).to(dtype=dtype)


class DividingRMSNorm(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        scale = torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * (wide / scale).to(x.dtype)


class PlainRMSNorm(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class NoWeightRMSNorm(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.size(-1),))


class OpenClipLayerNorm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        orig_type = x.dtype
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.to(orig_type)


class NanoGPTLayerNorm(Scaled):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


def in_low_precision(x: torch.Tensor, *options: Any) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        x = x.to(torch.get_autocast_dtype("cpu"))
    with torch.autocast("cpu", enabled=False):
        return F.layer_norm(x, *options)


class ChoosingLayerNorm(nn.LayerNorm):
    """Calls a function that asks for autocast on one way, and ``F.layer_norm`` on the other."""

    in_low_precision = False

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = self.normalized_shape, self.weight, self.bias, self.eps
        if self.in_low_precision:
            return in_low_precision(x, *options)
        return F.layer_norm(x, *options)


class FormulaLayerNorm(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight


class OptionalScaleNorm(Scaled):
    def __init__(self, *, scale: bool = True) -> None:
        super().__init__()
        if not scale:
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )
        if self.weight is not None:
            normed = normed * self.weight
        return normed


class RoundedTwiceRMSNorm(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return (normed * self.weight).to(x.dtype)


class SizedRMSNorm(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.dim = WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.dim,), self.weight, self.eps)


class ShapedRMSNorm(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class ConstantLayerNorm(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), self.weight, None, self.eps)


NORMS: dict[str, tuple[type[nn.Module], str]] = {
    "torchtitan": (TorchtitanRMSNorm, "rms_norm"),
    "litgpt": (LitgptRMSNorm, "rms_norm"),
    "dividing": (DividingRMSNorm, "rms_norm"),
    "functional": (PlainRMSNorm, "rms_norm"),
    "no weight": (NoWeightRMSNorm, "rms_norm"),
    "rounded twice": (RoundedTwiceRMSNorm, "rms_norm"),
    "optional scale": (OptionalScaleNorm, "rms_norm"),
    "open_clip": (OpenClipLayerNorm, "layer_norm"),
    "two ways": (ChoosingLayerNorm, "layer_norm"),
    "nanogpt": (NanoGPTLayerNorm, "layer_norm"),
    "formula": (FormulaLayerNorm, "layer_norm"),
    "size of an attribute": (SizedRMSNorm, "rms_norm"),
    "last of the shape": (ShapedRMSNorm, "rms_norm"),
    "constant size": (ConstantLayerNorm, "layer_norm"),
}


def feed_forward(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 48), activation, nn.Linear(48, 8))


class NanoGPTMLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 48)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(48, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        x = self.dropout(x)
        return x


class TimmMlp(nn.Module):
    def __init__(self, dropout: float = 0.0, activation: Any = nn.GELU) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 48)
        self.act = activation()
        self.drop1 = nn.Dropout(dropout)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(48, WIDTH)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


class Configuration:
    gelu_approximate = "tanh"


class LitgptMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, 48)
        self.proj = nn.Linear(48, WIDTH)
        self.config = Configuration()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        x = F.gelu(x, approximate=self.config.gelu_approximate)
        return self.proj(x)


class TorchtitanFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 48, bias=False)
        self.w2 = nn.Linear(48, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PackedSwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w12 = nn.Linear(WIDTH, 96)
        self.w3 = nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1, x2 = self.w12(x).chunk(2, dim=-1)
        hidden = F.silu(x1) * x2
        return self.w3(hidden)


class SplitSwiGLU(PackedSwiGLU):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = 48

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w12(x).split(self.hidden, dim=-1)
        return self.w3(F.silu(gate) * up)


class SquaredReLUMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 48)
        self.down = nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square())


class ConvertedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 48)
        self.down = nn.Linear(48, WIDTH)
        self.p = 0.5

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x)).square()
        return F.dropout(self.down(hidden), p=self.p, training=self.training) + residual


FEED_FORWARDS: dict[str, tuple[type[nn.Module], str]] = {
    "nanogpt": (NanoGPTMLP, "mlp"),
    "timm": (TimmMlp, "mlp"),
    "litgpt": (LitgptMLP, "mlp"),
    "torchtitan": (TorchtitanFeedForward, "linear_glu"),
    "packed": (PackedSwiGLU, "swiglu"),
    "split": (SplitSwiGLU, "swiglu"),
    "squared ReLU": (SquaredReLUMLP, "mlp"),
}


class NanoGPTAttention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (tensor.view(B, T, 4, C // 4).transpose(1, 2) for tensor in (q, k, v))
        dropout = self.dropout if self.training else 0
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class RotatedAttention(NanoGPTAttention):
    """Under autocast, queries and keys are float32, because the tables are, and values are not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        angles = torch.arange(x.shape[1])[:, None] / 10 ** torch.arange(q.shape[-1] // 2)
        cos, sin = (table.repeat(1, 2) for table in (angles.cos(), angles.sin()))
        dtype = torch.promote_types(x.dtype, torch.float32)
        q, k = (self.rotate(t, cos.to(dtype), sin.to(dtype)) for t in (q, k))
        if not torch.is_autocast_enabled("cpu"):
            q, k = q.type_as(v), k.type_as(v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin


class LitgptAttention(NanoGPTAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        y = self.scaled_dot_product_attention(q, k, v, mask)
        return self.c_proj(y.reshape(rows, length, width))

    def scaled_dot_product_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, scale=0.3)
        return y.transpose(1, 2)


class OneHeadOfKeys(NanoGPTAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], None, 0.0, True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masks = {
            name: value.to(x.dtype) if value.is_floating_point() else value
            for name, value in self.options.items()
            if isinstance(value, torch.Tensor)
        }
        result: torch.Tensor = self.inner(x, x, x, **(self.options | masks))[0]
        return result
