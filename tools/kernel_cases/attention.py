"""Configurations that are compiled for the static report: attention.

Block sizes differ by GPU, so a case names the one that runs it: each row of the tables of tiles.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from fusedops.kernels import _attention_backward, attention_decode
from fusedops.kernels._attention_backward_keys import keys_kernel
from fusedops.kernels._attention_backward_queries import queries_kernel
from fusedops.kernels._attention_forward import forward_kernel
from fusedops.kernels._attention_launch import (
    WALKED,
    block_table,
    describes,
    describes_mask,
    mask_block,
    walked_block,
)
from kernel_cases.case import descriptor_type, report_case

_CHIPS = (80, 90, 100, 120)
_KERNELS = {"forward": forward_kernel, "keys": keys_kernel, "queries": queries_kernel}
_OFF = (
    *("LEFT", "PER_QUERY", "ALIBI", "SINKS", "PARTS", "SOFTCAP", "VARLEN"),
    *("ONE_KEY", "WANTS_SCORES"),
)
_ON = ("RIGHT", "KEEPS", "FOLD", "WANTS_KEY", "WANTS_VALUE", "WANTS_QUERY")
_PLAIN: dict[str, Any] = dict.fromkeys(_OFF, False) | dict.fromkeys(_ON, True)
_PLAIN |= {"MASK": "none", "DROPOUT": "none", "DELTA": "given", "PRECISION": "ieee"}
_PLAIN |= {"GROUP": 1, "stride_mn": 1}
_LIGHT = _PLAIN | {"LEFT": True, "SINKS": True, "DELTA": "beside"}
_RICH = _LIGHT | dict.fromkeys(("PARTS", "PER_QUERY", "ALIBI", "SOFTCAP", "WANTS_SCORES"), True)
_RICH |= {"MASK": "add", "FOLD": False, "GROUP": 4, "DELTA": "first"}
_WITH_OPTIONS = {"light": _LIGHT, "rich": _RICH, "drop": _PLAIN | {"DROPOUT": "draw"}}


def case(
    kernel: str,
    capability: int,
    size: int,
    kind: str,
    flags: dict[str, Any],
    dtype: str = "bf16",
    *,
    dense: bool = False,
) -> dict[str, Any]:
    """Describe one configuration of ``"forward"``, ``"keys"`` or ``"queries"``.

    ``dense`` is whether the tensors' layout allows descriptors.
    """
    described = dense and describes(kernel, capability, size, kind)
    types = {f"{name}_ptr": f"*{dtype}" for name in ("q", "k", "v", "mask", "out", "rest", "do")}
    types |= {f"{name}_ptr": f"*{dtype}" for name in ("dq", "dk", "dv")}
    types |= {f"{name}_ptr": "*fp32" for name in ("slopes", "sinks", "lse", "parts")}
    types |= {f"{name}_ptr": "*fp32" for name in ("delta", "exact", "ds")}
    types |= {f"{name}_ptr": "*i64" for name in ("seed", "ends_q", "ends_k")}
    types |= dict.fromkeys(("factor", "bound", "scale", "drop_scale"), "fp32")
    half = dtype != "fp32"
    if not half:
        # Float32 keeps no remainder: nothing was rounded. It keeps the parts of the log-sum-exp.
        flags = flags | {"KEEPS": False, "PARTS": True}
    torch_dtype = torch.bfloat16 if half else torch.float32
    sizes, options = block_table(kernel, capability, torch_dtype, size, size, kind, described)
    if described:
        for name, columns in zip(WALKED[kernel], ("BLOCK_D", "BLOCK_DV"), strict=True):
            types[name] = descriptor_type(dtype, walked_block(kernel, sizes, columns))
    masked = dense and describes_mask(kernel, capability, flags["PER_QUERY"])
    sizes["MASK_DESCRIBED"] = masked
    if masked:
        types["mask_ptr"] = descriptor_type(dtype, mask_block(sizes))
    if kernel == "keys" and size > 128:
        flags = flags | {"WANTS_VALUE": False}
    return report_case(
        _KERNELS[kernel],
        types,
        flags | sizes | {"HEAD_DIM": size, "VALUE_DIM": size},
        options,
        suffix=kind + ("" if half else ", float32") + (", described" if described else ""),
        matrix=half,
        capabilities=(capability,),
    )


def attention_cases() -> list[dict[str, Any]]:
    """Return the cases of dense batches."""
    cases = [
        case(kernel, capability, size, kind, flags, dense=True)
        for kernel in _KERNELS
        for capability in _CHIPS
        for kind, flags in (("plain", _PLAIN), *_WITH_OPTIONS.items())
        for size in (64, 128, 256)
    ]
    cases += [case(kernel, 90, 128, "plain", _PLAIN) for kernel in _KERNELS]
    grouped = _PLAIN | {"GROUP": 4}
    cases += [case("keys", chip, 128, "plain", grouped, dense=True) for chip in _CHIPS]
    cases.append(case("forward", 90, 128, "plain", _PLAIN, "fp32"))
    return [*cases, _delta_case()]


def attention_varlen_cases() -> list[dict[str, Any]]:
    """Return the cases of packed sequences, whose kernels differ by a look at a table."""
    flags = _PLAIN | {"VARLEN": True, "GROUP": 4}
    return [case(kernel, 90, 64, "plain", flags) for kernel in ("forward", "keys")]


def attention_decode_cases() -> list[dict[str, Any]]:
    fp32 = ("slopes_ptr", "sinks_ptr", "lse_ptr", "parts_ptr", "parts_lse_ptr")
    types = dict.fromkeys(fp32, "*fp32") | {"lengths_ptr": "*i64"}
    types |= dict.fromkeys(("factor", "bound"), "fp32")
    options = {"LEFT": True, "ALIBI": True, "SINKS": True, "SOFTCAP": True}
    cases = []
    forms = ((4, 128, False), (64, 128, True), (16, 256, False))
    older, newest = (80, 90, 100), (120,)
    for (rows, size, given), chips in itertools.product(forms, (older, newest)):
        sizes, launch = attention_decode._blocks(torch.bfloat16, rows, size, size, chips[0])
        flags: dict[str, Any] = {"GROUP": rows, "HEAD_DIM": size, "VALUE_DIM": size}
        flags |= dict.fromkeys(options, given) | {"WHOLE": False, "PRECISION": "ieee"}
        case: dict[str, Any] = {"matrix": True, "few_rows": sizes["BLOCK_M"] < 64}
        case["capabilities"] = chips
        out = types | {"out_ptr": "*fp32"}
        cases.append(report_case(attention_decode.parts_kernel, out, flags | sizes, launch, **case))
    flags = {"LEFT": True, "SINKS": True, "VALUE_DIM": 256, "BLOCK_DV": 256}
    flags["BLOCK_P"] = attention_decode._MOST_PARTS
    return [*cases, report_case(attention_decode.merge_kernel, types, flags)]


def _delta_case() -> dict[str, Any]:
    """Describe ``delta_kernel`` for the static report."""
    types = dict.fromkeys(("dlse_ptr", "lse_ptr", "delta_ptr"), "*fp32")
    flags = {"VALUE_DIM": 128, "HAS_DLSE": True, "HAS_REST": True}
    flags |= _attention_backward._delta_sizes(128)
    return report_case(_attention_backward.delta_kernel, types, flags)
