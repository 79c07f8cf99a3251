"""The gated delta rule: linear attention whose state forgets and corrects itself."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Placement, Sharding
from fusedops.kernels._arguments import DeltaRuleArguments, of_backward
from fusedops.ops import _delta_math as formulas
from fusedops.ops._attention_math import check_sequences


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    qk_norm: bool = False,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Apply the gated delta rule to each head of each sequence.

    The state ``S`` of a head, ``[key_dim, value_dim]``, goes from token to token:

        S = exp(gate)[:, None] * S
        S = S + outer(key, beta * (value - key @ S))
        output = scale * query @ S

    Args:
        query: ``[batch, tokens, key_heads, key_dim]``, any floating dtype, any strides.
        key: ``[batch, tokens, key_heads, key_dim]``, the dtype of ``query``.
        value: ``[batch, tokens, heads, value_dim]``, the dtype of ``query``. ``heads`` is a
            multiple of ``key_heads``; head ``h`` reads key head ``h // (heads // key_heads)``.
        gate: logarithm of the decay, at most 0: ``[batch, tokens, heads]``, or ``[batch, tokens,
            heads, key_dim]`` with a decay for each channel of the key (Kimi Delta Attention);
            float32 or the dtype of ``query``. ``-inf`` is a decay of 0.
        beta: ``[batch, tokens, heads]``, the share of the old value that is replaced; float32 or
            the dtype of ``query``.
        scale: factor of the output, ``key_dim ** -0.5`` by default.
        qk_norm: divide queries and keys by their L2 norms first: ``x * rsqrt(sum(x**2) + 1e-6)``.
        initial_state: ``[batch, heads, key_dim, value_dim]``, or one for each packed sequence;
            float32 (float64 for float64). Zero by default.
        cu_seqlens: ``[sequences + 1]`` int32 or int64, from 0, rising, to ``tokens``: the tokens of
            a batch of one are packed sequences, which share no state.
        return_state: also return the state after the last token.

    Returns:
        ``[batch, tokens, heads, value_dim]`` of value's dtype, contiguous; with ``return_state``
        also the state, of the shape and dtype of ``initial_state``, differentiable too.

    Raises:
        ValueError: a shape, device or number does not fit; ``cu_seqlens`` is not monotone or does
            not end at the number of tokens.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        The sums and the state are float32 (float64 for float64); on GPUs the products of half
        precision have TF32 operands. Several tokens are computed in chunks of 64, with a gate per
        channel in chunks of 16: a sequence in pieces of whole chunks has the bits of one call, and
        packed sequences have those of separate calls. Results do not depend on the number of
        threads. The arguments are saved, and the backward computes the states again. A gate above 0
        is not refused, but may overflow. A gate may be -inf. Any other value that is
        not finite may make all values and gradients of its head and sequence NaN. Autocast does not
        change the call.

    Reference:
        Yang et al.: Gated Delta Networks, arXiv:2412.06464; Kimi Linear, arXiv:2510.26692.

    Example:
        >>> import torch, fusedops
        >>> key = torch.ones(1, 3, 1, 1)
        >>> value = torch.tensor([1.0, 2.0, 4.0]).reshape(1, 3, 1, 1)
        >>> gate, beta = torch.zeros(1, 3, 1), torch.full((1, 3, 1), 0.5)
        >>> fusedops.gated_delta_rule(key, key, value, gate, beta).flatten()
        tensor([0.5000, 1.2500, 2.6250])
    """
    op = "gated_delta_rule"
    checks.flag(op, "qk_norm", qk_norm)
    checks.flag(op, "return_state", return_state)
    check_arguments(query, key, value, gate, beta, initial_state, cu_seqlens)
    if scale is None:
        scale = max(1, query.shape[3]) ** -0.5
    checks.finite(op, "scale", scale)
    ends = None if cu_seqlens is None else cu_seqlens.to(torch.int64)
    numbers = (float(scale), qk_norm)
    output, state = _OP(query, key, value, gate, beta, initial_state, ends, *numbers)
    return (output, state) if return_state else output


