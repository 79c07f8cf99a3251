"""attention in Triton: launches of the kernels in ``_attention_forward`` and ``_backward``.

The same kernels serve packed sequences (``attention_varlen.py``). Where a measured table says so,
the plain case runs torch's own kernels instead: ``_torch_serves``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core.architecture import compute_capability
from fusedops.kernels import _attention_backward, _attention_forward, _attention_report
from fusedops.kernels._attention_launch import Call, heads_inside, unsupported

# (compute capability, head size) -> "cudnn" or "flash", which torch kernel beats ours in the plain
# forward. Only measured entries belong here, with the figures in bench/results: there is none yet.
TORCH_SERVES: dict[tuple[int, int], str] = {}


def supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> str | None:
    """Return why the kernels cannot run on these arguments, ``None`` where they can."""
    return unsupported(query, value)


def supports_backward(
    grad_output: Any,
    grad_lse: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
) -> str | None:
    """Return the same for the backward."""
    return unsupported(query, value)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    dropout_p: float,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    keep_remainder: bool,
) -> tuple[torch.Tensor, ...]:
    """Launch the forward; arguments and results are those of ``fusedops::attention``."""
    call = _call(
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        sinks,
        seed,
        dropout_p,
        scale,
        window_left,
        window_right,
        softcap,
    )
    # Torch's kernels do not tell what their output's rounding took.
    served = "" if keep_remainder else _torch_serves(call)
    if served:
        output, lse = _by_torch(served, call)
        return output, lse, query.new_empty(0), lse.new_empty(0)
    return _attention_forward.forward(call, keep_remainder)


def backward(
    grad_output: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    remainder: torch.Tensor,
    lse_parts: torch.Tensor,
    dropout_p: float,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    keep_remainder: bool,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::attention_backward``."""
    call = _call(
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        sinks,
        seed,
        dropout_p,
        scale,
        window_left,
        window_right,
        softcap,
    )
    return _attention_backward.backward(
        call, grad_output, grad_lse, output, lse, remainder, lse_parts, output_mask
    )


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    *numbers: Any,
) -> Call:
    rows, keys = query.shape[2], key.shape[2]
    tensors = (query, key, value, attn_mask, alibi_slopes, sinks, seed)
    return Call(*tensors, None, rows, keys, *numbers)


def _torch_serves(call: Call) -> str:
    """Return which of torch's kernels runs this forward, "" for none.

    The hook of a measured table (``TORCH_SERVES``): both give the same output and log-sum-exp, so
    the backward is ours either way (torch's adds with atomics unless told to be deterministic).
    """
    query, key = call.query, call.key
    if not TORCH_SERVES or query.device.type != "cuda" or query.dtype == torch.float32:
        return ""
    causal = call.right == 0 and query.shape[2] == key.shape[2]
    options = (call.mask, call.slopes, call.sinks, call.seed)
    plain = all(each is None for each in options) and call.softcap == 0.0 and call.left < 0
    if not plain or not (causal or call.right < 0) or call.value.shape[3] != query.shape[3]:
        return ""
    if query.numel() == 0 or key.numel() == 0:
        return ""
    capability = compute_capability(query.device)
    if capability is None:
        return ""
    major, minor = capability
    return TORCH_SERVES.get((10 * major + minor, query.shape[3]), "")


def _by_torch(kernel: str, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the plain forward by torch's cuDNN or flash kernel."""
    tensors = (call.query, call.key, call.value)
    causal = call.right == 0
    if kernel == "cudnn":
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *tensors, None, True, 0.0, causal, scale=call.scale
        )
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            *tensors, 0.0, causal, scale=call.scale
        )
    shape = call.query.shape[:3]
    return heads_inside(found[0]), found[1].reshape(shape).contiguous()


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    return _attention_report.dense_cases()
