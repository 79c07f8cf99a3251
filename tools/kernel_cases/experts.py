"""Configurations that are compiled for the static report: routing and rows of experts."""

from __future__ import annotations

import itertools
from typing import Any

from fusedops.kernels import (
    _launch,
    _moe_rows,
    moe_pack,
    moe_relayout,
    moe_route,
    moe_router_loss,
    moe_sort,
    moe_unpack,
    moe_unpermute,
)
from fusedops.kernels.moe_route import MAX_EXPERTS
from kernel_cases.case import report_case

# Of the arguments of scatter and combine.
_TYPES = {"probs_ptr": "*fp32", "positions_ptr": "*i32", "real_ptr": "*i32"}


def moe_pack_cases() -> list[dict[str, Any]]:
    types = dict.fromkeys(("probs_ptr", "ids_ptr", "index_ptr", "count_ptr", "words_ptr"), "*i32")
    types |= {"bytes_ptr": "*u8", "elements_ptr": "*i16"}
    flags = {"HAS_IDS": True, "HAS_INDEX": True, "HAS_COUNT": True, "ELEMENT_BYTES": 2}
    flags |= {"BLOCK_K": 8, "BLOCK_N": moe_pack._MAX_BLOCK}
    options = _launch.row_options(moe_pack._MAX_BLOCK)
    cases = []
    for quantized, has_span in itertools.product((False, True), (False, True)):
        constexprs = flags | {"HAS_SPAN": has_span, "QUANTIZED": quantized}
        signature = types | {"x_ptr": "*bf16" if quantized else "*i16"}
        label = f"{'float8' if quantized else 'copy'}, {'tokens' if has_span else 'slots'}"
        kernel = moe_pack._pack_kernel
        cases.append(report_case(kernel, signature, constexprs, options, label=label))
    return cases


def moe_unpack_cases() -> list[dict[str, Any]]:
    types = {"bytes_ptr": "*u8", "words_ptr": "*i32"}
    options = _launch.row_options(moe_unpack._MAX_BLOCK)
    sizes = {"BLOCK_N": moe_unpack._MAX_BLOCK}
    return [report_case(moe_unpack._unpack_kernel, types, sizes, options)]


def moe_permute_cases() -> list[dict[str, Any]]:
    scattered = [_scatter_case(top_k) for top_k in (2, 8, 0)]
    return [*scattered, _combine_case(8, weighted=False)]


def moe_unpermute_cases() -> list[dict[str, Any]]:
    types = _TYPES | {"dprobs_ptr": "*fp32"}
    combined = [_combine_case(top_k, weighted=True) for top_k in (2, 8, 0)]
    blocks = {"WANTS_INPUT": True, "WANTS_PROBS": True, "BLOCK": moe_unpermute._BLOCK}
    return [*combined, report_case(moe_unpermute._backward_kernel, types, blocks)]


def moe_relayout_cases() -> list[dict[str, Any]]:
    types = {"index_ptr": "*i32"}
    return [report_case(moe_relayout._gather_kernel, types, {"BLOCK": moe_relayout._BLOCK})]


def moe_route_cases() -> list[dict[str, Any]]:
    types = dict.fromkeys(("bias_ptr", "probs_ptr", "grad_ptr"), "*fp32")
    types |= dict.fromkeys(("ids_ptr", "given_ptr"), "*i32")
    types |= {"seed_ptr": "*i64", "kept_ptr": "*u8", "scaling": "fp32", "jitter": "fp32"}
    plain: dict[str, Any] = {"NORMALIZE": True, "CHOICE": "best", "BLOCK_G": 2}
    plain |= dict.fromkeys(("SIGMOID", "BIAS", "GROUPS", "TOP2", "JITTER", "KEPT"), False)
    deepseek = {"SIGMOID": True, "BIAS": True, "GROUPS": True, "TOP2": True, "BLOCK_G": 8}
    kinds: list[tuple[str, int, int, dict[str, Any]]] = [
        ("softmax", 8, 2, {}),
        ("softmax", 128, 8, {"NORMALIZE": False, "KEPT": True}),
        ("softmax, jitter", 64, 8, {"JITTER": True}),
        ("softmax over the chosen", 256, 8, {}),
        ("sigmoid, bias, groups", 256, 8, deepseek),
        ("expert choice", 64, 64, {"NORMALIZE": False, "CHOICE": "all", "KEPT": True}),
        ("softmax", moe_route.MAX_EXPERTS, 8, {"NORMALIZE": False}),
    ]
    cases = []
    for label, num_experts, top_k, differing in kinds:
        blocks, options = moe_route._tile(num_experts, top_k)
        chosen = plain | differing | blocks
        for kernel in (moe_route._forward_kernel, moe_route._backward_kernel):
            cases.append(report_case(kernel, types, chosen, options, label=label))
    return cases


def moe_router_loss_cases() -> list[dict[str, Any]]:
    types = dict.fromkeys(("w_ptr", "z_ptr", "sums_ptr", "grad_ptr"), "*fp32")
    types["mask_ptr"] = "*u8"
    cases = []
    for sigmoid, experts in ((False, 8), (False, 64), (True, 256), (True, MAX_EXPERTS)):
        blocks, options = moe_router_loss._blocks(experts)
        chosen = {"SIGMOID": sigmoid, "BALANCE": True, "Z": True, "MASK": True} | blocks
        for kernel in (moe_router_loss._forward_kernel, moe_router_loss._backward_kernel):
            label = "sigmoid" if sigmoid else "softmax"
            cases.append(report_case(kernel, types, chosen, options, label=label))
    return cases


def moe_sort_cases() -> list[dict[str, Any]]:
    names = ("before", "totals", "permutation", "positions", "counts", "offsets")
    types = {f"{name}_ptr": "*i32" for name in names} | {"ids_ptr": "*i64", "kept_ptr": "*u8"}
    blocks = {"HAS_KEPT": True, "BLOCK": moe_sort._BLOCK, "BLOCK_E": moe_sort._BLOCK_E}
    return [
        report_case(moe_sort._count_kernel, types, blocks),
        report_case(moe_sort._scan_kernel, types, {"BLOCK": moe_sort._SCAN_BLOCK}),
        report_case(moe_sort._place_kernel, types, blocks),
    ]


def _scatter_case(top_k: int) -> dict[str, Any]:
    blocks = {"TOP_K": top_k, "BLOCK": _moe_rows._BLOCK}
    return report_case(_moe_rows._scatter_kernel, _TYPES, blocks)


def _combine_case(top_k: int, *, weighted: bool) -> dict[str, Any]:
    blocks = {"TOP_K": top_k, "WEIGHTED": weighted, "BLOCK": _moe_rows._BLOCK}
    return report_case(_moe_rows._combine_kernel, _TYPES, blocks)
