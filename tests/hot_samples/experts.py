"""Hot samples of mixtures of experts: routing, exchange of rows, experts."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.specs import _routing
from fusedops.specs.make import randint
from fusedops.specs.moe_route import distinct
from hot_samples import products
from hot_samples.call import HotCall, New, in_float32

_TOKENS = 208
_HIDDEN = 2576  # three blocks of 1024 columns, the last not full
_PACKED = 2 * 2048 + 1024  # three blocks of 2048 columns


def _plan(new: New, tokens: int, choices: int, experts: int, **options: Any) -> Any:
    where = {"device": new.device, "dtype": new.dtype}
    return _routing.plan(tokens, choices, experts, **where, **options)


def _mlp(average: int, how: str, *, size: int = 272, gate: str = "halves", recompute: bool = False):  # type: ignore[no-untyped-def]
    """Return experts of so many rows; 272 columns are three tiles, 528 of the widest."""
    pairs = gate == "pairs"

    def make(new: New) -> Any:
        groups = products.GROUPS
        tokens = average * groups // 2
        plan = _plan(new, tokens, 2, groups, pattern="random", key=str(average))
        args = (
            new(tokens, size),
            plan,
            products.grouped_weight(new, size, 2 * size, how, "w1"),
            products.grouped_weight(new, size, size, how, "w2"),
            new(groups, 2 * size, scale=0.5, key="b1"),
            new(groups, size, scale=0.5, key="b2"),
        )
        options = {"activation": "swiglu_oai" if pairs else "silu", "interleaved": pairs}
        return args, options | {"recompute": recompute}

    name = f"{products.GROUPS} experts of {average}, {size}x{size} {gate} {how}"
    return HotCall("moe_mlp", name + " recomputed" * recompute, make)


def _route(experts: int, top_k: int, *, tokens: int = _TOKENS, **options: Any) -> HotCall:
    def make(new: New) -> Any:
        given = dict(options)
        if options.get("score") == "sigmoid":
            given["bias"] = new(experts, dtype=torch.float32, scale=0.1, grad=False, key="bias")
        # Experts choose among tokens: no two logits may be the same.
        many = experts > 256 or "expert_choice" in options
        logits = (_distinct_of_many if many else distinct)(
            tokens, experts, device=new.device, dtype=new.dtype
        )
        return (logits, top_k), given

    name = " ".join([f"{tokens}x{experts}, {top_k}", *sorted(options)])
    return HotCall("moe_route", name, make, random="jitter" in options)


def _distinct_of_many(
    tokens: int, experts: int, *, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return logits of bfloat16's values: no two in a row are the same, or none of up to 4096."""
    count = tokens * experts
    alone = count <= 4096
    patterns = 130 * 128 - 1 - torch.arange((count if alone else experts) // 2)
    values = patterns.to(torch.int16).view(torch.bfloat16)
    generator = torch.Generator().manual_seed(tokens)
    shape = (1, count) if alone else (tokens, experts)
    order = torch.rand(shape, generator=generator).argsort(-1)
    logits = torch.cat([values, -values])[order].view(tokens, experts)
    return logits.to(device=device, dtype=dtype).requires_grad_()


def _router_loss(experts: int, score: str) -> HotCall:
    def make(new: New) -> Any:
        ids = _routing.choices("random", _TOKENS, 4, experts, new.device)[0]
        mask = randint(_TOKENS, high=3, device=new.device, key="mask") > 0
        options = {"score": score, "balance": 0.5, "z": 0.1, "mask": mask}
        return (new(_TOKENS, experts), ids), options

    return HotCall("moe_router_loss", f"{_TOKENS}x{experts} {score}", make)


def _sort() -> HotCall:
    # The scan walks one number a block of slots: three of its blocks, of 256 slots a number.
    tokens, top_k, experts = 2 * 1024 * 256 // 8 + 48, 8, 48

    def make(new: New) -> Any:
        ids = randint(tokens, top_k, high=experts, device=new.device)
        return (ids, experts), {"kept": randint(tokens, top_k, high=5, device=new.device) > 0}

    return HotCall("moe_sort", f"{tokens}x{top_k} of {experts}", make)


def _rows(op: str, choices: int, *, learns: bool = False) -> HotCall:
    def make(new: New) -> Any:
        plan = _plan(new, _TOKENS, choices, 64, pattern="dropped", grad=learns)
        count = _TOKENS * (1 if op == "moe_permute" else choices)
        return new(count, _HIDDEN), plan

    return HotCall(op, f"{_TOKENS}x{choices} rows of {_HIDDEN}", make)


def _relayout(new: New) -> Any:
    plan = _plan(new, _TOKENS, 4, 16, pattern="dropped", grad=False)
    return (new(_TOKENS * 4, _HIDDEN), plan, "token_major", "capacity"), {"capacity": 48}


def _pack(spans: bool, quantized: bool) -> HotCall:
    choices = 8

    def make(new: New) -> Any:
        wide = torch.float64 if new.dtype == torch.float64 else torch.float32
        probs = new(_TOKENS, choices, dtype=wide, grad=False, key="probs")
        ids = randint(_TOKENS, choices, high=64, device=new.device, key="ids").to(torch.int32)
        index = torch.arange(_TOKENS * choices - 1, -1, -3, dtype=torch.int32, device=new.device)
        count = torch.tensor([index.numel() - 5], dtype=torch.int32, device=new.device)
        options = {"index": index, "num_rows": count, "span": 8 * spans, "quantized": quantized}
        return (new(_TOKENS, _PACKED, grad=False), probs, ids), options

    what = f"{'float8' if quantized else 'copy'} {'tokens' if spans else 'slots'}"
    return HotCall("moe_pack", f"{_TOKENS}x{_PACKED} {what}", make)


def _unpack(new: New) -> Any:
    from fusedops.ops import moe_pack

    x = New(torch.device("cpu"), torch.float32)(_TOKENS, _PACKED, grad=False)
    probs = torch.ones(_TOKENS, 2)
    payload = moe_pack(x, probs, quantized=True).to(new.device)
    return (
        payload,
        probs.to(new.device),
        torch.empty(0, _PACKED, device=new.device, dtype=new.dtype),
    )


_SIGMOID = {"score": "sigmoid", "num_groups": 8, "topk_groups": 4, "group_score": "top2_sum"}
CALLS: dict[str, list[HotCall]] = {
    "moe_mlp": [
        *(_mlp(rows, "along", recompute=again) for rows in (16, 64) for again in (False, True)),
        *(_mlp(rows, "across", gate="pairs") for rows in (16, 64, 72)),
        *(_mlp(72, how, size=528) for how in ("apart", "along", "across", "apart across")),
        *(
            _mlp(72, how, recompute=again)
            for how in ("apart", "along", "across")
            for again in (False, True)
        ),
        *(_mlp(72, how, gate="pairs") for how in ("along", "apart across")),
        *in_float32(
            *(_mlp(72, how) for how in ("along", "across")),
            _mlp(72, "along", recompute=True),
            _mlp(72, "across", gate="pairs"),
        ),
    ],
    "moe_route": [
        _route(8, 2, normalize=True),
        _route(128, 8, normalize=False, capacity_factor=1.0),
        _route(64, 8, normalize=True, jitter=0.01),
        _route(256, 8, normalize=True),
        _route(256, 8, normalize=True, scaling=2.5, **_SIGMOID),
        _route(64, 2, tokens=48, expert_choice=True),
        _route(4096, 8, normalize=False),
    ],
    "moe_router_loss": [
        *(_router_loss(experts, "softmax") for experts in (8, 64)),
        *(_router_loss(experts, "sigmoid") for experts in (256, 4096)),
    ],
    "moe_sort": [_sort()],
    "moe_permute": [_rows("moe_permute", choices) for choices in (2, 8, 16)],
    "moe_unpermute": [_rows("moe_unpermute", choices, learns=True) for choices in (2, 8, 16)],
    "moe_relayout": [HotCall("moe_relayout", f"{_TOKENS}x4 rows of {_HIDDEN}", _relayout)],
    "moe_pack": [_pack(spans, quantized) for quantized in (False, True) for spans in (False, True)],
    "moe_unpack": [HotCall("moe_unpack", f"{_TOKENS}x{_PACKED}", _unpack)],
}
