"""Log-probability and entropy of tokens from logits, without the softmax in memory.

The forward reads the logits once and keeps four numbers per row; the backward reads them once and
writes their gradient once. The kernels are those of ``cross_entropy``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fusedops._core import checks
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Sharding
from fusedops.kernels._arguments import TokenArguments, of_backward
from fusedops.ops import _cross_entropy_math as formulas


class TokenLogprobs(NamedTuple):
    """What ``token_logprobs`` and ``linear_token_logprobs`` return, one number per token.

    Args:
        logprobs: ``[...]``, float32 (float64 for float64), log-probability of the target.
        logsumexp: ``[...]``, the same dtype, log-sum-exp of the logits.
        is_argmax: ``[...]``, bool, whether no class has a larger logit than the target.
        entropy: ``[...]``, dtype of ``logprobs``, or ``None`` if it was not asked for.

    Raises:
        Nothing.

    Example:
        >>> import torch, fusedops
        >>> fusedops.token_logprobs(torch.zeros(1, 4), torch.tensor([2])).is_argmax
        tensor([True])
    """

    logprobs: torch.Tensor
    logsumexp: torch.Tensor
    is_argmax: torch.Tensor
    entropy: torch.Tensor | None


def token_logprobs(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
) -> TokenLogprobs:
    """Compute the log-probability of each target, and of its distribution the entropy.

    ``logprob = y_target - lse``, ``entropy = -sum_j p_j log p_j``

    with ``y = logits / temperature``, or ``softcap * tanh(logits / softcap) / temperature``,
    ``lse = log sum_j exp(y_j)`` and ``p_j = exp(y_j - lse)``.

    Args:
        logits: ``[..., num_classes]``, any floating dtype, any strides. They are only read.
        target: ``[...]``, int64: class indices in ``[0, num_classes)``, or ``ignore_index``.
        temperature: positive divisor of the logits.
        softcap: bound of the logits' absolute value, or ``None``.
        ignore_index: all numbers of rows with this target are 0, and so is their gradient.
        return_entropy: whether the result has the entropy.

    Returns:
        A named tuple ``TokenLogprobs``. ``logprobs``, ``logsumexp`` and ``entropy`` are ``[...]``,
        float32 (float64 for float64), and differentiable; ``is_argmax`` is ``[...]``, bool.

    Raises:
        ValueError: a shape, device or option does not fit, or (CPU) a target is not a class. On
            CUDA the log-probability and the gradient of such a row are NaN.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Arithmetic is float32 (float64 for float64), sums of blocks are float64 on the CPU. A class
        of logit ``-inf`` adds nothing to the entropy and has gradient 0. A row's result does not
        depend on the other rows, and no result on the number of threads. Saves ``logits``,
        ``target`` and four numbers per row; the backward recomputes the softmax and writes a new
        tensor. Twice differentiable. Rows may be sharded, classes may not. Autocast does not change
        the call.

    Reference:
        Ouyang et al.: Training language models to follow instructions with human feedback,
        arXiv:2203.02155; Shao et al.: DeepSeekMath (GRPO), arXiv:2402.03300.

    Example:
        >>> import torch, fusedops
        >>> logits, target = torch.zeros(1, 4), torch.tensor([2])
        >>> tokens = fusedops.token_logprobs(logits, target, return_entropy=True)
        >>> tokens.logprobs, tokens.entropy
        (tensor([-1.3863]), tensor([1.3863]))
    """
    op = "token_logprobs"
    checks.tensor(op, "logits", logits)
    if logits.dim() == 0:
        checks.fail(op, "logits", "a tensor with at least one dimension", "a scalar")
    formulas.check_target(op, target, "logits", logits)
    formulas.check_classes(op, "logits", logits.shape[-1])
    cap = formulas.check_token_options(op, temperature, softcap, ignore_index)
    checks.flag(op, "return_entropy", return_entropy)
    tokens, statistics = _OP(logits, target, ignore_index, temperature, cap)
    return result(tokens, statistics, return_entropy)


def result(tokens: torch.Tensor, statistics: torch.Tensor, return_entropy: bool) -> TokenLogprobs:
    """Return what the operators computed under its names."""
    hit = statistics.detach()[..., 3] > 0
    return TokenLogprobs(tokens[0], tokens[2], hit, tokens[1] if return_entropy else None)


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = TokenArguments(*args)
    if checks.readable(call.target):
        classes = call.logits.shape[-1]
        formulas.check_range("token_logprobs", call.target, classes, call.ignore_index)
    y = formulas.capped(call.logits, call.softcap) * call.options.inverse_temperature
    return formulas.token_rows(y, call.target, call.ignore_index)


def _backward(*args: Any) -> torch.Tensor | None:
    # What was kept is not used: this is also the second derivative.
    (grad_tokens,), call, _, output_mask = of_backward(TokenArguments, args)
    if not output_mask[0]:
        return None
    grad = formulas.token_gradient(grad_tokens, call.logits, call.target, call.options)
    return grad.to(call.logits.dtype).contiguous()


def _shard(logits: Any) -> list[Sharding]:
    """Rows are independent; classes are unsharded."""
    rules: list[Sharding] = [([REPLICATE] * 2, [REPLICATE] * 2)]
    return rules + [([dim + 1, dim], [dim, dim]) for dim in range(logits.ndim - 1)]


_OP = define_op(
    "token_logprobs",
    "(Tensor logits, Tensor target, int ignore_index, float temperature, float softcap)"
    " -> (Tensor tokens, Tensor statistics)",
    contract={
        "logits": "T [*rows, classes]",
        "classes": "classes >= 1",
        "target": "int64 [*rows]",
        "tokens": "stat(T) [3, *rows]",
        "statistics": "stat(T) [*rows, 4]",
        "temperature": "0 < temperature < inf",
        "softcap": "0 <= softcap < inf",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("logits",),
        outputs=("tokens",),
        saves=("logits", "target", "statistics"),
        reference=_backward,
    ),
    triton="fusedops.kernels.token_logprobs",
    shard=_shard,
)
