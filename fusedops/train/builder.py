"""Builds the parts of a run from its configuration, in the order of their dependencies."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fusedops._core import checks
from fusedops.checkpoint import Checkpointer, Guard, Restored
from fusedops.launch import config_table
from fusedops.launch.config_table import InputError
from fusedops.launch.processes import Ranks
from fusedops.launch.run_folder import lock_run_folder
from fusedops.memory import StepMemory, use_arena
from fusedops.memory.arena import StepArena
from fusedops.models import (
    ParallelConfig,
    Transformer,
    TransformerConfig,
    fill_huggingface,
    from_config,
    preset,
    to_config,
)
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.models.parallelization.parallelize import parallelize
from fusedops.nn.vectors import vector_patterns
from fusedops.optim import AdamW, OffloadedAdamW
from fusedops.parallel import make_mesh
from fusedops.parallel.sizes import check_divides
from fusedops.runtime import host
from fusedops.train import corpus as corpora
from fusedops.train import metrics, precision, resume
from fusedops.train.config import Config, check_parallel
from fusedops.train.data import Sequences
from fusedops.train.loggers import check_installed, make_loggers
from fusedops.train.metrics import Metrics
from fusedops.train.observe import MemoryRecording, make_recorder, snapshot_when_exhausted
from fusedops.train.precision import LossScale

# Vocabularies are rounded up, so that tensor parallelism can divide them.
_ROWS = 64


class Run:
    """A training run between two steps; its parts are built in the order of their dependencies.

    Args:
        config: of the run.
        ranks: that train together.
        resources: closes the files of the run when it ends.
    """

    def __init__(self, config: Config, ranks: Ranks, resources: contextlib.ExitStack) -> None:
        wide = bool(config.parallel.get("ep_deterministic"))
        # ``self.precision`` says what is computed in which dtype, and why, in a line
        resolved, self.precision = precision.resolve(config.precision, ranks.device, wide=wide)
        self.ranks = ranks
        self.config = config = replace(config, precision=resolved)
        # Before anything that all ranks take part in because their configurations say so.
        ranks.check_equal(config_table.flat(asdict(config)) | resume.versions())
        if config.tune_host and ranks.device.type == "cpu":
            host.tune_host()
        self.step = 0  # steps that were done
        self.position = 0  # sequences that were trained on
        self.skipped = 0  # the last steps, whose loss or gradients were not finite
        self.notes: tuple[str, ...] = ()  # what the user should know before the first step
        out = Path(config.out)
        corpus, sizes = _build_corpus(config, ranks, out, resources)
        # The model, and how the processes share its training
        self.parallel = build_parallel_model(config, sizes, ranks)
        model = self.parallel.model
        self.optimizer = _build_optimizer(config, self.parallel, ranks)
        self.scale = LossScale(config.precision)  # of the loss
        folder, keep = out / "checkpoints", config.checkpoint.keep
        self.checkpointer = Checkpointer(folder, model, self.optimizer, keep=keep, scale=self.scale)
        resources.enter_context(self.checkpointer)
        if isinstance(self.optimizer, OffloadedAdamW):
            resources.callback(self.optimizer.close)
        self.guard = Guard(self.checkpointer, **asdict(config.guard))
        self.checkpointer.add(guard=self.guard)
        # Sequences that are trained on, and those that are only evaluated, if there are any
        self.train, self.validation = _sequences(corpus, config)
        # Operations of a token, forward and backward
        self.flops = metrics.flops_per_token(sizes, config.data.seq_len)
        peak = config.log.peak_tflops * 1e12 or metrics.peak_flops(
            ranks.device, getattr(torch, config.precision.compute)
        )
        # Operations a second that all devices reach; a faster step raises it
        self.peak = ranks.total(peak)[0]
        # What its checkpoints say of it
        self.description = resume.description(config, sizes, corpus, self.parallel.config)
        if config.validation.sequences and self.validation is None:
            kept = len(corpus.validation)
            self.notes = (f"no validation: the {kept} tokens that are kept for it are no sequence",)
        self._resume()
        self.metrics: Metrics | None = None  # where figures go; ``None`` on all ranks but the first
        with ranks.together():
            if ranks.rank == 0:
                self.metrics = Metrics(out, step=self.step, loggers=make_loggers(config, self.step))
                resources.callback(self.metrics.close)
        # Of the time of all steps, and of what one step allocates
        self.recorder = make_recorder(config, self.parallel, ranks, resources)
        memory = StepMemory(model, self.optimizer)
        self.memory = MemoryRecording(out, config.log.memory_step, ranks.rank, memory)
        self.arena: StepArena | None = None  # the block of memory that steps run in
        if config.arena:
            try:  # all ranks have the same devices
                self.arena = use_arena(model)
            except checks.UnsupportedError as error:
                raise InputError(f"config: arena = true is not possible: {error}") from None
            resources.callback(self.arena.remove)
        if config.log.memory_snapshot and ranks.device.type == "cuda":
            resources.enter_context(snapshot_when_exhausted(out, ranks))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Return the context of a forward."""
        with self.section("forward"), precision.computing(self.config.precision, self.ranks.device):
            yield

    def section(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return what times a section of the step; nothing where nobody records."""
        return contextlib.nullcontext() if self.recorder is None else self.recorder.section(name)

    def resume_from(self, restored: Restored) -> None:
        """Go on from what a checkpoint restored."""
        self.step, self.position = restored.step, restored.data["sequences"]
        self.skipped = restored.extra["skipped"]
        # The checkpoint's options came back with its states; those of this configuration hold.
        for group in self.optimizer.param_groups:
            group.update(_options(self.config))

    def _resume(self) -> None:
        restored, notes = resume.load_last_good(self.checkpointer)
        if restored is None:
            return
        resume.check_model(restored.extra, self.description)
        self.resume_from(restored)
        notes += resume.changes(restored.step, restored.extra, self.description)
        self.notes = (*self.notes, *notes)


@contextlib.contextmanager
def build_run(config: Config, ranks: Ranks) -> Iterator[Run]:
    """Build a run, restore its last checkpoint if there is one, and close its files at the end.

    Raises:
        InputError: something that was asked for cannot be; on all ranks.
        CheckpointError: there are checkpoints, and none is good.
    """
    with contextlib.ExitStack() as resources:
        yield Run(config, ranks, resources)


def _build_corpus(
    config: Config, ranks: Ranks, out: Path, resources: contextlib.ExitStack
) -> tuple[corpora.Corpus, TransformerConfig]:
    """Lock the run's folder, tokenize, and return the tokens and the sizes that fit them."""
    cache = Path(config.data.cache) if config.data.cache else out / "cache"
    with ranks.together(), ranks.first() as is_first:
        if is_first:
            check_installed(config)
            _make_export(config)
            resources.enter_context(lock_run_folder(out))
            corpora.prepare(config.data, cache)
    with ranks.together():
        corpus = corpora.open_corpus(config.data, cache)
        sizes = model_config(config, corpus)
        corpora.check_ids(corpus, sizes.vocab_size, ranks.rank, ranks.size)
    read = {
        "tokens": corpus.identity,
        "tokens to train on": len(corpus.train),
        "tokens of the validation": len(corpus.validation),
        "vocabulary": corpus.vocab_size,
        "end of a text": corpus.end,
        "model": asdict(sizes),
    }
    ranks.check_equal(config_table.flat(read))
    return corpus, sizes


def _build_optimizer(config: Config, parallel: TrainEngine, ranks: Ranks) -> AdamW:
    no_decay = config.optimizer.no_decay
    if isinstance(no_decay, str):
        no_decay = vector_patterns(parallel.model)
    else:
        _check_no_decay(no_decay, parallel.model, ranks)
    try:  # all ranks find the same mistakes
        return parallel.optimizer(
            **_options(config),
            no_decay=no_decay,
            state_dtype=getattr(torch, config.optimizer.state_dtype),
            seed=config.seed,
        )
    except (ValueError, TypeError, checks.UnsupportedError) as error:
        raise InputError(str(error)) from None


def _make_export(config: Config) -> None:
    """Make the folder of the exported weights: an error must come before training, not after it.

    Raises:
        InputError: the folder cannot be made.
    """
    if not config.export:
        return
    try:
        Path(config.export).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"config: export cannot be made: {config.export}: {why}") from None


