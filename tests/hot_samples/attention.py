"""Hot samples of attention: dense batches, packed sequences, decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from fusedops.specs.make import randn
from hot_samples.call import HotCall, ReportCase

# Three blocks of 128 queries and of keys, and one that is not full.
_TOKENS = 400
_BATCH, _HEADS = 2, 4


def _dense(case: ReportCase) -> HotCall:
    if case.kernel == "delta_kernel":
        size = case["VALUE_DIM"]
        return HotCall("attention", f"D{size} causal, lse", functools.partial(_lse, size))
    size, group = case["HEAD_DIM"], case["GROUP"]
    left, additive = case["LEFT"], case["MASK"] == "add"
    softcap, alibi = case["SOFTCAP"], case["ALIBI"]
    drops = case["DROPOUT"] != "none"
    sinks = case.get("SINKS", left)
    # What one kernel's case does not say, the others' cases of the same options do.
    alike = f"D{size} of {_HEADS // group}"
    flags = {"window": left, "bias": additive, "soft-cap": softcap, "alibi": alibi}
    flags |= {"sinks": sinks, "dropout": drops, "by pointers": _by_pointers(case)}

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        new = functools.partial(randn, device=device, dtype=dtype)
        wide = functools.partial(randn, device=device, dtype=torch.float32)

        def heads(count: int, key: str) -> torch.Tensor:
            # Laid out as a projection leaves it; read by pointers where a batch is broadcast.
            batch = 1 if flags["by pointers"] else _BATCH
            made = new(batch, _TOKENS, count, size, grad=False, key=key).transpose(1, 2)
            return made.expand(_BATCH, -1, -1, -1).requires_grad_()

        q, k, v = heads(_HEADS, "q"), heads(_HEADS // group, "k"), heads(_HEADS // group, "v")
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": group > 1}
        if left:
            options["window"] = (150, -1)
        if softcap:
            options["softcap"] = 10.0
        if alibi:
            options["alibi_slopes"] = 2.0 ** -torch.arange(1, _HEADS + 1, device=device)
        if sinks:
            options["sinks"] = wide(_HEADS, key="sinks")
        if additive:
            options["attn_mask"] = new(1, _HEADS, _TOKENS, _TOKENS, key="bias")
        if drops:
            options["dropout_p"] = 0.1
        return (q, k, v), options

    name = ", ".join([alike, *(flag for flag, present in flags.items() if present)])
    return HotCall("attention", name, make, random=drops)


def _by_pointers(case: ReportCase) -> bool:
    """Whether a case by pointers is one that descriptors could serve on the same GPU."""
    from fusedops.kernels._attention_launch import describes

    if case["DESCRIBED"] or case.is_float32 or not case.runs_on(90):
        return False
    options = "drop" if case["DROPOUT"] != "none" else "rich" if case["MASK"] != "none" else "plain"
    if options == "plain" and case["LEFT"]:
        options = "light"
    kernel = case.kernel.removesuffix("_kernel")
    return describes(kernel, 90, case["HEAD_DIM"], options)


def _lse(size: int, device: torch.device, dtype: torch.dtype) -> Any:
    new = functools.partial(randn, device=device, dtype=dtype)
    q, k, v = (new(_BATCH, _HEADS, _TOKENS, size, key=key) for key in "qkv")
    return (q, k, v), {"is_causal": True, "return_lse": True}


def _packed(case: ReportCase) -> HotCall:
    size, group = case["HEAD_DIM"], case["GROUP"]
    lengths = (_TOKENS, 16, 0, 208, 336)

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        new = functools.partial(randn, device=device, dtype=dtype)
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        tokens = sum(lengths)
        q = new(tokens, _HEADS, size, key="q")
        k, v = (new(tokens, _HEADS // group, size, key=key) for key in "kv")
        return (q, k, v, ends, ends, max(lengths), max(lengths)), {"is_causal": True}

    return HotCall("attention_varlen", f"D{size} of {_HEADS // group}", make)


def _decode(case: ReportCase) -> HotCall:
    merges = case.kernel == "merge_kernel"
    size = case["VALUE_DIM"]
    group = 16 if merges else case["GROUP"]
    left, sinks = case["LEFT"], case["SINKS"]
    # As many parts as are merged; three at least.
    capacity = 128 * case["BLOCK_P"] if merges else 1040
    key_heads = 2

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        new = functools.partial(randn, device=device, dtype=dtype, grad=False)
        heads = key_heads * group
        args = (
            new(3, heads, 1, size, key="q"),
            new(3, key_heads, capacity, size, key="k"),
            new(3, key_heads, capacity, size, key="v"),
            torch.tensor([capacity, capacity // 2 + 1, 5], device=device),
        )
        options: dict[str, Any] = {"window": (capacity - 100, 0)} if left else {}
        if sinks:
            options["sinks"] = randn(heads, device=device, dtype=torch.float32, grad=False)
        if case.get("ALIBI"):
            options["alibi_slopes"] = 2.0 ** (-torch.arange(heads, device=device) / 8 - 1)
        if case.get("SOFTCAP"):
            options["softcap"] = 10.0
        return args, options

    flags = [name for name in ("LEFT", "SINKS", "ALIBI", "SOFTCAP") if case.get(name)]
    return HotCall(
        "attention_decode", " ".join([f"{group} rows of D{size}, {capacity} keys", *flags]), make
    )


CALLS: dict[str, Callable[[ReportCase], HotCall]] = {
    "attention": _dense,
    "attention_varlen": _packed,
    "attention_decode": _decode,
}
