"""What tests, benchmarks and documentation need to know of ``scaled_masked_softmax``."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from fusedops.ops.scaled_masked_softmax import scaled_masked_softmax
from fusedops.specs import depth
from fusedops.specs.make import TensorFactory, common_offset, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
) -> torch.Tensor:
    """Apply what eager attention in Hugging Face's models does: softmax in float32, rounded."""
    scores = input * scale
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, -torch.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return torch.softmax(scores, dim=-1, dtype=wide).to(input.dtype)


def _not_finite(
    input: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    masks_by: str,
) -> torch.Tensor:
    """Mask by ``"filling"`` or by ``"adding"`` -inf; where nothing is left there is no gradient.

    In a row with NaN what was filled has a gradient of 0, what was added to has NaN. Both multiply
    the incoming gradient of what was masked by 0; by ``"skipping"`` it is not read.
    """
    kept = torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device)
    kept = kept.tril() if is_causal else kept
    scores = input * scale
    if mask is not None and mask.dtype == torch.bool:
        kept = kept & mask
    elif mask is not None:
        scores = scores + mask
    hidden = torch.zeros_like(kept, dtype=scores.dtype).masked_fill(~kept, -torch.inf)
    adds = masks_by == "adding"
    scores = scores + hidden if adds else scores.masked_fill(~kept, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1, dtype=wide)
    if masks_by == "skipping":
        weights = torch.where(kept, weights, weights.detach())
    return weights.masked_fill(empty, 0.0).to(input.dtype)


def _keep(new: TensorFactory, *shape: int) -> torch.Tensor:
    """Return a boolean mask that leaves something in every row, causal or not."""
    kept = new(*shape, dtype=torch.float32, grad=False, key="keep") > 0
    kept[..., 0] = True
    return kept


def _samples(new: TensorFactory) -> list[Sample]:
    keep = functools.partial(_keep, new)
    hidden = new(3, 1, 5, 21, grad=False, key="hidden")
    hidden = hidden.masked_fill(~keep(3, 1, 5, 21), -torch.inf)
    return [
        Sample("additive", (new(5, 2, 4, 9, scale=2.0), new(4, 9)), {"scale": 0.3}),
        Sample("plain", (new(7, 33, scale=3.0),)),
        Sample("extremes", (with_extremes(new(2, 5, 33)), None, 0.5)),
        Sample("extremes_additive", (new(2, 5, 33), with_extremes(new(5, 33, key="mask")))),
        Sample("offset", (new(7, 33, shift=common_offset(new.dtype)),)),
        Sample("offset_long", (new(2, 2, 17001, shift=-common_offset(new.dtype)), None, 2.0**-8)),
        Sample("no_mask", (new(2, 3, 5, 37), None, 0.125)),
        Sample("causal", (new(2, 3, 6, 6), None, 0.5, True)),
        Sample("causal_more_keys", (new(2, 4, 19), None, 1.0, True)),
        Sample("causal_more_queries", (new(2, 9, 5), None, 1.0, True)),
        Sample("keep_per_batch", (new(3, 2, 5, 21), keep(3, 1, 5, 21), 0.7)),
        Sample("keep_keys", (new(3, 2, 5, 21), keep(3, 1, 1, 21), 0.7)),
        Sample("keep_heads", (new(3, 2, 5, 21), keep(1, 2, 1, 21))),
        Sample("keep_and_causal", (new(2, 3, 5, 17), keep(5, 17)), {"is_causal": True}),
        Sample("additive_with_infinities", (new(3, 2, 5, 21), hidden, 0.7)),
        Sample("additive_whole", (new(3, 2, 5, 7), new(3, 2, 5, 7, key="mask"))),
        Sample("additive_per_head", (new(3, 2, 5, 7), new(2, 1, 7, key="mask"))),
        Sample("additive_per_row", (new(3, 2, 5, 7), new(3, 1, 5, 1, key="mask"))),
        Sample("additive_scalar", (new(3, 7), new(key="mask"))),
        Sample("additive_over_many_rows", (new(3, 70, 2, 5), new(2, 5, key="mask"))),
        Sample("additive_causal", (new(2, 2, 5, 7), new(1, 2, 5, 7, key="mask"), 1.5, True)),
        Sample("odd_dims", (new(2, 2, 2, 2, 2, 3), new(2, 1, 2, 1, 3, key="mask"))),
        Sample("one_key", (new(2, 3, 1), new(3, 1, key="mask"))),
        Sample("long_rows", (new(2, 2, 17001), new(17001, key="mask"), 2.0)),
        Sample("no_rows", (new(0, 3, 5), new(3, 5, key="mask"))),
        Sample("no_keys", (new(2, 3, 0),)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x = torch.randn(2, 3, 8, device=device)
    keep = torch.ones(3, 8, dtype=torch.bool, device=device)
    bad = bad_changes(input=x)
    return [
        bad("vector", "input", "2 dimensions", "1", input=x[0, 0]),
        bad("mask_shape", "mask", "[2, 3, 8]", "[3, 7]", mask=keep[:, :7]),
        bad("mask_dims", "mask", "[1, 3, 8]", input=x[0], mask=keep[None]),
    ]


def _case(batch: int, heads: int, length: int, mask: str | None = None) -> BenchCase:
    """Return a size; ``mask`` is ``None``, ``"causal"``, ``"keep"`` or ``"additive"``."""
    shape = (batch, heads, length, length)
    size, of_mask = math.prod(shape), math.prod(shape) // heads

    def make(new: TensorFactory) -> tuple[Any, ...]:
        keep = _keep(new, batch, 1, length, length)
        hidden = torch.zeros_like(keep, dtype=new.dtype).masked_fill(~keep, -torch.inf)
        given = {"keep": keep, "additive": hidden}.get(mask or "")
        return new(*shape), given, 1 / math.sqrt(64), mask == "causal"

    # Of a causal row the seen part is read.
    read = size // 2 if mask == "causal" else size + of_mask * (mask == "additive")
    label = f"{batch}x{heads}x{length}x{length}" + (f" {mask}" if mask else "")
    extra = (of_mask * (mask == "keep"), 0)
    return BenchCase.moving(label, make, (size + read, 3 * size), extra=extra)


def _from_opinfo(
    input: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Torch's samples name a dim: here it is the last of at least two."""
    (dim,) = args or (kwargs.get("dim"),)
    if input.dim() < 2 or dim not in (-1, input.dim() - 1) or kwargs.get("dtype") is not None:
        return None
    return (input,), {}


SPEC = describe(scaled_masked_softmax, _eager, _samples, _bad_inputs, _case)(
    non_finite=tuple(
        functools.partial(_not_finite, masks_by=way) for way in ("filling", "adding", "skipping")
    ),
    bench_cases=(
        _case(2, 12, 1024, "keep").headlined(),
        _case(2, 12, 1024, "causal"),
        _case(2, 12, 1024, "additive"),
        _case(2, 12, 1024),
        _case(1, 2, 16, "keep"),
    ),
    summary="scale, mask (boolean, additive, causal) and softmax of attention scores",
    autocast="keep",
    depth=depth.of_rows(depth.last_dim),
    opinfo=("softmax",),
    from_opinfo=_from_opinfo,
)
