"""Hot samples of attention: dense batches, packed sequences, decoding."""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import torch

from hot_samples.call import HotCall, New, in_float32

# Three blocks of 128 queries and of keys, and one that is not full.
_TOKENS = 400
_BATCH, _HEADS = 2, 4
_ALL = ("window", "bias", "soft-cap", "alibi", "sinks")


def _dense(size: int, key_heads: int, *flags: str) -> HotCall:
    def make(new: New) -> Any:
        wide = functools.partial(new, dtype=torch.float32)

        def heads(count: int, key: str) -> torch.Tensor:
            # Laid out as a projection leaves it; read by pointers where a batch is broadcast.
            batch = 1 if "by pointers" in flags else _BATCH
            made = new(batch, _TOKENS, count, size, grad=False, key=key).transpose(1, 2)
            return made.expand(_BATCH, -1, -1, -1).requires_grad_()

        args = (heads(_HEADS, "q"), heads(key_heads, "k"), heads(key_heads, "v"))
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": key_heads < _HEADS}
        if "window" in flags:
            options["window"] = (150, -1)
        if "soft-cap" in flags:
            options["softcap"] = 10.0
        if "alibi" in flags:
            options["alibi_slopes"] = 2.0 ** -torch.arange(1, _HEADS + 1, device=new.device)
        if "sinks" in flags:
            options["sinks"] = wide(_HEADS, key="sinks")
        if "bias" in flags:
            options["attn_mask"] = new(1, _HEADS, _TOKENS, _TOKENS, key="bias")
        if "dropout" in flags:
            options["dropout_p"] = 0.1
        return args, options

    name = ", ".join([f"D{size} of {key_heads}", *flags])
    return HotCall("attention", name, make, random="dropout" in flags)


def _lse(new: New) -> Any:
    q, k, v = (new(_BATCH, _HEADS, _TOKENS, 128, key=key) for key in "qkv")
    return (q, k, v), {"is_causal": True, "return_lse": True}


def _packed(new: New) -> Any:
    lengths = (_TOKENS, 16, 0, 208, 336)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=new.device)
    q = new(sum(lengths), _HEADS, 64, key="q")
    k, v = (new(sum(lengths), 1, 64, key=key) for key in "kv")
    return (q, k, v, ends, ends, max(lengths), max(lengths)), {"is_causal": True}


def _decode(group: int, size: int, capacity: int, *flags: str) -> HotCall:
    heads = 2 * group

    def make(new: New) -> Any:
        args = (
            new(3, heads, 1, size, grad=False, key="q"),
            *(new(3, 2, capacity, size, grad=False, key=key) for key in "kv"),
            torch.tensor([capacity, capacity // 2 + 1, 5], device=new.device),
        )
        options: dict[str, Any] = {"window": (capacity - 100, 0)} if "LEFT" in flags else {}
        if "SINKS" in flags:
            options["sinks"] = new(heads, dtype=torch.float32, grad=False)
        if "ALIBI" in flags:
            options["alibi_slopes"] = 2.0 ** (-torch.arange(heads, device=new.device) / 8 - 1)
        if "SOFTCAP" in flags:
            options["softcap"] = 10.0
        return args, options

    name = " ".join([f"{group} rows of D{size}, {capacity} keys", *flags])
    return HotCall("attention_decode", name, make)


CALLS: dict[str, list[HotCall]] = {
    "attention": [
        *(_dense(size, 4) for size in (64, 128, 256)),
        *in_float32(_dense(128, 4)),
        *(_dense(size, 4, "window", "sinks") for size in (64, 128, 256)),
        *(_dense(size, 1, *_ALL) for size in (64, 128, 256)),
        *(_dense(size, 4, "dropout") for size in (64, 128, 256)),
        _dense(128, 1),
        _dense(128, 4, "by pointers"),
        HotCall("attention", "D128 causal, lse", _lse),
    ],
    "attention_varlen": [HotCall("attention_varlen", "D64 of 1", _packed)],
    # The last merges as many parts as are merged at once.
    "attention_decode": [
        _decode(4, 128, 1040),
        _decode(64, 128, 1040, "LEFT", "SINKS", "ALIBI", "SOFTCAP"),
        _decode(16, 256, 1040),
        _decode(16, 256, 8192, "LEFT", "SINKS"),
    ],
}
