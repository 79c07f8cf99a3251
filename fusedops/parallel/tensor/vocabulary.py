"""Vocabulary parallelism: the embedding, and the loss, whose logits are never gathered.

Each rank has a range of consecutive entries of the vocabulary. The embedding looks up the tokens in
its range, 0 for others, and sums over the ranks. The loss computes the logits of its range as
``fusedops.linear_cross_entropy`` does, chunk by chunk inside the product; the ranks exchange four
numbers per token, of which j counts the entries in the range:

    m_r = max_j y_j,   S_r = sum_j exp(y_j - m_r),   k_r = (1 - s) [t in range] + s V_r / V
    c_r = (1 - s) (y_t - m_r) [t in range] + s sum_j (y_j - m_r) / V
    m = max_r m_r,   S = sum_r exp(m_r - m) S_r
    loss = log S - sum_r (c_r + k_r (m_r - m)) + z (m + log S)^2

with y the logits, V the vocabulary size, V_r that of the range, t the target, s the label smoothing
and z the z-loss. What all logits have in common cancels before anything is rounded. The backward
needs m and S and communicates nothing. Log-probabilities and entropies of tokens need m, S, the
mean of y - m by the probabilities, and y_t - m: four numbers as well.

Reference: Shoeybi et al.: Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fusedops._core import checks
from fusedops._core.labels import IGNORE_INDEX
from fusedops.ops import _cross_entropy_math as formulas
from fusedops.ops.linear_cross_entropy import DEFAULT_CHUNK, check_chunks, keeps_logits
from fusedops.ops.token_logprobs import TokenLogprobs, result
from fusedops.parallel.comm import collectives
from fusedops.parallel.tensor.async_linear import lowered
from fusedops.parallel.tensor.layers import ParallelLayer, check_type, distribute, local

# Local targets that are in the range of another rank, or ignored.
_ELSEWHERE, _IGNORED = -1, -2


def vocab_range(rank: int, ranks: int, vocab_size: int) -> range:
    """Return the range of the vocabulary of a rank: torch's chunks; the last may be shorter."""
    size = -(-vocab_size // ranks)
    return range(min(rank * size, vocab_size), min((rank + 1) * size, vocab_size))


def vocab_parallel_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup,
    bias: torch.Tensor | None = None,
    *,
    vocab_size: int,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    recompute: bool | None = None,
) -> torch.Tensor:
    """Compute ``fusedops.linear_cross_entropy`` with the classes sharded over ranks.

    ``hidden`` ``[..., hidden_size]`` and ``target`` ``[...]`` are the same on every rank; the
    gradient of ``hidden`` is this rank's part of a sum, so it is the result of
    ``to_tensor_parallel``. ``weight`` and ``bias`` are the rows in ``vocab_range``
    of this rank. Targets and ``vocab_size`` count all classes. The options are those of
    ``linear_cross_entropy``.

    Returns:
        One number, or ``[...]`` for ``"none"``, the same on every rank: float32 (float64 for
        float64).

    Raises:
        ValueError: a shape or option does not fit, or (CPU) a target is no class.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Sends ``16 * tokens`` bytes to each rank in the forward, nothing in the backward, and is
        deterministic: ranks are joined in their order. Differentiable once.
    """
    op = "vocab_parallel_cross_entropy"
    formulas.check_options(op, ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_chunks(op, chunk_size, recompute)
    local_target = _local_target(op, hidden, weight, target, group, vocab_size, ignore_index)
    keep = keeps_logits(recompute, hidden, weight, bias)
    numbers = (label_smoothing, z_loss, softcap or 0.0, chunk_size or DEFAULT_CHUNK, keep)
    tensors = lowered(hidden, weight, bias)
    loss = _VocabParallelCrossEntropy.apply(*tensors, local_target, group, vocab_size, numbers)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (local_target != _IGNORED).sum()


def _local_target(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup,
    vocab_size: int,
    ignore_index: int,
) -> torch.Tensor:
    """Check the tensors; return the targets as classes of this rank."""
    checks.tensor(op, "hidden", hidden)
    formulas.check_target(op, target, "hidden", hidden)
    vocab = vocab_range(group.rank(), group.size(), vocab_size)
    shape = (len(vocab), hidden.shape[-1])
    checks.shape(op, "weight", weight, shape, "vocabulary of this rank, features of hidden")
    if checks.readable(target):
        formulas.check_range(op, target, vocab_size, ignore_index)
    is_local = (target >= vocab.start) & (target < vocab.stop)
    local_target = torch.where(is_local, target - vocab.start, _ELSEWHERE)
    return torch.where(target == ignore_index, _IGNORED, local_target)


def vocab_parallel_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup,
    bias: torch.Tensor | None = None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    return_entropy: bool = False,
    chunk_size: int | None = None,
    recompute: bool | None = None,
) -> TokenLogprobs:
    """Compute ``fusedops.linear_token_logprobs`` with the classes sharded over ranks.

    The tensors are those of ``vocab_parallel_cross_entropy``, the options those of
    ``linear_token_logprobs``.

    Returns:
        What ``linear_token_logprobs`` does, the same on every rank.

    Raises:
        ValueError: a shape or option does not fit, or (CPU) a target is no class.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Sends ``16 * tokens`` bytes to each rank in the forward, nothing in the backward, and is
        deterministic: ranks are joined in their order. Differentiable once.
    """
    op = "vocab_parallel_token_logprobs"
    cap = formulas.check_token_options(op, temperature, softcap, ignore_index)
    check_chunks(op, chunk_size, recompute)
    local_target = _local_target(op, hidden, weight, target, group, vocab_size, ignore_index)
    keep = keeps_logits(recompute, hidden, weight, bias)
    options = (_IGNORED, temperature, cap, chunk_size or DEFAULT_CHUNK, keep, True)
    lower = lowered(hidden, weight, bias)
    tokens, statistics = _VocabParallelTokens.apply(*lower, local_target, group, options)
    return result(tokens, statistics, return_entropy)


