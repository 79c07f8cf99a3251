"""What tests, benchmarks and documentation need to know of ``gated_delta_rule``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedops._core import dtypes
from fusedops.kernels._arguments import DeltaRuleArguments
from fusedops.ops import _delta_math
from fusedops.ops.gated_delta_rule import gated_delta_rule
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe

# Longer sequences are computed in chunks, as models do it.
_MOST_STEPS = 512


def _recurrence(
    inputs: Sequence[torch.Tensor], scale: float, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Go from token to token of query, key, value, gate and beta."""
    query, key, value, gate, beta = inputs
    outputs = [value[:, :0].to(state.dtype)]
    for t in range(value.shape[1]):
        row, rate = key[:, t, :, :, None], beta[:, t, :, None]
        state = state * gate[:, t].exp()[..., None]
        change = (value[:, t] - (state * row).sum(2)) * rate
        state = state + row * change[:, :, None]
        outputs.append((state * (query[:, t, :, :, None] * scale)).sum(2)[:, None])
    return torch.cat(outputs, 1), state


def _of_pairs(
    inputs: Sequence[torch.Tensor], scale: float, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same by products of pairs of tokens, as chunks do: infinities meet elsewhere."""
    query, key, value, gate, beta = inputs
    length = 64 if gate.shape[3] == 1 else 16
    if value.shape[1] > length:
        first, state = _of_pairs([t[:, :length] for t in inputs], scale, state)
        others, state = _of_pairs([t[:, length:] for t in inputs], scale, state)
        return torch.cat([first, others], 1), state
    total = gate.cumsum(1)
    changes = value[:, :0]
    outputs = [changes]

    def read(row: torch.Tensor, t: int) -> torch.Tensor:
        earlier = changes.shape[1]
        between = total[:, t : t + 1] - total[:, :t]
        decay = torch.cat([between, torch.zeros_like(total[:, :1])], 1)[:, :earlier].exp()
        weights = (row[:, None] * key[:, :earlier] * decay).sum(-1, keepdim=True)
        of_state = (state * (row * total[:, t].exp())[..., None]).sum(2)
        return of_state + (weights * changes).sum(1)

    for t in range(value.shape[1]):
        change = beta[:, t, :, None] * (value[:, t] - read(key[:, t], t))
        changes = torch.cat([changes, change[:, None]], 1)
        outputs.append(read(query[:, t] * scale, t)[:, None])
    left = (total[:, -1:] - total).exp() * key
    state = state * total[:, -1:].sum(1).exp()[..., None]
    return torch.cat(outputs, 1), state + (left[..., None] * changes[:, :, :, None]).sum(1)


def _eager(
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
    spread: bool = False,
    recurrence: Callable[..., Any] = _recurrence,
) -> Any:
    """Go through the tokens in a loop, and through long sequences in one of chunks.

    ``spread``: the values of a head and a sequence are NaN if one of them is not finite.
    """
    batch, tokens, key_heads, key_dim = key.shape
    heads, value_dim = value.shape[2:]
    dtype, wide = value.dtype, dtypes.statistics_dtype(value.dtype)
    scale = max(1, key_dim) ** -0.5 if scale is None else scale
    if tokens > _MOST_STEPS:
        arguments = (query, key, value, gate, beta, initial_state, cu_seqlens, scale, qk_norm)
        output, state = _delta_math.forward(DeltaRuleArguments(*arguments))
        return (output, state) if return_state else output
    query, key, value, gate, beta = (t.to(wide) for t in (query, key, value, gate, beta))
    if qk_norm:
        query, key = (
            t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (query, key)
        )
    query, key = (t.repeat_interleave(heads // max(1, key_heads), 2) for t in (query, key))
    gate = gate[..., None] if gate.dim() == 3 else gate
    ends = None if cu_seqlens is None else cu_seqlens.tolist()
    sequences = batch if ends is None else len(ends) - 1
    if initial_state is None:
        initial_state = value.new_zeros(sequences, heads, key_dim, value_dim)
    outputs, states = [value[:, :0]], [initial_state[:0]]
    for n in range(1 if ends is None else sequences):
        part = slice(None) if ends is None else slice(ends[n], ends[n + 1])
        inputs = [t[:, part] for t in (query, key, value, gate, beta)]
        state = initial_state if ends is None else initial_state[n : n + 1]
        output, after = recurrence(inputs, scale, state)
        if spread:
            sums = [t.flatten(3).sum((1, 3)) if t.dim() > 3 else t.sum(1) for t in inputs]
            factor = 1 + 0 * (torch.stack(sums).sum(0) + state.sum((2, 3)))
            # Its gradient reaches every value of the head, too.
            output, after = output * factor[:, None, :, None], after * factor[..., None, None]
        outputs.append(output)
        states.append(after)
    output = torch.cat(outputs, 1).to(dtype)
    return (output, torch.cat(states)) if return_state else output


def _call(
    new: TensorFactory,
    batch: int,
    tokens: int,
    heads: int = 2,
    key_heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 8,
    *,
    per_channel: bool = False,
    wide_gate: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return tensors as a model has them: keys of about unit length, decays from 0.2 to 1."""
    size, factory = key_dim**-0.5, new.wide if wide_gate else new
    gate = factory(batch, tokens, heads, *[key_dim] * per_channel, grad=False, key="gate")
    beta = factory(batch, tokens, heads, grad=False, key="beta")
    return (
        new(batch, tokens, key_heads, key_dim, key="q"),
        new(batch, tokens, key_heads, key_dim, key="k", scale=size),
        new(batch, tokens, heads, value_dim, key="v"),
        (-gate.square() / 2).requires_grad_(new.grad),
        beta.sigmoid().requires_grad_(new.grad),
    )


def _samples(new: TensorFactory) -> list[Sample]:
    def call(*sizes: int, **options: bool) -> tuple[torch.Tensor, ...]:
        return _call(new, *sizes, **options)

    def state(*shape: int) -> dict[str, Any]:
        return {"initial_state": new.wide(*shape, key="state"), "return_state": True}

    def equal_keys(tokens: int) -> tuple[torch.Tensor, ...]:
        query, key, *others, gate, beta = call(1, tokens)
        key = key[:, :1].detach().repeat(1, tokens, 1, 1).requires_grad_(new.grad)
        kept = (torch.full_like(t, x).requires_grad_(new.grad) for t, x in ((gate, 0), (beta, 1)))
        return query, key, *others, *kept

    ends = torch.tensor([0, 3, 3, 20, 21], device=new.device, dtype=torch.int32)
    normed = {"qk_norm": True}
    return [
        # Whatever is multiplied in few tokens does not overflow float32.
        Sample("two_tokens", call(2, 2)),
        Sample("one_token", call(2, 1, 4, 2, 12, 20), normed | state(2, 4, 12, 20)),
        Sample("first_token_channels", call(2, 1, per_channel=True), {"return_state": True}),
        Sample("plain", call(2, 7)),
        Sample("per_channel", call(2, 7, per_channel=True)),
        Sample("grouped", call(1, 9, 4, 2, 12, 20), normed | state(1, 4, 12, 20)),
        Sample("packed", (*call(1, 21),), {"cu_seqlens": ends, **state(4, 2, 8, 8)}),
        Sample("chunks", call(1, 150, 2, 1, 8, 24), state(1, 2, 8, 24)),
        Sample("channels", call(1, 70, 2, 1, 8, 24, per_channel=True), normed | state(1, 2, 8, 24)),
        Sample("scale_and_state", call(4, 5), {"scale": 0.5, "return_state": True}),
        Sample("float32_gate", call(2, 18, wide_gate=True), normed),
        # Powers of the matrix that a chunk inverts are large.
        Sample("equal_keys", equal_keys(18), normed),
        Sample("large", call(1, 130, 2, 1, 64, 80), normed),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, gate = torch.randn(1, 6, 2, 8, device=device), -torch.rand(1, 6, 2, device=device)
    falls, short = torch.tensor([0, 4, 3, 6], device=device), torch.tensor([0, 5], device=device)
    state, two = torch.zeros(1, 2, 8, 8, device=device), torch.tensor([0, 2, 6], device=device)
    pair = [t.repeat(2, *[1] * (t.dim() - 1)) for t in (x, gate)]
    double = {"query": pair[0], "key": pair[0], "value": pair[0], "gate": pair[1], "beta": pair[1]}
    bad = bad_changes(query=x, key=x, value=x, gate=gate, beta=gate)
    return [
        bad("rank", "query", "4 dims", query=x[0]),
        bad("key_heads", "key", "[1, 6, 2, 8]", "[1, 6, 1, 8]", key=x[:, :, :1]),
        bad("heads", "value", "3", "2 key heads", value=x.repeat(1, 1, 2, 1)[:, :, :3]),
        bad("tokens", "value", "tokens", "5", value=x[:, :5]),
        bad("gate", "gate", "[1, 6, 2, 8]", "[1, 6, 2, 4]", gate=x[..., :4]),
        bad("beta", "beta", "[1, 6, 2]", "[1, 6, 1]", beta=gate[..., :1]),
        bad("dtype", "value", "dtype", error=TypeError, value=x.bfloat16()),
        bad("state", "initial_state", "[1, 2, 8, 8]", initial_state=state[:, :1]),
        bad("state_dtype", "initial_state", "float32", error=TypeError, initial_state=state.half()),
        bad("states", "initial_state", "[2, 2, 8, 8]", initial_state=state, cu_seqlens=two),
        bad("not_monotone", "cu_seqlens", "monotone", cu_seqlens=falls),
        bad("wrong_end", "cu_seqlens", "6", "5", cu_seqlens=short),
        bad("packed_batch", "query", "batch of 1", "2", cu_seqlens=two, **double),
    ]


def _case(batch: int, tokens: int, heads: int, key_heads: int, size: int) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        call = _call(new, batch, tokens, heads, key_heads, size, size, wide_gate=True)
        return Sample("bench", call, {"qk_norm": True})

    rows = batch * tokens
    label = f"{batch}x{tokens}, {heads}/{key_heads} heads of {size}"
    elements = 2 * rows * (heads + key_heads) * size
    product = 2 * rows * heads * size * size
    return BenchCase.moving(label, make, (elements, 2 * elements), (3 * product, 8 * product))


SPEC = describe(gated_delta_rule, _eager, _samples, _bad_inputs, _case)(
    non_finite=(
        functools.partial(_eager, spread=True),
        functools.partial(_eager, recurrence=_of_pairs),
        _eager,
    ),
    bench_cases=(
        _case(2, 1024, 8, 8, 128).headlined(),
        _case(2, 1024, 16, 8, 128),
        _case(8, 1, 32, 16, 128),
        _case(1, 256, 4, 4, 64),
    ),
    summary="linear attention by the gated delta rule, a gate per head or per channel",
    autocast="keep",
    rows_are_independent=False,
    rounds_inside=True,
)
