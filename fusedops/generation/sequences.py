"""``generate`` and ``stream``: sequences that go on from prompts, token by token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fusedops._core import checks
from fusedops._core.device_tensors import device_tensor
from fusedops.generation.beams import search
from fusedops.generation.decoder import check_model, device_of, start
from fusedops.generation.options import Generated, NonFiniteLogitsError, Options, Token
from fusedops.generation.sampling import NO_TOKEN, Sampler
from fusedops.models import TrainEngine, Transformer, TransformerConfig

_OP = "generate"


def generate(
    model: Transformer | TrainEngine, prompts: Any, options: Options | None = None, **more: Any
) -> list[Generated]:
    """Let a model go on from prompts.

    Args:
        model: a causal ``fusedops.models.Transformer``, in any dtype; or the engine of one that
            ``parallelize`` returned: all processes call this with the same arguments, and each
            gets all sequences. Dropout is off meanwhile.
        prompts: tokens, int64: ``[S]`` of one prompt, ``[B, S]``, or a list with the tokens of each
            (tensors or lists of numbers), which may have different lengths.
        options: how.
        **more: options by their names: ``tokens=50, temperature=0.8``.

    Returns:
        The sequences, those of the first prompt first.

    Raises:
        ValueError: a prompt is empty, or longer than the positions leave room for; a token is no
            word; options exclude each other.
        TypeError: an argument has the wrong type, or an option is unknown.
        NonFiniteLogitsError: the model's logits are NaN or infinite, on all processes.

    Note:
        Each token is computed once: keys and values are kept. Without sampling, tokens are those of
        a full forward of the sequence, up to ties within rounding. On the CPU a prompt's logits are
        the same bits alone and in any batch, unless the model has experts. Experts take all tokens
        that come, whatever their ``capacity_factor`` in training.

    Example:
        >>> import fusedops
        >>> from fusedops.models import Transformer, preset
        >>> model = Transformer(preset("tiny-llama"))
        >>> sequences = fusedops.generate(model, [[1, 2, 3], [4]], tokens=5)
        >>> [len(sequence.tokens) for sequence in sequences]
        [5, 5]
    """
    options = _options(options, more)
    engine, rows = check(model, prompts, options)
    if options.beams > 1:
        with _evaluating(engine.model):
            return search(engine, rows, options)
    samples = options.samples
    results = [Generated(number // samples, [], "") for number in range(len(rows) * samples)]
    for sequence, token, reason in _stream(engine, rows, options):
        results[sequence].tokens.append(token)
        if reason is not None:
            results[sequence] = results[sequence]._replace(reason=reason)
    return results


def stream(
    model: Transformer | TrainEngine, prompts: Any, options: Options | None = None, **more: Any
) -> Iterator[Token]:
    """Generate as ``generate`` does, but yield tokens as they are chosen.

    The arguments are checked at once. If the model is sharded over processes, all of them must
    consume all tokens. Beams are not supported: the best one is known only at the end.

    Returns:
        The tokens, in rounds of one token for each unfinished sequence.

    Raises:
        ValueError: there are ``beams``; the other errors are those of ``generate``.
        NonFiniteLogitsError: as ``generate``, after the tokens that could be chosen.

    Example:
        >>> from fusedops.generation import stream
        >>> from fusedops.models import Transformer, preset
        >>> model = Transformer(preset("tiny-gpt2"))
        >>> [token.reason for token in stream(model, [1, 2], tokens=3)]
        [None, None, 'length']
    """
    options = _options(options, more)
    if options.beams > 1:
        checks.fail("stream", "beams", "1: the best is known at the end only", options.beams)
    return _stream(*check(model, prompts, options), options)


def _stream(engine: TrainEngine, prompts: list[torch.Tensor], options: Options) -> Iterator[Token]:
    samples = options.samples
    device = device_of(engine.model)
    generated: list[list[int]] = [[] for _ in range(len(prompts) * samples)]
    unfinished = set(range(len(generated)))
    with _evaluating(engine.model):
        batch, decoder, logits = start(engine, prompts, options, samples)
        # Numbers of the sequences of this rank that are in the batch, in the order of its rows.
        sequences = [n * samples + sample for n in batch.prompts for sample in range(samples)]
        sampler = Sampler(
            options,
            [prompts[sequence // samples] for sequence in sequences],
            [options.stream(*divmod(sequence, samples)) for sequence in sequences],
            engine.model.config.vocab_size,
            device,
            decoder.vocab_projection,
        )
        while True:
            if batch.chooses:
                tokens = sampler.sample(logits)
            else:
                tokens = torch.empty(len(sequences), dtype=torch.int64, device=device)
            tokens = batch.from_last_stage(tokens)
            for sequence, token in batch.gather_tokens(tokens, sequences, samples).items():
                if sequence in unfinished:
                    if token == NO_TOKEN:
                        prompt = sequence // samples
                        position = len(prompts[prompt]) + len(generated[sequence])
                        raise NonFiniteLogitsError(prompt, position)
                    generated[sequence].append(token)
                    reason = _end_reason(sequence, generated[sequence], options)
                    if reason is not None:
                        unfinished.discard(sequence)
                    yield Token(sequence, token, reason)
            if not unfinished:
                return
            kept = [row for row, sequence in enumerate(sequences) if sequence in unfinished]
            # Finished rows are removed once they are half of the batch: copying stays cheap.
            if 2 * len(kept) <= len(sequences) and sequences:
                rows = device_tensor(kept, torch.int64, device)
                decoder.select(rows)
                sampler.select(rows)
                sequences, tokens = [sequences[row] for row in kept], tokens[rows]
            # A sequence that has ended may still be in the batch, also where it has no next token.
            logits = decoder.step(tokens.clamp(min=0))


def _end_reason(sequence: int, tokens: list[int], options: Options) -> str | None:
    """Return why a sequence ends after these tokens, or ``None``."""
    if tokens[-1] in options.stop:
        return "stop"
    if options.until is not None and options.until(sequence, tokens):
        return "until"
    return "length" if len(tokens) == options.tokens else None


# Modules that calls under way have set to evaluation, by the model: an entry for each call.
_LOCK = threading.Lock()
_EVALUATED: WeakKeyDictionary[nn.Module, list[list[nn.Module]]] = WeakKeyDictionary()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation; the last of several threads sets it back to what it was."""
    with _LOCK:
        calls = _EVALUATED.setdefault(model, [])
        calls.append([module for module in model.modules() if module.training])
        model.eval()
    try:
        yield
    finally:
        with _LOCK:
            # Only the entry of the first call has modules, and the last to end takes it.
            for module in calls.pop():
                module.training = True