def model_config(config: Config, corpus: corpora.Corpus) -> TransformerConfig:
    """Return the sizes of the model: a preset's, with those that the configuration gives."""
    given = dict(config.model)
    load, name = given.pop("load", None), given.pop("preset", None)
    for key, value in (("load", load), ("preset", name)):
        if value is not None and not isinstance(value, str):
            raise InputError(f"model.{key} must be a text, got {checks.shown(value)}")
    if load is not None:
        if given or name is not None:
            others = ", ".join([*given, *(["preset"] if name is not None else [])])
            raise InputError(
                f"[model] must have no other key with load, which sets all sizes, got {others}"
            )
        return _fitting(from_config(Path(load) / "config.json"), config, corpus)
    known = [field.name for field in fields(TransformerConfig)]
    for key in given:
        if key not in known:
            raise InputError(config_table.unknown(key, ["preset", "load", *known], "model"))
    given.setdefault("seq_len", config.data.seq_len)
    if corpus.vocab_size is not None:
        given.setdefault("vocab_size", -(-corpus.vocab_size // _ROWS) * _ROWS)
    # A preset goes through the table too, for its checks of types.
    base = {} if name is None else {key: getattr(preset(name), key) for key in known}
    sizes = config_table.fill(TransformerConfig, base | given, "model")
    return _fitting(sizes, config, corpus)


def _fitting(sizes: TransformerConfig, config: Config, corpus: corpora.Corpus) -> TransformerConfig:
    """Return the sizes; raise unless the corpus fits into them."""
    needed = corpus.vocab_size
    if needed is not None and sizes.vocab_size < needed:
        checks.fail("model", "vocab_size", f"at least {needed}, the tokenizer's", sizes.vocab_size)
    if sizes.seq_len < config.data.seq_len:
        expected = f"at least data.seq_len, {config.data.seq_len}"
        checks.fail("model", "seq_len", expected, sizes.seq_len)
    entries = len(config.data.train) if config.data.domains else 0
    if len(sizes.domain_experts) != entries:
        expected = "empty without data.domains"
        if entries:
            expected = f"of {entries} numbers, one for each entry of data.train"
        checks.fail("model", "domain_experts", expected, sizes.domain_experts)
    if config.export:
        to_config(sizes)  # raises where no family of Hugging Face computes the same
    return sizes


def layout_of(given: dict[str, Any], ranks: int) -> ParallelConfig:
    """Return the ``ParallelConfig`` of a table; ``dp`` is what the ranks leave for it."""
    config = check_parallel(given)
    others = config.tp * config.cp * config.pp
    if config.mode != "data" and "dp" not in given and ranks % others == 0:
        config = replace(config, dp=ranks // others)
    return config.for_ranks(ranks)


def build_parallel_model(config: Config, sizes: TransformerConfig, ranks: Ranks) -> TrainEngine:
    """Return the model with its first weights, which the seed alone decides, on all processes."""
    param, reduce = config.precision.param, config.precision.reduce
    try:  # all ranks find the same mistakes
        parallel_config = replace(
            layout_of(config.parallel, ranks.size),
            param_dtype=None if param == "float32" else param,
            reduce_dtype=reduce,
        )
        parts = parallel_config.dp * parallel_config.microbatches
        check_divides("config", "dp x microbatches", parts, config.batch, "batch")
        device = ranks.device
        folder = config.model.get("load")
        weights = None if folder is None else partial(fill_huggingface, source=folder)
        model = Transformer(sizes, device="meta", dtype=torch.float32)
        mesh = make_mesh(parallel_config.sizes, device_type=device.type)
        parallel = parallelize(
            model, parallel_config, mesh, device=device, seed=config.seed, weights=weights
        )
        probe = torch.zeros(1, config.data.seq_len, dtype=torch.int64)
        parallel.shard_batch(probe)
    except (ValueError, TypeError, checks.UnsupportedError) as error:
        raise InputError(str(error)) from None
    return parallel


def _check_no_decay(patterns: tuple[str, ...], model: Any, ranks: Ranks) -> None:
    """Raise where a pattern that was asked for matches no parameter of any process."""
    mine = [name for name, _ in model.named_parameters()]
    names = sorted({name for of_rank in ranks.gathered(mine) for name in of_rank})
    for pattern in patterns:
        if fnmatch.filter(names, pattern):
            continue
        near = difflib.get_close_matches(pattern.strip("*"), names, cutoff=0.0)
        raise InputError(
            f"optimizer.no_decay: {pattern!r} must match a parameter; the nearest names are "
            f"{', '.join(near)}"
        )


def _options(config: Config) -> dict[str, Any]:
    """Return what groups of the optimizer have; the learning rate is set at each step."""
    names = ("lr", "betas", "eps", "weight_decay")
    return {name: getattr(config.optimizer, name) for name in names}


def _sequences(corpus: corpora.Corpus, config: Config) -> tuple[Sequences, Sequences | None]:
    """Return the sequences of training, and those of validation if there are any."""
    data = config.data
    of_train, of_validation = corpus.domains
    given: dict[str, Any] = {"end": corpus.end if data.documents else None}
    order: dict[str, Any] = {"seed": config.seed, "shuffle": data.shuffle}
    train = Sequences(corpus.train, data.seq_len, domains=of_train, **order, **given)
    if not config.validation.sequences or len(corpus.validation) <= data.seq_len:
        return train, None
    return train, Sequences(corpus.validation, data.seq_len, domains=of_validation, **given)
