"""Predictions for measured training steps, row by row, and how good they are.

The rows have the columns of published tables: model sizes, layout, device. A row that lacks a
column that is needed, or contradicts itself, gets no prediction and a reason.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusedops.launch.config_table import InputError
from fusedops.models.config import TransformerConfig
from fusedops.planner.device import Device, known_devices, load_device
from fusedops.planner.layout import Layout
from fusedops.planner.memory import estimate_unchecked
from fusedops.planner.step_time import StepShape, step_time
from fusedops.planner.timed_search import CONTEXT_BYTES

PREDICTED = ("predicted_step_s", "predicted_mem_gib", "predicted_fits", "why")
# Layouts of one group, from which on its ranking is judged.
LEAST_OF_GROUP = 3
# Recomputation and sharding as tables write them, by the first word that occurs in the cell.
_RECOMPUTE = {"full": "full", "selective-op": "products", "selective": "selective", "none": "none"}
_ZERO = {"zero3": 3, "fsdp": 3, "zero2": 2, "zero1": 1, "none": 0}
_PRECISIONS = {"bf16-pure": "half", "amp": "autocast"}


class RowError(ValueError):
    """A row cannot be predicted; the message says why."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a row; ``None`` where it cannot be."""

    step_s: float | None = None
    mem_gib: float | None = None
    fits: bool | None = None
    why: str = ""

    def cells(self) -> dict[str, str]:
        """Return the cells of ``PREDICTED``."""
        fits = "" if self.fits is None else str(int(self.fits))
        numbers = [self.step_s, self.mem_gib]
        shown = ["" if number is None else f"{number:.6g}" for number in numbers]
        return dict(zip(PREDICTED, [*shown, fits, self.why], strict=True))


@dataclass(frozen=True)
class GroupRanking:
    """How layouts of one model on as many devices with one global batch are ranked.

    Attributes:
        name: model, devices, global batch.
        layouts: how many were measured and predicted.
        tau: Kendall's rank correlation (tau-b) of predicted and measured times.
        slower: how much slower the first choice is than the best, as a share.
    """

    name: str
    layouts: int
    tau: float
    slower: float


@dataclass(frozen=True)
class Evaluation:
    """Predictions of rows, and their errors.

    Attributes:
        predictions: one per row.
        errors: mean absolute percentage error of the step's time by source, in percent, and of how
            many rows.
        groups: rankings of groups of at least ``LEAST_OF_GROUP`` layouts.
    """

    predictions: tuple[Prediction, ...]
    errors: dict[str, tuple[float, int]]
    groups: tuple[GroupRanking, ...]


def evaluate(rows: Sequence[Mapping[str, str]], usual: Device | None = None) -> Evaluation:
    """Predict each row and compare it with the measured ``step_s``, where there is one.

    Args:
        rows: cells by column; empty ones are unknown.
        usual: the device of rows without ``gpu``.
    """
    predictions = tuple(predict(row, usual) for row in rows)
    errors: dict[str, list[float]] = {}
    groups: dict[str, list[tuple[float, float]]] = {}
    for row, prediction in zip(rows, predictions, strict=True):
        measured = _measured(row)
        if prediction.step_s is None or not measured:
            continue
        source = row.get("source") or "all rows"
        errors.setdefault(source, []).append(abs(prediction.step_s / measured - 1))
        sizes = row.get("model") or " x ".join(row.get(name, "") for name in ("layers", "hidden"))
        name = f"{sizes}, {row.get('gpus', '')} devices, global batch {row.get('gbs', '')}"
        groups.setdefault(name, []).append((prediction.step_s, measured))
    means = {
        source: (100 * statistics.fmean(values), len(values)) for source, values in errors.items()
    }
    rankings = [
        _ranking(name, pairs) for name, pairs in groups.items() if len(pairs) >= LEAST_OF_GROUP
    ]
    return Evaluation(predictions, means, tuple(rankings))