def _options(options: Any, more: dict[str, Any]) -> Options:
    if options is not None and not isinstance(options, Options):
        checks.fail_type(_OP, "options", "fusedops.generation.Options", options)
    return replace(options or Options(), **more)


def _prompts(prompts: Any, options: Options) -> list[torch.Tensor]:
    """Return the tokens of each prompt, int64 on the CPU."""
    _check_tokens("prompts", prompts)
    is_row = isinstance(prompts, torch.Tensor) and prompts.dim() < 2
    rows: list[Any] = [prompts] if is_row else list(prompts)
    if rows and all(isinstance(row, int) for row in rows):
        rows = [rows]
    if not rows:
        checks.fail(_OP, "prompts", "one at least", "none")
    result = []
    for number, row in enumerate(rows):
        name = f"prompt {number}"
        _check_tokens(name, row)
        if not isinstance(row, torch.Tensor):
            for token in row:
                checks.integer(_OP, name, token)
            row = torch.tensor(row, dtype=torch.int64)
        checks.index_tensor(_OP, name, row, dtypes=(torch.int64, torch.int32))
        if row.dim() != 1:
            checks.fail(_OP, name, "of shape [tokens]", list(row.shape))
        if not len(row):
            checks.fail(_OP, name, "at least one token, to go on from", "none")
        result.append(row.detach().to("cpu", torch.int64))
    if not isinstance(options.seed, int) and len(options.seed) != len(result):
        checks.fail(_OP, "seed", f"one number, or {len(result)}, one a prompt", len(options.seed))
    return result


def _check_tokens(name: str, given: Any) -> None:
    if not isinstance(given, (torch.Tensor, list, tuple)):
        checks.fail_type(_OP, name, "tokens: a tensor of int64, or a list of numbers", given)


def check(model: Any, prompts: Any, options: Options) -> tuple[TrainEngine, list[torch.Tensor]]:
    """Return the engine of a model and the tokens of each prompt; raise what ``generate`` would."""
    engine = check_model(_OP, model)
    rows = _prompts(prompts, options)
    config: TransformerConfig = engine.model.config
    longest = max(len(row) for row in rows)
    if config.position_tables:
        room = config.seq_len - longest
        if options.tokens > room:
            hint = f"at most {room} tokens more" if room > 0 else "the prompt alone is too long"
            raise ValueError(
                f"{_OP}: the model's positions must have room for {longest} tokens of the prompt "
                f"and {options.tokens} more, got {config.seq_len}: {hint}"
            )
    for number, row in enumerate(rows):
        expected = f"tokens from 0 to {config.vocab_size - 1}, the words of the vocabulary"
        checks.indices(_OP, f"prompt {number}", row, config.vocab_size, expected)
    if options.beams > config.vocab_size:
        checks.fail(_OP, "beams", f"at most the {config.vocab_size} words", options.beams)
    for token in options.stop:
        if token >= config.vocab_size:
            checks.fail(_OP, "stop", f"tokens below {config.vocab_size}, the words", token)
    return engine, rows
