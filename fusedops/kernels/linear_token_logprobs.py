"""linear_token_logprobs on a GPU: products and kernels are those of ``linear_cross_entropy.py``."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _launch
from fusedops.kernels._arguments import LinearTokenArguments, of_backward
from fusedops.kernels.linear_cross_entropy import gradients, sums


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = LinearTokenArguments(*args)
    with _launch.device_of(call.hidden):
        pieces, kept = sums(call, tokens=True)
        return *pieces.finish_tokens(call.target.shape), kept


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    (grad_tokens,), call, saved, output_mask = of_backward(LinearTokenArguments, args)
    return gradients(grad_tokens.contiguous(), call, saved, output_mask, tokens=True)
