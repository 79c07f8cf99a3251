"""Attention over a sequence that is sharded over a group: keys and values are sent in a ring.

In step ``s`` rank ``r`` has the keys and values of rank ``r - s``: what its queries may attend
and no more (``plan.py``). Those of step ``s + 1`` are sent while step ``s`` is computed. In the
backward they are sent again, and the gradients of a step go directly to rank ``r - s``, which adds
them in the order of the steps: each part has been rounded once, by the kernel, and no sum is sent.
Everything is exact but for rounding, the same bits in every run, and needs memory for two ranks'
keys and values besides its own.

Shapes: ``query [B, H, S / n, D]``, ``key [B, Hkv, S / n, D]``, ``value [B, Hkv, S / n, Dv]`` on
each of ``n`` ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedops._core import checks, dtypes, imports, philox
from fusedops._core.library import define_exchange
from fusedops.ops import _attention_math as math
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import Pending
from fusedops.parallel.context import _blocks, plan
from fusedops.parallel.context._blocks import Attended, Incoming, add_to, lse_of, take
from fusedops.parallel.context._checks import Request, request
from fusedops.parallel.context.layout import SequenceLayout, places
from fusedops.parallel.context.plan import ContextCall, ContextPattern, Step


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    balance: str = "zigzag",
    cu_seqlens: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    seed: Tensor | None = None,
) -> Any:
    """Attend over a sequence that is sharded over a group; keys and values are sent in a ring.

    The result is that of ``fusedops.attention`` on one process but for rounding. Every rank of the
    group calls it with shards of the same sequence (``shard_sequence``).

    Args:
        query: ``[B, H, S / n, D]``, the tokens of this rank.
        key: ``[B, Hkv, S / n, D]``, the dtype of ``query``.
        value: ``[B, Hkv, S / n, Dv]``.
        group: of the ``n`` ranks.
        dropout_p: probability with which a weight is dropped.
        is_causal: forbid later tokens.
        balance: which tokens a rank has: ``"zigzag"``, ``"document"`` or ``"contiguous"``
            (``shard_sequence``).
        cu_seqlens: ``[documents + 1]``, where documents end in the sequence, from 0 on, counted
            through the batch; no token attends another document. Integers, or a tensor, best on the
            CPU: the host reads it.
        scale: factor of the scores, ``D ** -0.5`` by default.
        enable_gqa: let ``Hkv`` be a divisor of ``H``.
        window: ``(left, right)`` tokens of the sequence around the query's own; -1 is unbounded.
        softcap: bound of the scores: ``softcap * tanh(score / softcap)``.
        alibi_slopes: ``[H]`` or ``[B, H]``: adds ``-slope * |j - i|``, by places in the sequence.
        sinks: ``[H]``: one more score in each row's denominator. Its gradient is that of this
            rank's rows: a part of a sum over ranks.
        return_lse: also return the log-sum-exp of each row.
        seed: of dropout, int64 ``[2]``, the same on all ranks; by default two numbers of the first
            rank's generator. ``[5]``: with the indices of the scores ``[B, H, S, S]`` in a larger
            batch (``_core/philox.py``).

    Returns:
        ``[B, H, S / n, Dv]`` of query's dtype, laid out in memory as ``[B, S / n, H, Dv]``; with
        ``return_lse`` also the log-sum-exp ``[B, H, S / n]`` in float32 (float64 for float64).

    Raises:
        ValueError: a shape, device or option does not fit.
        TypeError: an argument is no tensor or process group, or its dtype does not fit.
        UnsupportedError: ``alibi_slopes`` requires a gradient, or has a line per row while rows
            have documents of their own.

    Note:
        Parts are summed in float32 (float64 for float64) and rounded once; gradients of keys and
        values once more, where they were computed. A rank sends each of the others the keys and
        values that it needs, which a causal mask, a window and documents reduce, and in the
        backward once more, and receives the same bytes of gradients. The next step is sent while
        one is computed. The same bits in every run. Dropout drops the scores that
        ``fusedops.attention`` of the complete sequences drops for the same seed.
        No second derivative: asking for one is an ``UnsupportedError``.

    Reference:
        Liu et al.: Ring Attention with Blockwise Transformers, arXiv:2310.01889; Brandon et al.:
        Striped Attention, arXiv:2311.09431 (balance).

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import ring_attention
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q = k = torch.zeros(1, 1, 2, 4)
        >>> v = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).view(1, 1, 2, 2)
        >>> ring_attention(q, k, v, dist.group.WORLD, is_causal=True)
        tensor([[[[1.0000, 0.0000],
                  [0.5000, 0.5000]]]])
        >>> dist.destroy_process_group()
    """
    a, _ = request(
        "ring_attention",
        (query, key, value),
        shards=(group, balance, cu_seqlens),
        flags={"enable_gqa": enable_gqa, "is_causal": is_causal, "return_lse": return_lse},
        dropout=(dropout_p, seed),
        scores=(window, softcap, alibi_slopes, sinks, scale),
    )
    output, lse, *_ = _RING(*a)
    return (output, lse) if return_lse else output


class _Ring:
    """What forward and backward have in common: who sends what to whom."""

    def __init__(self, a: Request) -> None:
        self.group = collectives.group_of(a.group)
        self.rank, self.ranks = self.group.rank(), self.group.size()
        batch, _, tokens, _ = a.query.shape
        layout = SequenceLayout(tokens * self.ranks, self.ranks, a.balance, tuple(a.ends))
        self.packed = batch > 1 and not layout.complete_rows
        if batch > 1 and not self.packed:
            layout = layout._replace(ends=(0, layout.length))  # all rows alike
        self.layout = layout
        self.pattern = ContextPattern(a.window_left, a.window_right, a.alibi_slopes is not None)
        seed = a.seed
        if seed is not None:
            seed = philox.placed_scores(seed, a.query.shape[1], layout.length)
        self.query, self.key, self.value = (self.joined(tensor) for tensor in a[:3])
        self._request = a._replace(seed=seed)

    def joined(self, tensor: Tensor) -> Tensor:
        """Return ``[B, H, S, ...]`` as one row ``[1, H, B * S, ...]`` where rows are not alike."""
        return tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0) if self.packed else tensor

    def parted(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Undo ``joined``."""
        if not self.packed:
            return tensor
        return tensor.squeeze(0).unflatten(1, (like.shape[0], -1)).transpose(0, 1)

    def steps(self) -> Iterator[tuple[int, Step, Tensor, Tensor]]:
        """Yield shift, step, keys and values, while those of the next step are sent."""
        here = self.step(self.rank, self.rank)
        pending = self._send_keys(1)
        yield 0, here, take(self.key, here.columns), take(self.value, here.columns)
        for shift in range(1, self.ranks):
            assert pending is not None
            key, value = self._unpacked(pending.wait())
            pending = self._send_keys(shift + 1)
            yield shift, self.step(self.rank, self.source(shift)), key, value

    def step(self, rank: int, source: int) -> Step:
        """Return what a rank does with the keys of another."""
        return plan.step(self.layout, self.pattern, rank, source)

    def target(self, shift: int) -> int:
        """Return the rank that receives this rank's keys."""
        return (self.rank + shift) % self.ranks

    def source(self, shift: int) -> int:
        """Return the rank whose keys arrive."""
        return (self.rank - shift) % self.ranks

    def calls(
        self, shift: int, step: Step, key: Tensor, value: Tensor
    ) -> Iterator[tuple[ContextCall, Request]]:
        """Yield the calls of a step and their requests, with the dropout of one process."""
        seed = self._request.seed
        if seed is not None:
            rows = places(self.layout, self.rank, seed.device)
            columns = take(places(self.layout, self.source(shift), seed.device), step.columns, 0)
        for call in step.calls:
            if self._request.seed is not None:
                tokens = take(rows, call.rows, 0), take(columns, call.columns, 0)
                seed = philox.at_tokens(self._request.seed, *tokens, self.layout.length)
            query, keys = take(self.query, call.rows), take(key, call.columns)
            values = take(value, call.columns)
            yield call, self._request._replace(query=query, key=keys, value=values, seed=seed)

    def _send_keys(self, shift: int) -> Pending | None:
        """Start to send keys and values; nothing after the last step."""
        if shift == self.ranks:
            return None
        to, source = self.target(shift), self.source(shift)
        columns = self.step(to, self.rank).columns
        parts = take(self.key, columns), take(self.value, columns)
        tokens = self.step(self.rank, source).tokens
        return self._exchange(parts, to, source, tokens, f"keys {shift}")

    def send_gradients(self, shift: int, grads: Sequence[Tensor]) -> Pending:
        """Start to send gradients of keys and values to the ranks that have these."""
        to, source = self.source(shift), self.target(shift)
        tokens = self.step(source, self.rank).tokens
        return self._exchange(grads, to, source, tokens, f"gradients {shift}")

    def receive_gradients(self, shift: int, pending: Pending) -> tuple[Any, tuple[Tensor, Tensor]]:
        """Return the tokens whose gradients of keys and values arrive, and the gradients."""
        columns = self.step(self.target(shift), self.rank).columns
        return columns, self._unpacked(pending.wait())

    def _exchange(
        self, parts: Sequence[Tensor], to: int, source: int, tokens: int, label: str
    ) -> Pending:
        sent = torch.cat([part.reshape(-1) for part in parts])
        out = sent.new_empty(tokens * self._width)
        return collectives.send_receive(
            sent,
            self.group,
            to=to if sent.numel() else None,
            source=source if out.numel() else None,
            out=out,
            label=label,
        )

    @property
    def _width(self) -> int:
        """Elements of a token's keys and values."""
        batch, heads, _, size = self.key.shape
        return batch * heads * (size + self.value.shape[3])

    def _unpacked(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values in a received buffer."""
        batch, heads, _, size = self.key.shape
        shape = (batch, heads, flat.numel() // max(1, self._width))
        keys = batch * heads * shape[2] * size
        return flat[:keys].view(*shape, size), flat[keys:].view(*shape, self.value.shape[3])


def _forward(*args: Any) -> tuple[Tensor, ...]:
    a = Request(*args)
    ring = _Ring(a)
    attended = Attended(ring.query, ring.value.shape[3])
    for shift, step, key, value in ring.steps():
        with collectives.computing(f"attend {shift}"):
            for call, call_request in ring.calls(shift, step, key, value):
                _blocks.forward(call, call_request, attended)
    if a.sinks is not None:
        attended.add_sinks(a.sinks)
    output, remainder = math.rounded(attended.output, a.query.dtype, a.keep_remainder)
    results = (output, lse_of(attended.parts), remainder, attended.parts)
    output, lse, remainder, parts = (
        ring.parted(result, a.query) if result.numel() else result for result in results
    )
    output = math.heads_inside(output)
    return output, lse.contiguous(), remainder.contiguous(), parts.contiguous()


def _fake(*args: Any) -> tuple[Tensor, ...]:
    a = Request(*args)
    query, wide = a.query, dtypes.statistics_dtype(a.query.dtype)
    batch, heads, rows, _ = query.shape
    shape = (batch, heads, rows, a.value.shape[3])
    has_remainder = math.keeps(query.dtype, a.keep_remainder)
    return (
        math.new_heads_inside(query, *shape),
        query.new_empty((batch, heads, rows), dtype=wide),
        query.new_empty(shape if has_remainder else (0,)),
        query.new_empty((batch, heads, rows, 2), dtype=wide),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, remainder, parts = output
    ctx.save_for_backward(*inputs[:6], out, remainder, parts)
    ctx.numbers = inputs[6:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_output: Any, grad_lse: Any, *_: Any) -> tuple[Any, ...]:
    *inputs, output, remainder, parts = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    grads = _RING_BACKWARD(grad_output, grad_lse, output, remainder, parts, *inputs, *ctx.numbers)
    grad_sinks = None if inputs[4] is None else grads[3]
    return *grads[:3], None, grad_sinks, None, *[None] * len(ctx.numbers)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    a = Request(*args[5:])
    ring = _Ring(a)
    incoming = Incoming(*args[:5]).map(ring.joined)
    inputs = ring.query, ring.key, ring.value
    grads = [torch.zeros_like(tensor, dtype=incoming.parts.dtype) for tensor in inputs]
    pending = None
    for shift, step, key, value in ring.steps():
        with collectives.computing(f"differentiate {shift}"):
            step_grads = _step_gradients(ring, shift, step, key, value, incoming, grads[0])
        if shift == 0:
            _add_gradients(grads, step.columns, step_grads)
            continue
        if pending is not None:
            _add_gradients(grads, *ring.receive_gradients(shift - 1, pending))
        pending = ring.send_gradients(shift, [grad.to(key.dtype) for grad in step_grads])
    if pending is not None:
        _add_gradients(grads, *ring.receive_gradients(ring.ranks - 1, pending))
    results = (
        math.heads_inside(ring.parted(grad, tensor).to(tensor.dtype))
        for grad, tensor in zip(grads, a[:3], strict=True)
    )
    return *results, _sinks_gradient(a.sinks, incoming)


def _step_gradients(
    ring: _Ring,
    shift: int,
    step: Step,
    key: Tensor,
    value: Tensor,
    incoming: Incoming,
    grad_query: Tensor,
) -> list[Tensor]:
    """Add a step's gradient of the queries, and return those of its keys and values."""
    grads: list[Tensor] = []
    for call, call_request in ring.calls(shift, step, key, value):
        grad, *others = _blocks.backward(call, call_request, incoming)
        add_to(grad_query, call.rows, grad)
        if len(step.calls) == 1 and call.columns == ((0, key.shape[2]),):
            return others  # of all keys and values, rounded once
        if not grads:
            grads = [torch.zeros_like(x, dtype=grad_query.dtype) for x in (key, value)]
        for into, part in zip(grads, others, strict=True):
            add_to(into, call.columns, part)
    return grads or [key, value]  # no call: of no token


def _add_gradients(grads: Sequence[Tensor], columns: Any, parts: Sequence[Tensor]) -> None:
    for into, part in zip(grads[1:], parts, strict=True):
        add_to(into, columns, part)


def _sinks_gradient(sinks: Tensor | None, rows: Incoming) -> Tensor:
    """Return the gradient ``-sum(exp(sink - lse) * delta)`` from the rows here."""
    if sinks is None:
        return rows.parts.new_zeros(0)
    delta = (rows.unrounded * rows.grad_output).sum(-1)
    if rows.grad_lse is not None:
        delta = delta - rows.grad_lse
    weights = torch.exp(sinks[:, None] - lse_of(rows.parts))
    return -(weights * delta).sum((0, 2))


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    incoming, a = Incoming(*args[:5]), Request(*args[5:])
    grads = [math.new_heads_inside(tensor, *tensor.shape) for tensor in a[:3]]
    return *grads, incoming.parts.new_empty(0 if a.sinks is None else a.sinks.shape)


def _register_flops() -> None:
    """Let torch's ``FlopCounterMode`` count this rank's share of all pairs of tokens.

    As for the other ops, causality and windows do not lessen the count, and documents do.
    """
    from torch.utils import flop_counter

    def pairs(a: Request) -> Any:
        """Return pairs of query and key, of all heads; tensors of ``a`` are their shapes."""
        squares = sum((end - start) ** 2 for start, end in pairwise(a.ends))
        return squares // collectives.group_of(a.group).size() * a.query[1]

    def forward(*args: Any, **_: Any) -> Any:
        a = Request(*args)
        return 2 * pairs(a) * (a.query[3] + a.value[3])

    def backward(*args: Any, **_: Any) -> Any:
        a = Request(*args[5:])
        return 2 * pairs(a) * (3 * a.query[3] + 2 * a.value[3])

    formula: Any = flop_counter.register_flop_formula  # its type knows one signature alone
    formula(torch.ops.fusedops.ring_attention)(forward)
    formula(torch.ops.fusedops.ring_attention_backward)(backward)


def _refuse(ctx: Any, *_: Any) -> None:
    raise checks.UnsupportedError(
        "ring_attention: has no second derivative; ulysses_attention has one"
    )


_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed,"
    " SymInt[] ends, str balance, float dropout_p, float scale, SymInt window_left,"
    " SymInt window_right, float softcap, bool keep_remainder, str group"
)
_RING = define_exchange(
    "ring_attention",
    f"({_INPUTS}) -> (Tensor output, Tensor lse, Tensor remainder, Tensor lse_parts)",
    kernel=_forward,
    fake=_fake,
    setup_context=_save,
    backward=_gradients,
)
_RING_BACKWARD = define_exchange(
    "ring_attention_backward",
    "(Tensor grad_output, Tensor? grad_lse, Tensor output, Tensor remainder, Tensor lse_parts,"
    f" {_INPUTS}) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)",
    kernel=_backward,
    fake=_backward_fake,
    setup_context=lambda ctx, inputs, output: None,
    backward=_refuse,
)
imports.after("torch.utils.flop_counter", _register_flops)
