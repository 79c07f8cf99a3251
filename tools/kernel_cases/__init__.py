"""Which configurations of the Triton kernels are compiled for the static report.

The report (``tools/kernel_report.py``) keeps registers, spills and instructions on record, and the
hot samples (``tests/hot_samples``) launch each configuration. ``X_cases`` returns those of the
file ``X.py`` in ``fusedops/kernels``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fusedops._core.activation import GELU_VARIANTS
from kernel_cases import (
    attention,
    elementwise,
    experts,
    lists,
    products,
    recurrences,
    rows,
    state_space,
)

# By the name of the file in ``fusedops/kernels``; files without a kernel of their own have none.
CASES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "adamw": lists.adamw_cases,
    "add_layer_norm": partial(rows.norm_cases, centred=True, residual=True),
    "add_rms_norm": partial(rows.norm_cases, centred=False, residual=True),
    "attention": attention.attention_cases,
    "attention_decode": attention.attention_decode_cases,
    "attention_varlen": attention.attention_varlen_cases,
    "baddbmm": products.baddbmm_cases,
    "bias_dropout_add": elementwise.bias_dropout_add_cases,
    "bias_gelu": elementwise.bias_gelu_cases,
    "causal_conv1d": state_space.causal_conv1d_cases,
    "cross_entropy": rows.cross_entropy_cases,
    "gated_rms_norm": rows.gated_rms_norm_cases,
    "gated_delta_rule": recurrences.gated_delta_rule_cases,
    "geglu": partial(elementwise.glu_cases, tuple(GELU_VARIANTS.values())),
    "gelu": elementwise.gelu_cases,
    "grouped_mm_add_gradients": list,
    "grouped_mm": partial(products.grouped_cases, gathers=False),
    "layer_norm": partial(rows.norm_cases, centred=True),
    "linear_act": products.linear_act_cases,
    "linear_cross_entropy": list,
    "linear_glu": products.linear_glu_cases,
    "linear_token_logprobs": list,
    "mlp": list,
    "mlp_tiled": list,
    "moe_mlp": products.moe_mlp_cases,
    "moe_mlp_add_gradients": list,
    "moe_pack": experts.moe_pack_cases,
    "moe_permute": experts.moe_permute_cases,
    "moe_relayout": experts.moe_relayout_cases,
    "moe_route": experts.moe_route_cases,
    "moe_router_loss": experts.moe_router_loss_cases,
    "moe_sort": experts.moe_sort_cases,
    "moe_unpack": experts.moe_unpack_cases,
    "moe_unpermute": experts.moe_unpermute_cases,
    "rms_norm": partial(rows.norm_cases, centred=False),
    "rotary_embedding": elementwise.rotary_embedding_cases,
    "scaled_masked_softmax": rows.scaled_masked_softmax_cases,
    "selective_state_space": state_space.selective_state_space_cases,
    "square_sums": lists.square_sums_cases,
    "swiglu": partial(elementwise.glu_cases, ("silu",)),
    "token_logprobs": partial(rows.cross_entropy_cases, tokens=True),
}