def measured_steps(
    rows: Sequence[Mapping[str, str]], usual: Device | None = None
) -> list[tuple[StepShape, Device, float]]:
    """Return what ran, on which device and in how many seconds, of rows that tell it.

    Args:
        rows: cells by column.
        usual: the device of rows without ``gpu``.
    """
    return [
        (shape_of(row), device_of(row, usual), _measured(row))
        for row in rows
        if _measured(row) and predict(row, usual).step_s is not None
    ]


def predict(row: Mapping[str, str], usual: Device | None = None) -> Prediction:
    """Return the prediction of a row.

    Args:
        row: cells by column.
        usual: the device of a row without ``gpu``.
    """
    try:
        here = device_of(row, usual)
        shape = shape_of(row)
    except (RowError, InputError, ValueError) as error:
        return Prediction(why=str(error))
    seconds = step_time(shape, here).seconds
    try:
        needed = (_memory(row, shape) + CONTEXT_BYTES) / 2**30
    except ValueError as error:
        return Prediction(seconds, why=f"no memory: {error}")
    return Prediction(seconds, needed, needed * 2**30 <= here.memory.bytes)


def shape_of(row: Mapping[str, str]) -> StepShape:
    """Return what a row computes.

    Raises:
        RowError: a column that is needed is empty, or two contradict each other.
    """
    sizes: dict[str, Any] = {name: _count(row, name, 1) for name in ("tp", "pp", "dp")}
    sizes |= {name: _count(row, name, 1, needed=False) for name in ("cp", "ep")}
    devices = _count(row, "gpus", needed=False)
    ranks = sizes["tp"] * sizes["pp"] * sizes["dp"] * sizes["cp"]
    if devices and devices != ranks:
        raise RowError(f"tp x pp x dp x cp = {ranks} contradicts gpus = {devices}")
    micro_batch, batch = _count(row, "mbs"), _count(row, "gbs")
    if batch % (sizes["dp"] * micro_batch):
        product = sizes["dp"] * micro_batch
        raise RowError(f"dp x mbs = {product} does not divide gbs = {batch}")
    hidden, heads = _count(row, "hidden"), _count(row, "heads")
    experts = _count(row, "experts", needed=False) or 0
    gated = "glu" in row.get("arch", "") or "mla" in row.get("arch", "")
    column = "moe_ffn" if experts else "ffn"
    inner = _count(row, column, needed=gated or bool(experts)) or 4 * hidden
    return StepShape(
        layers=_count(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(row, "kv_heads", heads, needed=False),
        inner=inner,
        gated=gated,
        vocab=_count(row, "vocab", 51200, needed="model" in row),
        seq_len=_count(row, "seq"),
        experts=experts,
        top_k=_count(row, "topk", 1, needed=bool(experts)),
        virtual=_count(row, "vp", 1, needed=False),
        schedule="interleaved" if _count(row, "vp", 1, needed=False) > 1 else "1f1b",
        sp=_flash(row) and sizes["tp"] > 1 or "sequence" in row.get("recompute", ""),
        zero=_word(row, "shard", _ZERO, 0),
        micro_batch=micro_batch,
        microbatches=batch // (sizes["dp"] * micro_batch),
        recompute=_recompute(row),
        rank_layers=_rank_layers(_count(row, "layers"), sizes["pp"], experts > 0),
        frozen="lora" in f"{row.get('model', '')} {row.get('note', '')}".lower(),
        flash=_flash(row),
        dtype=_dtype(row.get("precision", "")),
        **sizes,
    )


def _rank_layers(layers: int, pp: int, sparse: bool) -> tuple[tuple[int, int], ...]:
    """Return the layers of each pipeline rank where they cannot be divided equally.

    The ranks with embedding and head have the fewest.
    """
    if pp == 1 or layers % pp == 0:
        return ()
    fewest, more = divmod(layers, pp)
    first = (pp - more) // 2
    counts = [fewest + (first <= rank < first + more) for rank in range(pp)]
    return tuple((0, count) if sparse else (count, 0) for count in counts)


def device_of(row: Mapping[str, str], usual: Device | None = None) -> Device:
    """Return the device of a row, with the memory, node and network that the row has.

    Raises:
        RowError: there is no device, or an unknown one.
    """
    name = row.get("gpu", "").lower()
    memory = _number(row, "gpu_mem_gb")
    if not name:
        if usual is None:
            raise RowError("gpu is empty, and no --device was given")
        return usual
    matches = [key for key in known_devices() if name.split("-")[0] == key.split("-")[0]]
    if not matches:
        raise RowError(f"gpu = {row['gpu']} is unknown: known are {', '.join(known_devices())}")
    family = name.split("-")[0]
    choices = (f"{family}-{memory:.0f}", family, matches[-1])
    here = load_device(next(choice for choice in choices if choice in matches))
    if memory:
        here = replace(here, memory=replace(here.memory, bytes=int(memory * 2**30)))
    links = here.links
    if _number(row, "inter_gbit_per_gpu"):
        links = replace(links, network=_number(row, "inter_gbit_per_gpu") * 1e9 / 8)
    if _number(row, "gpus_per_node"):
        links = replace(links, devices_per_node=int(_number(row, "gpus_per_node")))
    return replace(here, links=links)


def load_rows(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file.

    Raises:
        InputError: it cannot be read, or has no rows.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [
                {key: value or "" for key, value in row.items() if key}
                for row in csv.DictReader(file)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}; check the path"
        ) from None
    if not rows:
        raise InputError(f"{path} has no rows: docs/planning.md has its columns")
    return rows


def kendall_tau(pairs: Iterable[tuple[float, float]]) -> float:
    """Return Kendall's rank correlation (tau-b) of pairs; 1.0 where all of one side are equal.

    Example:
        >>> kendall_tau([(1, 10), (2, 20), (3, 15)])
        0.3333333333333333
    """
    values = list(pairs)
    score, first_ties, second_ties, total = 0, 0, 0, 0
    for index, (a, b) in enumerate(values):
        for c, d in values[:index]:
            total += 1
            first_ties += a == c
            second_ties += b == d
            score += _sign(a - c) * _sign(b - d)
    scale = math.sqrt((total - first_ties) * (total - second_ties))
    return score / scale if scale else 1.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _ranking(name: str, pairs: list[tuple[float, float]]) -> GroupRanking:
    best = min(measured for _, measured in pairs)
    chosen = min(pairs)[1]
    return GroupRanking(name, len(pairs), kendall_tau(pairs), chosen / best - 1)


def _memory(row: Mapping[str, str], shape: StepShape) -> int:
    """Return the bytes of the fullest device."""
    model = TransformerConfig(
        hidden_size=shape.hidden,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        intermediate_size=shape.inner,
        vocab_size=shape.vocab,
        seq_len=shape.seq_len,
        gated=shape.gated,
        rotary=shape.gated,
        norm="rms" if shape.gated else "layer",
        bias=not shape.gated,
        position_tables=0 if shape.gated else 1,
        tied=not shape.gated,
        num_experts=shape.experts,
        top_k=shape.top_k,
    )
    recompute = "selective" if shape.recompute == "products" else shape.recompute
    layout = Layout.of(
        dp=shape.dp,
        tp=shape.tp,
        pp=shape.pp,
        cp=shape.cp,
        ep=shape.ep,
        sp=shape.sp and shape.tp > 1,
        zero=shape.zero if shape.dp * shape.cp > 1 else 0,
        micro_batch=shape.micro_batch,
        microbatches=shape.microbatches,
        pipeline_schedule="interleaved" if shape.virtual > 1 else "1f1b",
        pipeline_virtual=shape.virtual if shape.virtual > 1 else None,
        recompute=recompute,
        kernels="fused" if shape.flash else "eager",
        precision=_precision(row, shape),
    )
    needed = estimate_unchecked(model, layout)
    peak = needed.peak
    if shape.recompute == "products" and not shape.experts:
        spared = 1 - _kept_by_operator(shape) / _kept_by_selective(shape)
        peak -= round(spared * needed.parts["activations"])
    # Frozen weights have neither gradients nor states, and those of adapters are few.
    frozen = ("gradients", "states") if shape.frozen else ()
    return peak - sum(needed.parts[name] for name in frozen)


def _kept_by_operator(shape: StepShape) -> float:
    """Return the elements per token that checkpointing by operator keeps of a layer.

    These are its input, attention's output, and the outputs of every second product: query, value,
    the gate (or the only projection up), and with a gate the projection down.
    """
    keys = (shape.projected - shape.width) / 2
    return shape.hidden * (2 if shape.gated else 1) + 2 * shape.width + keys + shape.inner


def _kept_by_selective(shape: StepShape) -> float:
    """Return those that ``selective`` keeps: what no norm and no activation computes."""
    gates = 2 if shape.gated else 1
    return 2 * shape.hidden + shape.width + shape.projected + gates * shape.inner


def _recompute(row: Mapping[str, str]) -> str:
    """Return what is recomputed; torch's own FSDP2 comes with checkpointing by operator."""
    word: str = _word(row, "recompute", _RECOMPUTE, "none" if _flash(row) else "full")
    return "products" if word == "selective" and "fsdp2" in row.get("shard", "") else word


def _precision(row: Mapping[str, str], shape: StepShape) -> str:
    """Return the precision of ``TrainingShape`` that is nearest to a row's.

    FSDP gathers weights in half precision, where autocast would keep casts of all; trainers with
    float8 keep gradients in bfloat16.
    """
    if "8" in row.get("precision", ""):
        return "half-gradients"
    precision: str = _word(row, "precision", _PRECISIONS, "mixed")
    return "mixed" if precision == "autocast" and shape.zero == 3 else precision


def _flash(row: Mapping[str, str]) -> bool:
    """Return whether attention keeps its scores out of memory, by a row's note, model and device.

    Models of GPT-3's kind on devices before the H100, unless the note says so, are of the time
    before FlashAttention, when layers were recomputed wholly unless a row says otherwise.
    """
    named = "flash" in row.get("note", "").lower() or "glu" in row.get("arch", "")
    return named or row.get("gpu", "A100")[:4] not in ("V100", "A100", "A800", "")


def _dtype(precision: str) -> str:
    """Return the dtype of products.

    Float8 with a scale for each row trains no faster than bfloat16, because of its casts
    (torchtitan's rows: 27.3 s against 27.4).
    """
    return "float8" if "8" in precision and not precision.endswith("rowwise") else "bfloat16"


def _word(row: Mapping[str, str], name: str, words: Mapping[str, Any], usual: Any) -> Any:
    text = row.get(name, "").lower()
    return next((value for word, value in words.items() if word in text), usual)


def _measured(row: Mapping[str, str]) -> float:
    """Return the measured seconds of a row; 0 where there are none, or the cell is no time."""
    try:
        return _number(row, "step_s")
    except RowError:
        return 0.0


def _number(row: Mapping[str, str], name: str) -> float:
    """Return a cell as a number; 0 where it is empty.

    Raises:
        RowError: it is no number.
    """
    text = row.get(name, "").strip()
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        raise RowError(f"{name} = {text!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise RowError(f"{name} = {text} is not a positive number")
    return value


def _count(row: Mapping[str, str], name: str, usual: int = 0, *, needed: bool = True) -> int:
    """Return a cell as an integer from 1 on, or ``usual`` where it is empty and not needed.

    Raises:
        RowError: it is needed and empty, or is no such number.
    """
    value = _number(row, name)
    if not row.get(name, "").strip():
        if needed:
            raise RowError(f"{name} is empty")
        return usual
    if value < 1 or value != int(value):
        raise RowError(f"{name} = {row[name]} is not an integer from 1 on")
    return int(value)
