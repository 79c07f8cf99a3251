"""Log-probability and entropy of tokens from hidden states, without large logits in memory.

As ``linear_cross_entropy``, whose kernels and chunks of classes these are.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Sharding
from fusedops.kernels._arguments import LinearTokenArguments, of_backward
from fusedops.ops import _cross_entropy_math as formulas
from fusedops.ops.linear_cross_entropy import (
    DEFAULT_CHUNK,
    check,
    check_chunks,
    factor_gradients,
    keeps_logits,
    logits_of,
)
from fusedops.ops.token_logprobs import TokenLogprobs, result


def linear_token_logprobs(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    chunk_size: int | None = None,
    recompute: bool | None = None,
) -> TokenLogprobs:
    """Compute the log-probability of each target from a linear layer's input.

    ``token_logprobs(input W^T + b, target)``

    Args:
        input: ``[..., hidden_size]``, any floating dtype, any strides.
        weight: ``[num_classes, hidden_size]``, dtype of ``input``; may be an embedding's.
        target: ``[...]``, int64: class indices in ``[0, num_classes)``, or ``ignore_index``.
        bias: ``[num_classes]``, dtype of ``input``.
        temperature: positive divisor of the logits.
        softcap: bound of the logits' absolute value, or ``None``.
        ignore_index: all numbers of rows with this target are 0, and so is their gradient. On the
            CPU nothing is computed for them.
        return_entropy: whether the result has the entropy.
        chunk_size: number of classes whose logits are in memory at a time; ``None``: 4096.
        recompute: ``True``: the backward recomputes the logits; ``False``: all of them are saved in
            float32; ``None``: they are saved if they take no more memory than ``weight``, on the
            CPU if they take up to 512 MiB.

    Returns:
        A named tuple ``TokenLogprobs``. ``logprobs``, ``logsumexp`` and ``entropy`` are ``[...]``,
        float32 (float64 for float64), and differentiable; ``is_argmax`` is ``[...]``, bool.

    Raises:
        ValueError: a shape, device or option does not fit, or (CPU) a target is not a class. On
            CUDA the log-probability of such a row, and every gradient that depends on it, are NaN.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Products accumulate in float32 (float64 for float64) and the logits stay in that dtype; the
        gradient of the logits, as an operand of two products, and each result are rounded once to
        the dtype of ``input``; the weight's gradient is summed in float32 in a fixed order. A row's
        results do not depend on the other rows on the CPU, nor any result on the number of threads;
        with either ``recompute`` the results are the same bits there. Saves ``input``, ``weight``,
        ``target``, ``bias``, four numbers per row and the logits unless they are recomputed. The op
        is twice differentiable, by complete logits. Rows may be sharded, classes may not: for these
        there is ``vocab_parallel_token_logprobs`` in ``fusedops.parallel.tensor.vocabulary``. Under
        autocast all arguments are cast, as torch does for linear.

    Reference:
        Wijmans et al.: Cut Your Losses in Large-Vocabulary Language Models, arXiv:2411.09009; Shao
        et al.: DeepSeekMath (GRPO), arXiv:2402.03300.

    Example:
        >>> import torch, fusedops
        >>> tokens = fusedops.linear_token_logprobs(
        ...     torch.ones(1, 3), torch.zeros(4, 3), torch.tensor([2]), return_entropy=True
        ... )
        >>> tokens.logprobs, tokens.entropy
        (tensor([-1.3863]), tensor([1.3863]))
    """
    op = "linear_token_logprobs"
    check(op, input, weight, target, bias, owner="input")
    check_chunks(op, chunk_size, recompute)
    cap = formulas.check_token_options(op, temperature, softcap, ignore_index)
    checks.flag(op, "return_entropy", return_entropy)
    keep = keeps_logits(recompute, input, weight, bias)
    numbers = (ignore_index, temperature, cap, chunk_size or DEFAULT_CHUNK, keep, False)
    tokens, statistics, _ = _OP(input, weight, target, bias, *numbers)
    return result(tokens, statistics, return_entropy)


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = LinearTokenArguments(*args)
    target, least = call.target, -1 if call.partial else 0
    if checks.readable(target):
        classes = call.weight.shape[0]
        op = "linear_token_logprobs"
        formulas.check_range(op, target, classes, call.ignore_index, least=least)
    _, _, logits = logits_of(call)
    y = formulas.capped(logits, call.softcap) * call.options.inverse_temperature
    kept = logits if call.keep_logits else logits.new_empty((*target.shape, 0))
    return *formulas.token_rows(y, target, call.ignore_index, partial=call.partial), kept


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    # As in linear_cross_entropy.
    (grad_tokens,), call, (statistics, _), mask = of_backward(LinearTokenArguments, args)
    of_all = statistics if call.partial else None

    def logits_gradient(logits: torch.Tensor) -> torch.Tensor:
        return formulas.token_gradient(grad_tokens, logits, call.target, call.options, of_all)

    return factor_gradients(call, logits_gradient, mask)


def _shard(input: Any) -> list[Sharding]:
    """Rows are independent; parameters are replicated."""
    rules: list[Sharding] = [([REPLICATE] * 3, [REPLICATE] * 4)]
    for dim in range(input.ndim - 1):
        rules.append(([dim + 1, dim, dim], [dim, REPLICATE, dim, REPLICATE]))
    return rules


_OP = define_op(
    "linear_token_logprobs",
    "(Tensor input, Tensor weight, Tensor target, Tensor? bias, int ignore_index,"
    " float temperature, float softcap, int chunk_size, bool keep_logits, bool partial)"
    " -> (Tensor tokens, Tensor statistics, Tensor logits)",
    contract={
        "input": "T [*rows, features]",
        "weight": "T [classes, features]",
        "classes": "classes >= 1",
        "target": "int64 [*rows]",
        "bias": "T [classes]",
        "tokens": "stat(T) [3, *rows]",
        "statistics": "stat(T) [*rows, 4]",
        "logits": "stat(T) [*rows, classes if keep_logits else 0]",
        "temperature": "0 < temperature < inf",
        "softcap": "0 <= softcap < inf",
        "chunk_size": "chunk_size >= 1",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("input", "weight", "bias"),
        outputs=("tokens",),
        saves=("input", "weight", "target", "bias", "statistics", "logits"),
        reference=_backward,
    ),
    autocast="lower",
    triton="fusedops.kernels.linear_token_logprobs",
    shard=_shard,
)
