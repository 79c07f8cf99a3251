"""The last good checkpoint of a run, and what the user should know about going on from it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from fusedops.checkpoint import Checkpointer, Restored
from fusedops.launch import config_table
from fusedops.launch.config_table import InputError
from fusedops.models import ParallelConfig, TransformerConfig
from fusedops.train import corpus as corpora
from fusedops.train.config import Config, ScheduleConfig
from fusedops.train.schedule import learning_rate

# Tables and keys that do not change what the steps compute, or that are compared in another way:
# the model by its resolved configuration, texts and tokenizer by their contents.
_WITHOUT_EFFECT = (
    *("out.", "device.", "export.", "tune_host.", "arena.", "log.", "faults.", "model."),
    *("checkpoint.", "validation.", "parallel."),
    *("data.train.", "data.validation.", "data.tokenizer.", "data.cache."),
)
# Fields of the model that change how it is trained, and not what its weights compute.
_ONLY_IN_TRAINING = (
    *("dropout", "attention_dropout", "balance_loss", "z_loss", "balance_rate"),
    # Generation drops no token, whatever the capacity.
    *("initializer_range", "pad_token_id", "capacity_factor", "drop_policy"),
)
# Fields that follow from the shapes and names of parameters, which loading compares.
_IN_SHAPES = ("num_kv_heads", "head_dim", "moe_layers", "seq_len")


def load_last_good(checkpointer: Checkpointer) -> tuple[Restored | None, list[str]]:
    """Restore the newest checkpoint whose weights are good, and remove later ones.

    Good are weights that a good step followed, or that were saved as good ones.

    Returns:
        What was restored, ``None`` where there is no checkpoint, and notes for the user.

    Raises:
        InputError: the checkpoints are of another model, or none of them is good.
    """
    passed_over: list[str] = []
    try:
        restored = checkpointer.load()
        while restored is not None and not _is_good(restored):
            passed_over.append(f"passed over {restored.folder.name}: it is not finite")
            restored = checkpointer.rollback(restored.step - 1)
    except ValueError as error:
        raise InputError(f"{error}; a new run needs another out") from None
    if restored is not None:
        passed_over += [f"passed over {path.name}: {why}" for path, why in restored.passed_over]
        return restored, [f"resumes from step {restored.step}", *passed_over]
    if passed_over:
        raise InputError(
            f"no checkpoint in {checkpointer.root} has a loss and weights that are finite; start "
            "a new run, with another out and a smaller optimizer.lr"
        )
    return None, []


def _is_good(restored: Restored) -> bool:
    return restored.confirmed or restored.extra["finite"]


def versions() -> dict[str, str]:
    """Return the versions that the bits of a run depend on."""
    # Not imported: the package's lazy imports lie above this one.
    return {"torch": str(torch.__version__), "fusedops": sys.modules["fusedops"].__version__}


def facts(
    corpus: corpora.Corpus, model: TransformerConfig, layout: ParallelConfig
) -> dict[str, Any]:
    """Return what the steps depend on besides configuration and tokens, by names for messages."""
    names = [] if corpus.domains[0] is None else corpus.domains[0].of_files.tolist()
    values: dict[str, Any] = {
        "vocabulary of the tokenizer": corpus.vocab_size,
        "end of a text": corpus.end,
        "digest of the domains": hashlib.sha256(repr(names).encode()).hexdigest()[:8],
    }
    if model.capacity_factor is not None:  # it is of the tokens that one process routes at once
        parts = ("dp", "tp", "cp", "microbatches")
        values |= {f"layout.{name}": getattr(layout, name) for name in parts}
    return values | versions()


def check_model(saved: Mapping[str, Any], model: TransformerConfig) -> None:
    """Raise unless a model computes what the one of a checkpoint computed.

    Args:
        saved: the ``extra`` of the checkpoint.
        model: the configuration of the model of this run.

    Raises:
        InputError: it does not; the message has the fields that differ.
    """
    differences = [
        text for name, text in _model_changes(saved, model) if name not in _ONLY_IN_TRAINING
    ]
    if differences:
        raise InputError(
            f"the checkpoint is of another model: {', '.join(differences)}; set [model] as it was, "
            "or choose another out for a new run"
        )


def changes(
    restored: Restored,
    config: Config,
    model: TransformerConfig,
    corpus: str,
    facts: Mapping[str, Any],
) -> list[str]:
    """Return notes about what differs from the run that saved a checkpoint.

    Args:
        restored: what the checkpoint restored.
        config: of this run.
        model: the configuration of its model.
        corpus: identity of its tokens.
        facts: of this run, as ``facts`` returns them.
    """
    saved, notes = restored.extra, []
    if saved["corpus"] != corpus:
        notes.append("the corpus is not the one that the run was saved with")
    before, now = saved["config"], asdict(config)
    changed = _changed_keys(
        config_table.flat(before) | saved["facts"], config_table.flat(now) | dict(facts)
    )
    changed += [text for name, text in _model_changes(saved, model) if name in _ONLY_IN_TRAINING]
    if changed:
        notes.append(f"changed since the run was saved: {', '.join(changed)}")
    rates = [_learning_rate(restored.step, table) for table in (before, now)]
    if rates[0] != rates[1]:
        notes.append(f"the next step's learning rate changes: {rates[0]:.3g} -> {rates[1]:.3g}")
    return notes


def _changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return which keys have another value, of those that change what the steps compute."""
    changed = []
    for key in sorted(before.keys() & now.keys()):
        ignored = f"{key}.".startswith(_WITHOUT_EFFECT)
        ignored = ignored or (key == "steps" and now["schedule.kind"] == "constant")
        if not ignored and _listed(before[key]) != _listed(now[key]):
            changed.append(f"{key} {before[key]} -> {now[key]}")
    return changed


def _model_changes(saved: Mapping[str, Any], model: TransformerConfig) -> list[tuple[str, str]]:
    """Return the fields of the model that differ, each with its values in a text."""
    before, now = saved["model"], asdict(model)
    return [
        (name, f"model.{name} {before[name]} -> {now[name]}")
        for name in now
        if name in before and name not in _IN_SHAPES and _listed(before[name]) != _listed(now[name])
    ]


def _listed(value: Any) -> Any:
    """Return a value with lists for tuples."""
    return json.loads(json.dumps(value))


def _learning_rate(step: int, table: Mapping[str, Any]) -> float:
    """Return the learning rate of a step under a configuration."""
    schedule = ScheduleConfig(**table["schedule"])
    return learning_rate(step, table["steps"], table["optimizer"]["lr"], schedule)
