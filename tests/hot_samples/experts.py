"""Hot samples of mixtures of experts: routing, exchange of rows, experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fusedops.specs import _routing
from fusedops.specs.make import randint, randn
from fusedops.specs.moe_route import distinct
from hot_samples.call import HotCall, ReportCase, deep
from hot_samples.products import TMA_LAYOUTS, average_rows, grouped_weight

_TOKENS = 208
_HIDDEN = 2576  # three blocks of 1024 columns, the last not full
_GROUPS = 64


def _mlp(case: ReportCase) -> HotCall:
    gate = case.get("GATE", "halves")
    hot = case.kernel in ("expert_kernel", "product_kernel")
    average = average_rows(case) if hot else 72
    how = TMA_LAYOUTS.get(case.get("TMA_MODE", "none"), "")
    if not how and hot and case["BLOCK_M"] >= 128:
        # The gradient of the second product's input reads those weights the other way.
        turned = gate == "pairs" or (case.get("GATHERS") and not case["HAS_BIAS"])
        how = "apart across" if turned else "apart"
    elif not how:
        # Which dim of the weights is dense: the experts' own layout in the checkpoints.
        how = "across" if gate == "pairs" or not hot else "along"
    activation = "swiglu_oai" if gate == "pairs" else "silu"
    recompute = bool(case.get("GATHERS") and case.get("HAS_BIAS"))
    tokens = average * _GROUPS // 2
    # Three tiles of columns: twice these in the first product, these in all others.
    hidden = inner = 272
    if case.kernel == "product_kernel" and case["BLOCK_N"] > 128 and not recompute:
        hidden = inner = 528

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        plan = _routing.plan(
            tokens, 2, _GROUPS, device=device, dtype=dtype, pattern="random", key=str(average)
        )
        new = functools.partial(randn, device=device, dtype=dtype)
        weight = functools.partial(grouped_weight, _GROUPS, device=device, dtype=dtype)
        args = (
            new(tokens, hidden),
            plan,
            weight(hidden, 2 * inner, how, "w1"),
            weight(inner, hidden, how, "w2"),
            new(_GROUPS, 2 * inner, scale=0.5, key="b1"),
            new(_GROUPS, hidden, scale=0.5, key="b2"),
        )
        options = {"activation": activation, "interleaved": gate == "pairs"}
        return args, options | {"recompute": recompute}

    name = f"{_GROUPS} experts of {average}, {hidden}x{inner} {gate} {how}"
    name += " recomputed" * recompute
    return HotCall("moe_mlp", name, make)


def _route(case: ReportCase) -> HotCall:
    experts, top_k = case["BLOCK_E"], case["BLOCK_K"]
    every = case.get("CHOICE") == "all" or (top_k == experts and experts > 2)
    tokens = max(_TOKENS, deep(case["BLOCK_T"]))
    options: dict[str, Any] = {"normalize": case["NORMALIZE"]}
    if case["SIGMOID"]:
        options |= {"score": "sigmoid", "num_groups": 8, "topk_groups": 4}
        options |= {"group_score": "top2_sum", "scaling": 2.5}
    if case.get("JITTER"):
        options["jitter"] = 0.01
    if every:
        # Experts choose among tokens: no two logits may be the same.
        top_k, tokens, options = 2, 48, {"expert_choice": True}
    elif experts == 128:
        options["capacity_factor"] = 1.0

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        given = dict(options)
        if case["SIGMOID"]:
            given["bias"] = randn(
                experts, device=device, dtype=torch.float32, scale=0.1, grad=False, key="bias"
            )
        wide = every or experts > 256
        logits = _distinct_of_many if wide else distinct
        return (logits(tokens, experts, device=device, dtype=dtype), top_k), given

    name = " ".join([f"{tokens}x{experts}, {top_k}", *sorted(options)])
    return HotCall("moe_route", name, make, random=bool(case.get("JITTER")))


def _distinct_of_many(
    tokens: int, experts: int, *, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return logits without ties in bfloat16: none in a row, and none at all of up to 4096.

    The values are those of bfloat16 from 8 downwards, 128 to a power of two, with both signs.
    """
    count = tokens * experts
    alone = count <= 4096
    patterns = 130 * 128 - 1 - torch.arange((count if alone else experts) // 2)
    values = patterns.to(torch.int16).view(torch.bfloat16)
    generator = torch.Generator().manual_seed(tokens)
    shape = (1, count) if alone else (tokens, experts)
    order = torch.rand(shape, generator=generator).argsort(-1)
    logits = torch.cat([values, -values])[order].view(tokens, experts)
    return logits.to(device=device, dtype=dtype).requires_grad_()


def _router_loss(case: ReportCase) -> HotCall:
    experts, score = case["BLOCK_E"], "sigmoid" if case["SIGMOID"] else "softmax"
    tokens = max(_TOKENS, deep(case["BLOCK_T"]))

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        ids = _routing.choices("random", tokens, 4, experts, device)[0]
        mask = randint(tokens, high=3, device=device, key="mask") > 0
        options = {"score": score, "balance": 0.5, "z": 0.1, "mask": mask}
        return (randn(tokens, experts, device=device, dtype=dtype), ids), options

    return HotCall("moe_router_loss", f"{tokens}x{experts} {score}", make)


def _sort(case: ReportCase) -> HotCall:
    # The scan walks one number a block of slots: three of its blocks, of 256 slots a number.
    tokens, top_k, experts = 2 * 1024 * 256 // 8 + 48, 8, 48

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        ids = randint(tokens, top_k, high=experts, device=device)
        return (ids, experts), {"kept": randint(tokens, top_k, high=5, device=device) > 0}

    return HotCall("moe_sort", f"{tokens}x{top_k} of {experts}", make)


def _rows(op: str, case: ReportCase) -> HotCall:
    choices = case.get("TOP_K", 2) or 16
    weighted = case.get("WEIGHTED", op == "moe_unpermute")

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        plan = _routing.plan(
            _TOKENS, choices, 64, device=device, dtype=dtype, pattern="dropped", grad=weighted
        )
        count = _TOKENS * (1 if op == "moe_permute" else choices)
        return randn(count, _HIDDEN, device=device, dtype=dtype), plan

    return HotCall(op, f"{_TOKENS}x{choices} rows of {_HIDDEN}", make)


def _relayout(case: ReportCase) -> HotCall:
    def make(device: torch.device, dtype: torch.dtype) -> Any:
        plan = _routing.plan(
            _TOKENS, 4, 16, device=device, dtype=dtype, pattern="dropped", grad=False
        )
        x = randn(_TOKENS * 4, _HIDDEN, device=device, dtype=dtype)
        return (x, plan, "token_major", "capacity"), {"capacity": 48}

    return HotCall("moe_relayout", f"{_TOKENS}x4 rows of {_HIDDEN}", make)


def _pack(case: ReportCase) -> HotCall:
    spans, quantized, choices = case["HAS_SPAN"], case["QUANTIZED"], case["BLOCK_K"]
    hidden = deep(case["BLOCK_N"])

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rows = randn(_TOKENS, hidden, device=device, dtype=dtype, grad=False)
        probs = randn(_TOKENS, choices, device=device, dtype=wide, grad=False, key="probs")
        ids = randint(_TOKENS, choices, high=64, device=device, key="ids").to(torch.int32)
        index = torch.arange(_TOKENS * choices - 1, -1, -3, dtype=torch.int32, device=device)
        count = torch.tensor([index.numel() - 5], dtype=torch.int32, device=device)
        options = {"index": index, "num_rows": count, "span": 8 * spans, "quantized": quantized}
        return (rows, probs, ids), options

    what = f"{'float8' if quantized else 'copy'} {'tokens' if spans else 'slots'}"
    return HotCall("moe_pack", f"{_TOKENS}x{hidden} {what}", make)


def _unpack(case: ReportCase) -> HotCall:
    hidden = deep(case["BLOCK_N"])

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        from fusedops.ops import moe_pack

        host = torch.device("cpu")
        x = randn(_TOKENS, hidden, device=host, dtype=torch.float32, grad=False)
        probs = torch.ones(_TOKENS, 2)
        payload = moe_pack(x, probs, quantized=True).to(device)
        return payload, probs.to(device), torch.empty(0, hidden, device=device, dtype=dtype)

    return HotCall("moe_unpack", f"{_TOKENS}x{hidden}", make)


CALLS: dict[str, Callable[[ReportCase], HotCall]] = {
    "moe_mlp": _mlp,
    "moe_pack": _pack,
    "moe_permute": functools.partial(_rows, "moe_permute"),
    "moe_relayout": _relayout,
    "moe_route": _route,
    "moe_router_loss": _router_loss,
    "moe_sort": _sort,
    "moe_unpack": _unpack,
    "moe_unpermute": functools.partial(_rows, "moe_unpermute"),
}
