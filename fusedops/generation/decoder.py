"""Incremental inference: each token passes the model once, and the logits after it come out.

Two phases: ``prefill`` takes the prompts, complete and of any lengths, ``step`` one token of each.
Prompts are concatenated without padding, so that a row's numbers do not depend on the others. A
``Decoder`` changes nothing of the model: its cache and what it wants of a call are arguments of the
forward, so that several decoders, in several threads, may share one model.

Letters of shapes: R rows, T tokens of a call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedops._core import checks
from fusedops._core.device_tensors import device_tensor
from fusedops.generation.cache import KVCache, KVCacheCall
from fusedops.generation.options import Options
from fusedops.generation.ranks import BatchShard
from fusedops.generation.recorded_step import RecordedStep
from fusedops.generation.sampling import gathers_logits
from fusedops.models import Transformer
from fusedops.models.inputs import check_inputs
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.models.parallelization.tensor_parallel import VocabParallelHead
from fusedops.parallel.tensor.vocabulary import VocabParallelProjection

_OP = "Decoder"


class Decoder:
    """A model with the KV cache of some sequences that it generates.

    Args:
        model: a causal ``Transformer``, or the engine of one that ``parallelize`` returned. Every
            process makes the same calls: those of ``dp``, ``cp`` and ``ep`` with rows of their own,
            those of ``tp`` and ``pp`` with the same. With ``pp`` the ranks of the last stage get
            logits, the others ``[R, 0]``.
        max_seq_len: most tokens that a row may have.
        shard_logits: if ``tp`` shards the vocabulary, give each rank the logits of its own shard.

    Attributes:
        cache: keys and values of the tokens so far.
        vocab_projection: of the shard whose logits are given then; ``None``: logits are of the
            whole vocabulary.

    Raises:
        TypeError: ``model`` is no ``Transformer``, or a size no integer.
        ValueError: ``model`` is no decoder, a size is less than 1, or ``max_seq_len`` is above the
            model's table of positions.
        UnsupportedError: ``model`` has ``domain_experts``.
    """

    def __init__(
        self,
        model: Transformer | TrainEngine,
        max_seq_len: int,
        *,
        shard_logits: bool = False,
    ) -> None:
        engine = check_model(_OP, model)
        self.model = engine.model
        sizes = self.model.config
        checks.integer(_OP, "max_seq_len", max_seq_len, least=1)
        if sizes.position_tables and max_seq_len > sizes.seq_len:
            expected = f"at most {sizes.seq_len}, the model's table of positions"
            checks.fail(_OP, "max_seq_len", expected, max_seq_len)
        scaling = sizes.rope_scaling
        if scaling is not None and scaling.needs_length:
            limit = sizes.seq_len if scaling.kind == "dynamic" else scaling.original_seq_len
            if max_seq_len > limit:
                expected = f"at most {limit}, up to which rotations of kind {scaling.kind!r} stay"
                checks.fail(_OP, "max_seq_len", expected, max_seq_len)
        self._device = device_of(self.model)
        self.vocab_projection = vocab_projection(self.model) if shard_logits else None
        config = engine.config
        self._pipeline = engine.pipeline
        # FSDP2 counts the versions of what it gathers, and tensors of inference have none.
        self._mode = torch.inference_mode if engine.mesh is None else torch.no_grad
        # Ranks of tp share the tokens of sequences, or of experts, on whatever stage these are.
        self._token_multiple = config.tp if config.sp or sizes.sparse_layers else 1
        self._max_seq_len = max_seq_len
        self.cache = KVCache(max_seq_len)
        self._recorded = RecordedStep(self.model)
        if engine.mesh is not None:
            self._recorded.reason = "the model is on several processes"
        self._lengths = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._longest, self._has_equal_lengths = 0, False

    def prefill(self, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the prompts, int64 ``[tokens]`` each; returns the logits after them, ``[R, V]``.

        Discards the previous contents of the cache.

        Raises:
            ValueError: a prompt is empty, or longer than a row may come to.
            TypeError: one is no tensor of int64.
        """
        for number, prompt in enumerate(prompts):
            name = f"prompt {number}"
            checks.index_tensor(_OP, name, prompt, dtypes=(torch.int64,))
            if prompt.dim() != 1 or not len(prompt):
                checks.fail(_OP, name, "of shape [tokens], one token at least", list(prompt.shape))
        self._recorded.forget()
        self.cache = KVCache(self._max_seq_len)
        lengths = [len(prompt) for prompt in prompts]
        self._lengths = self._new(lengths)
        self._longest = max(lengths, default=0)
        self._has_equal_lengths = len(set(lengths)) == 1
        self.cache.reserve(self._longest)
        total = sum(lengths)
        padding = self._padding(total)
        cu_seqlens = self._new([0, *lengths, *([padding] if padding else [])]).cumsum(0).int()
        rows = self._new(range(len(lengths))).repeat_interleave(self._lengths)
        positions = torch.arange(total, device=self._device) - cu_seqlens[:-1].long()[rows]
        longest = max(self._longest, padding)
        call = KVCacheCall(self.cache, rows, positions, cu_seqlens, longest, self._lengths)
        tokens = torch.cat(list(prompts)).to(self._device) if prompts else self._new([])
        return self._run(tokens, call, cu_seqlens[1 : len(lengths) + 1].long() - 1)

    def step(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """Run the next token of each row, ``[R]`` int64; returns the logits after it, ``[R, V]``.

        Only the cost of attention grows with the length of the row.

        Raises:
            ValueError: these are not as many as there are rows, or a row is as long as it may be.
            TypeError: they are no tensor of int64.
        """
        checks.index_tensor(_OP, "tokens", tokens_R, dtypes=(torch.int64,))
        if len(tokens_R) != len(self._lengths):
            checks.fail(_OP, "tokens", f"one for each of {len(self._lengths)} rows", len(tokens_R))
        positions = self._lengths
        if self._longest + 1 > self.cache.capacity:
            self._recorded.forget()
        self.cache.reserve(self._longest + 1)
        self._longest += 1
        self._lengths = positions + 1
        rows = torch.arange(len(tokens_R), device=self._device)
        inputs = tokens_R, positions, self._lengths, rows
        if self._recorded.reason is None:  # else the model's forward does it
            check_inputs(self.model.config, tokens_R[None], {"positions": positions})
        with self._mode():
            return self._recorded.run(self._new_tokens, inputs, [*self.cache.tensors.values()])

    def select(self, rows: torch.Tensor) -> None:
        """Continue with these rows, in this order; some may be removed or repeated.

        Raises:
            ValueError: (CPU) one is no row.
            TypeError: they are no tensor of int64.
        """
        checks.index_tensor(_OP, "rows", rows, dtypes=(torch.int64,))
        count = len(self._lengths)
        expected = f"at least 0 and less than {count}, the rows so far"
        checks.indices(_OP, "rows", rows, count, expected)
        with self._mode():
            self.cache.select(rows, self._longest)
            self._lengths = self._lengths[rows]

    def _new_tokens(
        self,
        tokens_R: torch.Tensor,
        positions_R: torch.Tensor,
        lengths_R: torch.Tensor,
        rows_R: torch.Tensor,
    ) -> torch.Tensor:
        same = self._has_equal_lengths and len(rows_R) > 0
        call = KVCacheCall(self.cache, rows_R, positions_R, None, 1, lengths_R, same)
        return self._run(tokens_R, call, rows_R)

    def _new(self, values: Any) -> torch.Tensor:
        return device_tensor(list(values), torch.int64, self._device)

    def _padding(self, tokens: int) -> int:
        """Return how many tokens are missing for all ranks to have as many, and one at least."""
        return -tokens % self._token_multiple if tokens else self._token_multiple

    def _run(self, tokens_T: torch.Tensor, call: KVCacheCall, last_R: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens whose indices in the call are ``last_R``."""
        positions_T = call.positions
        padding = self._padding(len(tokens_T))
        if padding:
            tokens_T, positions_T = (F.pad(x, (0, padding)) for x in (tokens_T, positions_T))
        # A rank without rows computes the padding's logits, so that no communication is empty.
        indices_R = last_R if len(last_R) else self._new([0])
        inputs: dict[str, Any] = {
            "positions": positions_T,
            "kv_cache": call,
            "logits_to_keep": None if len(indices_R) == len(tokens_T) else indices_R,
            "gather_logits": self.vocab_projection is None,
            "dropless": True,
        }
        tokens_1T = tokens_T.unsqueeze(0)
        with self._mode():
            if call.cu_seqlens is None and self._recorded.reason is None:
                logits_1RV = self.model.compute(tokens_1T, **inputs)  # step has checked them
            elif self._pipeline is None:
                logits_1RV = self.model(tokens_1T, **inputs)
            else:
                logits_1RV = self._pipeline.logits(tokens_1T, **inputs)
            if logits_1RV is None:
                return torch.empty(len(last_R), 0, device=self._device)
            return logits_1RV[0, : len(last_R)]


def start(
    engine: TrainEngine, prompts: list[torch.Tensor], options: Options, copies: int
) -> tuple[BatchShard, Decoder, torch.Tensor]:
    """Run the prompts of this rank.

    Returns:
        This rank's shard of the prompts, the decoder with ``copies`` adjacent rows for each prompt,
        and the logits after these rows, ``[R, V]``.
    """
    shard_logits = not gathers_logits(options, vocab_projection(engine.model))
    max_seq_len = max(len(prompt) for prompt in prompts) + options.tokens
    decoder = Decoder(engine, max_seq_len, shard_logits=shard_logits)
    device = device_of(engine.model)
    batch = BatchShard(engine, len(prompts), device)
    logits_RV = decoder.prefill([prompts[number] for number in batch.prompts])
    if copies > 1:
        rows = torch.arange(len(batch.prompts), device=device).repeat_interleave(copies)
        decoder.select(rows)
        logits_RV = logits_RV[rows]
    return batch, decoder, logits_RV


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model or of a stage, which may have no embedding."""
    return next(model.parameters()).device


def vocab_projection(model: Any) -> VocabParallelProjection | None:
    """Return how ``tp`` shards the logits; ``None``: it does not, or another stage has the head."""
    return model.head.projection if isinstance(model.head, VocabParallelHead) else None


def check_model(op: str, given: Any) -> TrainEngine:
    """Return the engine of a model that can generate tokens; raise for all others.

    Raises:
        TypeError: ``given`` is neither a ``Transformer`` nor the engine of one.
        ValueError: the model is an encoder, or a sharded model without its engine.
        UnsupportedError: the model has ``domain_experts``.
    """
    engine = given if isinstance(given, TrainEngine) else TrainEngine(given)
    model = engine.model
    if not isinstance(model, Transformer):
        checks.fail_type(op, "model", "a fusedops.models.Transformer", model)
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    if engine.mesh is None and (is_sharded or len(model.layers) < model.config.num_layers):
        expected = "the TrainEngine that parallelize returned"
        checks.fail(op, "model", expected, "its sharded Transformer alone")
    if not model.config.causal or model.config.head != "causal":
        raise ValueError(f"{op}: model must be a decoder (causal), got an encoder")
    if model.config.domain_experts:
        raise checks.UnsupportedError(
            f"{op}: model must have no domain_experts, got {model.config.domain_experts}: of new "
            "tokens no domain is known"
        )
    return engine
