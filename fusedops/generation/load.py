"""A model to generate with, from what ``fusedops train`` saved or from a Hugging Face checkpoint.

Weights are saved by name and unsharded shape: a checkpoint of any number of processes in any layout
loads into any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops.checkpoint import Checkpointer, CheckpointError, newest
from fusedops.checkpoint.folder import checkpoints
from fusedops.generation.decoder import check_model
from fusedops.generation.text import Text
from fusedops.launch import config_table
from fusedops.launch.processes import Ranks
from fusedops.models import (
    ParallelConfig,
    TrainEngine,
    Transformer,
    TransformerConfig,
    fill_huggingface,
    load_huggingface,
    parallelize,
)
from fusedops.nn.quantize import QuantizationReport, quantize
from fusedops.train import InputError, resume
from fusedops.train.builder import layout_of

_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Loaded:
    """A model, and what its tokens mean."""

    engine: TrainEngine  # of the model, in its layout
    text: Text  # between text and its tokens
    description: str  # where it is from
    quantization: QuantizationReport | None = None  # where its weights were quantised


def load(
    source: str | Path,
    ranks: Ranks,
    *,
    parallel: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    step: int | None = None,
    weights: str | None = None,
) -> Loaded:
    """Load a model on all processes.

    Args:
        source: the folder of a run of ``fusedops train``, that of its checkpoints, or a folder with
            ``config.json`` and safetensors.
        ranks: the processes.
        parallel: of ``ParallelConfig``; all ranks are ``tp``'s by default.
        dtype: of the parameters; ``None``: as they were saved.
        tokenizer: ``"bytes"`` or a ``tokenizer.json``; ``None``: that of the run or the folder.
        step: which checkpoint of a run; the newest complete one by default.
        weights: format of ``fusedops.quantize`` to which the linear layers are quantised, on one
            process; the output head gets 8 bits. ``None``: they stay.

    Raises:
        InputError: there is no checkpoint, or it does not fit what else is given.
        CheckpointError: there are checkpoints, and none is good.
    """
    folder = Path(source)
    given = dict(parallel or {}) or {"tp": ranks.size}
    try:  # all ranks find the same mistakes, but where one does not see the files of another
        layout = layout_of(given, ranks.size)
        if weights is not None and ranks.size > 1:
            raise InputError("--weights works on one process: leave --processes or it out")
        if (folder / _CONFIG).is_file():
            if step is not None:
                raise InputError(
                    f"--step is of a run of fusedops train, and {folder} is none: leave --step out"
                )
            loaded = _from_huggingface(folder, ranks, layout, dtype, tokenizer)
        else:
            loaded = _from_run(folder, ranks, layout, dtype, tokenizer, step)
        if weights is None:
            return loaded
        loaded.engine.model.join_projections()
        return replace(loaded, quantization=quantize(loaded.engine.model, weights, head="int8"))
    except (ValueError, TypeError, checks.UnsupportedError) as error:
        raise InputError(str(error)) from None


def _from_huggingface(
    folder: Path, ranks: Ranks, layout: ParallelConfig, dtype: str | None, tokenizer: str | None
) -> Loaded:
    kind = None if dtype is None else getattr(torch, dtype)
    with ranks.together():
        model = load_huggingface(folder, device="meta", dtype=kind)
        text = Text.of(_tokenizer(folder, tokenizer), _eos_tokens(folder))
    weights = partial(fill_huggingface, source=folder)
    return Loaded(_engine(model, layout, ranks, weights), text, str(folder))


def _tokenizer(folder: Path, given: str | None) -> str:
    if given is not None:
        return given
    path = folder / _TOKENIZER
    if not path.is_file():
        raise InputError(f"{folder} has no {_TOKENIZER}: give --tokenizer bytes, or such a file")
    return str(path)


def _eos_tokens(folder: Path) -> tuple[int, ...]:
    """Return the end-of-text tokens of the folder's configurations."""
    for name in ("generation_config.json", _CONFIG):
        path = folder / name
        if not path.is_file():
            continue
        try:
            values = json.loads(path.read_bytes())
        except ValueError as error:
            raise InputError(f"{path} is not valid JSON: {error}; correct it there") from None
        eos = values.get("eos_token_id") if isinstance(values, dict) else None
        if eos is None:
            continue
        tokens = tuple(eos) if isinstance(eos, list) else (eos,)
        if not all(isinstance(token, int) for token in tokens):
            expected = "null, a token or a list of tokens"
            raise InputError(f"{path}: eos_token_id must be {expected}, got {checks.shown(eos)}")
        return tokens
    return ()


def _from_run(
    folder: Path,
    ranks: Ranks,
    layout: ParallelConfig,
    dtype: str | None,
    tokenizer: str | None,
    step: int | None,
) -> Loaded:
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    with ranks.together():
        extra = _extra(folder, root, step)
        sizes = config_table.fill(TransformerConfig, extra["model"], "model")
        config = extra["config"]
        data = config["data"]
        if tokenizer is None and not resume.has_tokenizer(extra):
            raise InputError(
                f"{folder} was trained on a file of tokens, which does not say what they mean: "
                f"give --tokenizer with a {_TOKENIZER}, or --tokenizer bytes"
            )
        saved_dtype = getattr(torch, config["precision"]["param"])
        text = Text.of(
            data["tokenizer"] if tokenizer is None else tokenizer,
            end_of_text=data["end_of_text"],
        )
    model = Transformer(sizes, device="meta", dtype=saved_dtype)
    engine = _engine(model, layout, ranks, lambda _: None)
    with Checkpointer(root, model) as checkpointer:
        restored = checkpointer.load(step)
    assert restored is not None
    if dtype is not None:
        model.to(getattr(torch, dtype))
    return Loaded(engine, text, f"{folder}, step {restored.step}")


def _extra(folder: Path, root: Path, step: int | None) -> dict[str, Any]:
    """Return what a checkpoint says of its run."""
    saved = newest(root, step)
    if saved is None:
        if newest(root) is not None:
            raise InputError(
                f"{folder} has no whole checkpoint of step {step}: leave --step out for the last"
            )
        if damaged := [checkpoint.name for checkpoint in checkpoints(root)]:
            raise CheckpointError(
                f"no checkpoint in {root} is good: {', '.join(damaged)} are damaged; "
                "copy one of them there from a backup, or train again"
            )
        raise InputError(
            f"{folder} is no checkpoint: neither a run of fusedops train with one, nor a folder "
            f"with {_CONFIG} and safetensors; give the folder that `out` or `export` names"
        )
    where, extra = saved
    if not (isinstance(extra, dict) and {"config", "model", "facts"} <= extra.keys()):
        raise InputError(f"{where} does not say what its model is: fusedops train does")
    return extra


def _engine(
    model: Transformer, layout: ParallelConfig, ranks: Ranks, weights: Callable[[nn.Module], None]
) -> TrainEngine:
    """Return the engine of a model on ``meta``, whose parameters get memory, then ``weights``."""
    if ranks.size > 1:
        engine = parallelize(model, layout, device=ranks.device, weights=weights)
        return check_model("generate", engine)
    weights(model.to_empty(device=ranks.device))
    return check_model("generate", model)