class _VocabParallelTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight, bias, target, group, options = args
        tokens, statistics, logits = torch.ops.fusedops.linear_token_logprobs(
            hidden, weight, target, bias, *options
        )
        largest, sums, mean, hit = statistics.unbind(-1)
        # The target's logit relative to the largest here, 0 only where it is that; -inf elsewhere.
        below = (tokens[0] + sums.log()).clamp(max=-torch.finfo(sums.dtype).tiny)
        label = below.masked_fill(hit > 0, 0.0).masked_fill(target < 0, -torch.inf)
        local_terms = torch.stack((largest, sums, mean, label)).unsqueeze(0)
        gathered = collectives.all_gather(local_terms, group, label="log-probabilities").wait()
        parts, sums, means, labels = gathered.unbind(1)
        largest = parts.amax(0)
        gaps = parts - largest
        shares = gaps.exp() * sums
        total = shares.sum(0)
        mean = (shares * (means + gaps)).sum(0) / total
        label, log_total = (labels + gaps).amax(0), total.log()
        ignored = target == _IGNORED
        tokens = torch.stack((label - log_total, log_total - mean, largest + log_total))
        statistics = torch.stack((largest, total, mean, (label >= 0).to(mean.dtype)), -1)
        statistics = statistics.masked_fill(ignored.unsqueeze(-1), 0.0)
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, target, statistics, logits)
        ctx.mark_non_differentiable(statistics)
        return tokens.masked_fill(ignored, 0.0), statistics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, target, statistics, logits = ctx.saved_tensors
        tensors = (grads[0], hidden, weight, target, bias, statistics, logits)
        mask = list(ctx.needs_input_grad[:3])
        results = torch.ops.fusedops.linear_token_logprobs_backward(*tensors, *ctx.options, mask)
        return *results, None, None, None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        group: dist.ProcessGroup,
        vocab_size: int,
        numbers: tuple[float, float, float, int, bool],
    ) -> torch.Tensor:
        smoothing, z_loss, softcap, chunk_size, keep = numbers
        ctx.numbers, ctx.vocab_size = numbers, vocab_size
        options = (_IGNORED, smoothing, 0.0, softcap, "none", chunk_size, keep, vocab_size)
        loss, _, statistics, logits = torch.ops.fusedops.linear_cross_entropy(
            hidden, weight, target, bias, *options
        )
        largest, sums = statistics.unbind(-1)
        share = (1.0 - smoothing) * (target >= 0).to(loss.dtype)
        share = share + smoothing * len(weight) / vocab_size
        local_terms = torch.stack((largest, sums, sums.log() - loss, share)).unsqueeze(0)
        gathered = collectives.all_gather(local_terms, group, label="loss").wait()
        parts, sums, terms, shares = gathered.unbind(1)
        largest = parts.amax(0)
        sums = (torch.exp(parts - largest) * sums).sum(0)
        loss = sums.log() - (terms + (parts - largest) * shares).sum(0)
        if z_loss > 0.0:
            loss = loss + z_loss * (largest + sums.log()).square()
        statistics = torch.stack((largest, sums), -1)
        ctx.save_for_backward(hidden, weight, bias, target, statistics, logits)
        return loss.masked_fill(target == _IGNORED, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, target, statistics, logits = ctx.saved_tensors
        smoothing, z_loss, softcap, chunk_size, keep = ctx.numbers
        options = (_IGNORED, smoothing, z_loss, softcap, "none", chunk_size, keep, ctx.vocab_size)
        mask = list(ctx.needs_input_grad[:3])
        results = torch.ops.fusedops.linear_cross_entropy_backward(
            grads[0], hidden, weight, target, bias, statistics, logits, *options, mask
        )
        return *results, None, None, None, None


class VocabularyEmbedding(ParallelLayer):
    """An embedding whose vocabulary is sharded over the ranks.

    Made by ``VocabularyEmbedding.of``. ``weight`` ``[V, H]`` is ``Shard(0)``; the ranks need not
    divide the vocabulary.
    """

    vocab_size: int
    padding_idx: Any  # int or ``None``

    @classmethod
    def of(
        cls, module: nn.Embedding, mesh: DeviceMesh, *, sequence: bool = False
    ) -> VocabularyEmbedding:
        """Return ``module`` with its vocabulary sharded.

        What is tied to its weight is tied again by the caller: ``head.weight = embedding.weight``.

        Raises:
            ValueError: a rank would have no rows, or ``module`` has ``max_norm``, ``sparse`` or
                ``scale_grad_by_freq``.
            TypeError: ``module`` is no ``torch.nn.Embedding``.
        """
        self = cls(mesh, sequence=sequence)
        op = cls.__name__
        check_type(op, module, nn.Embedding)
        for option in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(module, option):
                checks.fail(op, option, "off: the vocabulary is sharded", getattr(module, option))
        self.weight = distribute(op, "weight", module.weight, mesh, 0, uneven=True)
        self.vocab_size, self.padding_idx = module.num_embeddings, module.padding_idx
        return self.train(module.training)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``[B, S, H]`` for ``[B, S]``, the same on every rank; or ``[B, s, H]``."""
        vocab = vocab_range(self.mesh.get_local_rank(), self.mesh.size(), self.vocab_size)
        if checks.readable(tokens) and tokens.numel():
            least, largest = (int(bound) for bound in tokens.aminmax())
            if least < 0 or largest >= self.vocab_size:
                got = least if least < 0 else largest
                checks.fail("VocabularyEmbedding", "tokens", f"in [0, {self.vocab_size})", got)
        elsewhere = (tokens < vocab.start) | (tokens >= vocab.stop)
        rows = (tokens - vocab.start).masked_fill(elsewhere, 0)
        padding = self.padding_idx - vocab.start if self.padding_idx in vocab else None
        output = F.embedding(rows, local(self.weight), padding)
        output = output.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return self.reduce(output)


class VocabParallelProjection:
    """How a head with a sharded vocabulary computes logits.

    ``vocab`` is the range of this rank, and ``max_local_size`` the size of the largest range.
    """

    def __init__(self, group: dist.ProcessGroup, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.vocab = vocab_range(group.rank(), group.size(), vocab_size)
        self.max_local_size = len(vocab_range(0, group.size(), vocab_size))
        self._group = group

    @torch.no_grad()
    def local_logits(self, hidden: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        """Return the logits of this rank's range; ``hidden`` is the same on every rank."""
        return F.linear(hidden, local(weight), local(bias))

    @torch.no_grad()
    def gather_logits(self, local_logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the vocabulary."""
        padded = F.pad(local_logits, (0, self.max_local_size - local_logits.shape[-1]))
        logits = collectives.all_gather(padded, self._group, dim=-1, label="logits").wait()
        return logits[..., : self.vocab_size]

    @torch.no_grad()
    def topk(self, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest values over the vocabulary, without gathering all of them.

        Args:
            values: ``[R, local vocabulary]``.
            count: how many of each row.

        Returns:
            ``[R, count]``, the largest first, and their tokens. Each rank sends 16 bytes per
            candidate.
        """
        dtype, candidates = values.dtype, min(count, self.max_local_size)
        if values.shape[-1] < candidates:
            values = F.pad(values, (0, candidates - values.shape[-1]), value=-torch.inf)
        values, tokens = largest(values, candidates)
        # Tokens are exact in float64, and so are logits.
        pairs = torch.stack((values.double(), tokens.double() + self.vocab.start), -1)
        if len(pairs):
            pairs = collectives.all_gather(pairs, self._group, dim=1, label="top tokens").wait()
        values, places = largest(pairs[..., 0], min(count, pairs.shape[1]))
        return values.to(dtype), pairs[..., 1].gather(-1, places).long()


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values of the last dim and their indices; of one: the first of equals."""
    if count > 1:
        return values.topk(count, sorted=True)
    best, place = values.max(-1, keepdim=True)
    return best, place
