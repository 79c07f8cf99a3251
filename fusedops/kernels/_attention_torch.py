"""Plain attention by torch's own kernels: configurations "cudnn" and "flash" of the Triton modules.

A tuning table names one where it was measured to be faster (``fusedops bench tune``). Calls that
are not plain, or that the kernel does not support, run on our kernels under every configuration.
Forward and backward are chosen independently: both forwards return the same output and log-sum-exp
(natural, float32), so that either backward follows either forward. Only the remainder of rounding
the output is missing in torch's kernels: it is then 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops._core import launch_plans
from fusedops.kernels._attention_launch import AttentionCall, heads_inside, readable

DENSE = ("cudnn", "flash")
PACKED = ("flash",)


def serves(config: str | None, call: AttentionCall) -> bool:
    """Return whether a configuration runs this call by torch's kernel.

    Plain is: no mask, ALiBi, sinks, dropout, soft-cap or window, half precision, one head size, a
    positive scale. Both kernels and ours must agree on which keys "causal" allows: cuDNN aligns the
    upper left corners where ours and flash's of packed sequences align the lower right ones.
    """
    if config is None:
        return False
    query, key, value = call.query, call.key, call.value
    options = (call.mask, call.slopes, call.sinks, call.seed)
    bounded = call.left >= 0 or call.right > 0 or call.softcap != 0.0
    if any(option is not None for option in options) or bounded or call.scale <= 0.0:
        return False
    size = query.shape[3]
    if query.dtype == torch.float32 or value.shape[3] != size or size % 8 != 0:
        return False
    if call.right == 0 and call.ends is None and query.shape[2] != key.shape[2]:
        return False
    return query.numel() > 0 and key.numel() > 0 and _takes(config, call)


def _takes(config: str, call: AttentionCall) -> bool:
    """Return whether this torch, on this GPU, has the kernel for these tensors."""
    launch_plans.depends_on("which of its kernels torch may use")
    if not call.query.is_cuda:
        return False
    tensors = (call.query, call.key, call.value)
    groups = call.query.shape[1] != call.key.shape[1]
    params = torch.backends.cuda.SDPAParams(*tensors, None, 0.0, call.right == 0, groups)
    if config == "cudnn":
        return torch.backends.cuda.can_use_cudnn_attention(params)
    return torch.backends.cuda.can_use_flash_attention(params)


def forward(
    config: str | None, call: AttentionCall, keep_remainder: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the forward; results are those of ``_attention_forward.forward``."""
    causal = call.right == 0
    if call.ends is not None:
        packed = (_packed(tensor) for tensor in (call.query, call.key, call.value))
        results = torch.ops.aten._flash_attention_forward(
            *packed, *_tables(call), 0.0, causal, False, scale=call.scale
        )
        output = results[0].transpose(0, 1).unsqueeze(0)
        # A row without keys: infinity there, minus infinity here.
        lse = torch.where(results[1] == torch.inf, -torch.inf, results[1]).unsqueeze(0)
    else:
        tensors = (call.query, call.key, call.value)
        if config == "cudnn":
            results = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *tensors, None, True, 0.0, causal, scale=call.scale
            )
        else:
            results = torch.ops.aten._scaled_dot_product_flash_attention(
                *tensors, 0.0, causal, scale=call.scale
            )
        output, lse = results[0], results[1].reshape(call.query.shape[:3])
    output = heads_inside(output)
    remainder = torch.zeros_like(output) if keep_remainder else output.new_empty(0)
    return output, lse.contiguous(), remainder, lse.new_empty(0)


def serves_backward(config: str | None, call: AttentionCall, grad_lse: torch.Tensor | None) -> bool:
    """Return whether a configuration runs this backward by torch's kernel.

    Not where the log-sum-exp has a gradient, which torch's takes none for, nor where deterministic
    algorithms are asked for: torch's kernels add with atomics.
    """
    if config is None:
        return False
    launch_plans.depends_on("torch.are_deterministic_algorithms_enabled()")
    if grad_lse is not None or torch.are_deterministic_algorithms_enabled():
        return False
    return serves(config, call)


def backward(
    config: str | None,
    call: AttentionCall,
    grad_output: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Run the backward; results are those of ``_attention_backward.backward``."""
    causal = call.right == 0
    grad_output = readable(grad_output)
    tensors = (call.query, call.key, call.value, output)
    # The numbers that dropout would draw by are not read.
    seed = torch.zeros(2, dtype=torch.uint64, device=lse.device)
    offset = torch.zeros((), dtype=torch.uint64, device=lse.device)
    lse = lse.contiguous()
    grads: Sequence[torch.Tensor]
    if call.ends is not None:
        packed = (_packed(tensor) for tensor in (grad_output, *tensors))
        lse = torch.where(lse[0] == -torch.inf, torch.inf, lse[0])
        grads = torch.ops.aten._flash_attention_backward(
            *packed, lse, *_tables(call), 0.0, causal, seed, offset, scale=call.scale
        )
        grads = [grad.transpose(0, 1).unsqueeze(0) for grad in grads]
    else:
        sizes = (None, None, call.max_rows, call.max_keys, 0.0, causal)
        if config == "cudnn":
            grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                grad_output, *tensors, lse.unsqueeze(3), seed[0], offset, None, *sizes,
                scale=call.scale,
            )  # fmt: skip
        else:
            grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad_output, *tensors, lse, *sizes, seed, offset, scale=call.scale
            )
    pairs = zip(grads, output_mask, strict=False)
    dq, dk, dv = (heads_inside(grad) if needed else None for grad, needed in pairs)
    return dq, dk, dv, None, None


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[1, H, tokens, D]`` as flash reads packed sequences, ``[tokens, H, D]``."""
    packed = tensor[0].transpose(0, 1)
    return packed if packed.stride(2) == 1 else packed.contiguous()


def _tables(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return where packed sequences end, in int32, and the longest lengths."""
    assert call.ends is not None
    ends_q, ends_k = (end.to(torch.int32) for end in call.ends)
    return ends_q, ends_k, call.max_rows, call.max_keys