def check_arguments(
    query: Any, key: Any, value: Any, gate: Any, beta: Any, initial_state: Any, cu_seqlens: Any
) -> None:
    """Raise unless the tensors of ``gated_delta_rule`` fit."""
    op = "gated_delta_rule"
    checks.tensor(op, "query", query)
    checks.like(op, "key", key, "query", query, dtype=True)
    checks.like(op, "value", value, "query", query, dtype=True)
    for name, tensor in (("query", query), ("value", value)):
        if tensor.dim() != 4:
            checks.fail(op, name, "of 4 dims, [batch, tokens, heads, size]", list(tensor.shape))
    checks.shape(op, "key", key, query.shape, "that of query")
    batch, tokens, key_heads, key_dim = query.shape
    heads, value_dim = value.shape[2:]
    checks.shape(op, "value", value, (batch, tokens, heads, value_dim), "batch and tokens of query")
    if heads and (not key_heads or heads % key_heads):
        expected = f"of a number of heads that the {key_heads} key heads divide"
        checks.fail(op, "value", expected, heads)
    rows = (batch, tokens, heads)
    for name, tensor in (("gate", gate), ("beta", beta)):
        checks.parameter(op, name, tensor, "query", query)
        per_channel = name == "gate" and tensor.dim() == 4
        shape = (*rows, key_dim) if per_channel else rows
        checks.shape(op, name, tensor, shape, "one for each token and head of value")
    sequences = batch
    if cu_seqlens is not None:
        check_sequences(op, "cu_seqlens", cu_seqlens, tokens, 2**31 - 1)
        if cu_seqlens.device != query.device:
            checks.fail(op, "cu_seqlens", f"on {query.device}, query's device", cu_seqlens.device)
        if batch != 1:
            checks.fail(op, "query", "of a batch of 1 where cu_seqlens is given", batch)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        checks.like(op, "initial_state", initial_state, "query", query)
        state = (sequences, heads, key_dim, value_dim)
        checks.shape(op, "initial_state", initial_state, state, "one for each sequence and head")
        wide = dtypes.statistics_dtype(query.dtype)
        if initial_state.dtype != wide:
            raise TypeError(
                f"{op}: initial_state must have dtype {wide}, got {initial_state.dtype}"
            )


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return formulas.forward(DeltaRuleArguments(*args))


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    (grad_output, grad_state), call, _, output_mask = of_backward(
        DeltaRuleArguments, args, incoming=2
    )
    grads = formulas.backward(call, grad_output, grad_state)
    return tuple(grad if on else None for grad, on in zip(grads, output_mask, strict=True))


def _shard(key: Any, value: Any, gate: Any, cu_seqlens: Any) -> list[Sharding]:
    """Heads are independent, and so is the batch where it is not packed."""
    ranks = value.mesh.size()
    # Tensors with tokens and a head: that dim of theirs, and of the state.
    words: list[tuple[Placement, Placement]] = [(REPLICATE, REPLICATE)]
    if cu_seqlens is None:
        words.append((0, 0))
    if key.shape[2] % ranks == 0 and value.shape[2] % ranks == 0:
        words.append((2, 1))
    return [([word, state], [word] * 5 + [state, REPLICATE]) for word, state in words]


_OP = define_op(
    "gated_delta_rule",
    "(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor? initial_state,"
    " Tensor? cu_seqlens, float scale, bool qk_norm) -> (Tensor output, Tensor final_state)",
    contract={
        "query, key": "T [batch, tokens, key_heads, key_dim]",
        "value, output": "T [batch, tokens, heads, value_dim]",
        "gate": "param(T) [batch, tokens, heads] | [batch, tokens, heads, key_dim]",
        "beta": "param(T) [batch, tokens, heads]",
        "cu_seqlens": "int64 [ends]",
        "sequences": "ends - 1 if given(cu_seqlens) else batch",
        "initial_state, final_state": "stat(T) [sequences, heads, key_dim, value_dim]",
        "ends": "ends >= 1",
        "batch": "(batch if given(cu_seqlens) else 1) == 1",
        "heads": "heads == 0 or key_heads > 0 and heads % key_heads == 0",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("query", "key", "value", "gate", "beta", "initial_state"),
        outputs=("output", "final_state"),
        saves=DeltaRuleArguments._fields[:7],
        reference=_backward,
    ),
    triton="fusedops.kernels.gated_delta_rule",
    shard=_shard,
)
