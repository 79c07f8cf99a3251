"""token_logprobs in Triton: the kernels are those of ``cross_entropy.py``."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _launch
from fusedops.kernels._arguments import TokenArguments, of_backward
from fusedops.kernels.cross_entropy import Pieces, dense_matrix, logits_gradient


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = TokenArguments(*args)
    x = dense_matrix(call.logits)
    with _launch.device_of(x):
        pieces = Pieces(call.target.reshape(-1), x.shape[1], call.options, tokens=True)
        pieces.add(x, 0)
        return pieces.finish_tokens(call.target.shape)


def backward(*args: Any) -> torch.Tensor | None:
    (grad_tokens,), call, (statistics,), output_mask = of_backward(TokenArguments, args)
    if not output_mask[0]:
        return None
    x = dense_matrix(call.logits)
    grad, classes = torch.empty_like(x), (x.shape[1], x.shape[1], 0)
    with _launch.device_of(x):
        tensors = (grad_tokens.contiguous(), x, call.target.reshape(-1), statistics.contiguous())
        logits_gradient(*tensors, grad, *classes, options=call.options, tokens=True)
    return grad.view(call.logits.shape)
