"""What tests, benchmarks and documentation need to know of ``rotary_embedding``."""

from __future__ import annotations

import functools

import torch

from fusedops.ops.rotary_embedding import rotary_embedding
from fusedops.specs import depth
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _rotate_every_two(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _eager(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply what Hugging Face's models write: Llama's chain, GPT-J's with ``interleaved``."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    turn = _rotate_every_two if interleaved else _rotate_half
    rotary_dim = cos.shape[-1]

    def apply(x: torch.Tensor) -> torch.Tensor:
        if rotary_dim == x.shape[-1]:
            return ((x * cos) + (turn(x) * sin)).to(x.dtype)
        part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        return torch.cat((((part * cos) + (turn(part) * sin)).to(x.dtype), rest), dim=-1)

    return apply(query), apply(key)


def _tables(
    new: TensorFactory, *shape: int, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of ``[..., seq_len, rotary_dim]`` as Hugging Face computes them."""
    *entries, length, rotary_dim = shape
    device = new.device
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim)
    position = torch.arange(length, device=device).float()
    for entry in reversed(entries):
        first = 3.0 * torch.arange(entry, device=device)
        position = position + first.reshape(-1, *(1 for _ in position.shape))
    angle = position.unsqueeze(-1) * frequency
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    return angle.cos().to(new.dtype), angle.sin().to(new.dtype)


def _samples(new: TensorFactory) -> list[Sample]:
    tables = functools.partial(_tables, new)
    heads = new(2, 5, 3, 8).detach()
    view = heads.transpose(1, 2).requires_grad_()
    turned = functools.partial(tables, interleaved=True)
    interleaved = {"interleaved": True}
    wide, pair = (new(2, 3, 5, 20), new(2, 1, 5, 20)), (new(2, 1, 4, 12), new(2, 2, 4, 12))

    def free(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables that are no cosines and sines: every element counts on its own."""
        return new(*shape, grad=False, key="cos"), new(*shape, grad=False, key="sin")

    return [
        Sample("dense", (new(5, 2, 6, 8), new(5, 2, 6, 8, key="k"), *tables(6, 8))),
        Sample("interleaved", (new(4, 2, 3, 8), new(4, 1, 3, 8), *turned(1, 3, 8)), interleaved),
        Sample("grouped", (new(2, 6, 7, 16), new(2, 2, 7, 16), *tables(2, 7, 16))),
        Sample("transposed_view", (view, new(2, 1, 5, 8), *tables(1, 5, 8))),
        Sample("partial", (*wide, *tables(5, 6))),
        Sample("partial_interleaved", (*wide, *turned(2, 5, 6)), interleaved),
        Sample("odd_sizes", (new(1, 3, 19, 46), new(1, 1, 19, 46), *tables(1, 19, 34))),
        Sample("free_tables", (*pair, *free(2, 4, 10))),
        Sample("free_tables_interleaved", (*pair, *free(2, 4, 10)), interleaved),
        Sample("wide_heads", (new(1, 2, 3, 256), new(1, 2, 3, 256), *tables(1, 3, 256))),
        Sample("one_pair", (new(1, 1, 1, 2), new(1, 1, 1, 2, key="k"), *tables(1, 2))),
        Sample("no_batch", (new(0, 2, 3, 8), new(0, 1, 3, 8), *tables(1, 3, 8))),
        Sample("no_positions", (new(2, 2, 0, 8), new(2, 1, 0, 8), *tables(2, 0, 8))),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    q, k = torch.randn(2, 4, 3, 8, device=device), torch.randn(2, 2, 3, 8, device=device)
    cos, sin = torch.randn(2, 3, 8, device=device), torch.randn(2, 3, 8, device=device)
    odd = torch.randn(3, 5, device=device)
    bad = bad_changes(query=q, key=k, cos=cos, sin=sin)
    return [
        bad("query_dims", "query", "3 dimensions", query=q[0]),
        bad("key_dims", "key", "[2, 3, 8]", key=k[0]),
        bad("key_length", "key", "[2, 2, 2, 8]", key=k[:, :, :2]),
        bad("cos_dims", "cos", "1 dimensions", cos=cos[0, 0]),
        bad("cos_length", "cos", "[2, 2, 8]", cos=cos[:, :2]),
        bad("sin_shape", "sin", "[2, 3, 4]", sin=sin[..., :4]),
        bad("sin_batch", "sin", "[1, 3, 8]", sin=sin[:1]),
        bad("odd_table", "cos", "even", "5", cos=odd, sin=odd),
        bad("wide_table", "cos", "8", query=q[..., :4], key=k[..., :4]),
    ]


def _case(
    batch: int, length: int, heads: int, key_heads: int, head_dim: int, *, interleaved: bool = False
) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        def view(num: int) -> torch.Tensor:
            made = new(batch, length, num, head_dim, grad=False)
            return made.transpose(1, 2).requires_grad_()

        tables = _tables(new, 1, length, head_dim, interleaved=interleaved)
        arguments = (view(heads), view(key_heads), *tables)
        return Sample("bench", arguments, {"interleaved": interleaved})

    elements = batch * length * (heads + key_heads) * head_dim
    form = " interleaved" if interleaved else ""
    label = f"{batch}x{length}, {heads}+{key_heads} heads of {head_dim}{form}"
    return BenchCase.moving(label, make, (2 * elements, 2 * elements))


SPEC = describe(rotary_embedding, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(2, 2048, 32, 8, 128).headlined(),
        _case(2, 2048, 32, 8, 128, interleaved=True),
        _case(8, 1024, 12, 12, 64),
        _case(1, 1, 32, 8, 128),
    ),
    summary="rotary position embedding of query and key, half or interleaved, partial",
    autocast="keep",
    depth=depth.elementwise,
    limits=("Gradients of cos and sin come from the eager reference.",),
)
