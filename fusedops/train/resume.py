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
_VOCABULARY = "vocabulary of the tokenizer"
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
        while restored is not None and not (restored.confirmed or restored.extra["finite"]):
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


def versions() -> dict[str, str]:
    """Return the versions that the bits of a run depend on."""
    # Not imported: the package's lazy imports lie above this one.
    return {"torch": str(torch.__version__), "fusedops": sys.modules["fusedops"].__version__}


def description(
    config: Config, model: TransformerConfig, corpus: corpora.Corpus, layout: ParallelConfig
) -> dict[str, Any]:
    """Return what a checkpoint says of its run, for one that resumes it and for ``generate``.

    ``facts`` are what the steps depend on besides configuration and tokens, by names for messages.
    """
    names = [] if corpus.domains[0] is None else corpus.domains[0].of_files.tolist()
    facts: dict[str, Any] = {
        _VOCABULARY: corpus.vocab_size,
        "end of a text": corpus.end,
        "digest of the domains": hashlib.sha256(repr(names).encode()).hexdigest()[:8],
    }
    if model.capacity_factor is not None:  # it is of the tokens that one process routes at once
        parts = ("dp", "tp", "cp", "microbatches")
        facts |= {f"layout.{name}": getattr(layout, name) for name in parts}
    return {
        "corpus": corpus.identity,
        "config": asdict(config),
        "model": asdict(model),
        "facts": facts | versions(),
    }


def has_tokenizer(description: Mapping[str, Any]) -> bool:
    """Return whether a run knows what its tokens mean; a file of tokens alone does not say it."""
    return description["facts"][_VOCABULARY] is not None


def check_model(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise unless a model computes what the one of a checkpoint computed.

    Args:
        saved: the description of the run that wrote the checkpoint.
        own: the description of this run.

    Raises:
        InputError: it does not; the message has the fields that differ.
    """
    ignored = _ONLY_IN_TRAINING + _IN_SHAPES
    differences = _differences(saved["model"], own["model"], "model.")
    refused = [text for name, text in differences.items() if name not in ignored]
    if refused:
        raise InputError(
            f"the checkpoint is of another model: {', '.join(refused)}; set [model] as it was, "
            "or choose another out for a new run"
        )


def changes(step: int, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return notes about what differs from the run that saved a checkpoint.

    Args:
        step: of the checkpoint.
        saved: the description of the run that wrote it.
        own: the description of this run.
    """
    notes = []
    if saved["corpus"] != own["corpus"]:
        notes.append("the corpus is not the one that the run was saved with")
    before, now = (config_table.flat(run["config"]) | run["facts"] for run in (saved, own))
    if now["schedule.kind"] == "constant":
        del now["steps"]  # which changes no step then
    changed = [
        text
        for key, text in _differences(before, now).items()
        if not f"{key}.".startswith(_WITHOUT_EFFECT)
    ]
    in_model = _differences(saved["model"], own["model"], "model.")
    changed += [in_model[name] for name in _ONLY_IN_TRAINING if name in in_model]
    if changed:
        notes.append(f"changed since the run was saved: {', '.join(changed)}")
    rates = [
        learning_rate(step, run["steps"], run["optimizer"]["lr"], ScheduleConfig(**run["schedule"]))
        for run in (saved["config"], own["config"])
    ]
    if rates[0] != rates[1]:
        notes.append(f"the next step's learning rate changes: {rates[0]:.3g} -> {rates[1]:.3g}")
    return notes


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> dict[str, str]:
    """Return the keys of both whose values differ, each with its values in a text."""
    before, now = (json.loads(json.dumps(table)) for table in (before, now))  # tuples are lists
    return {
        key: f"{prefix}{key} {before[key]} -> {now[key]}"
        for key in sorted(before.keys() & now.keys())
        if before[key] != now[key]
    }
