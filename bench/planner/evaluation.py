"""Predictions for measured training steps, row by row, and how good they are.

The rows have the columns of published tables: model sizes, layout, device. A row that lacks a
column that is needed, or contradicts itself, gets no prediction and a reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from row_memory import gradient_bytes, row_memory

from fusedops.bench.tables import kendall_tau
from fusedops.planner.device import Device, known_devices, load_device
from fusedops.planner.shapes import StepShape
from fusedops.planner.step_time import step_time

PREDICTED = ("predicted_step_s", "predicted_mem_gib", "predicted_fits", "why")
# Layouts of one group, from which on its ranking is judged.
LEAST_OF_GROUP = 3
# Recomputation and sharding as tables write them, by the first word that occurs in the cell.
_RECOMPUTE = {"full": "full", "selective-op": "products", "selective": "selective", "none": "none"}
_ZERO = {"zero3": 3, "fsdp": 3, "zero2": 2, "zero1": 1, "none": 0}
# torchao converts to float8 in kernels of their own, with one scale for a tensor: they search the
# largest element (2 bytes read), then write rows and columns (2 read and 1 written for each).
_CAST_BYTES = 8.0


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
        memory_errors: the same of the peak of memory, of rows with ``mem_gib``.
        groups: rankings of groups of at least ``LEAST_OF_GROUP`` layouts.
        fitting: of the rows that ran, how many are said to fit, and how many there are.
        unfitting: of the rows with ``oom``, how many are said not to fit, and how many there are.
    """

    predictions: tuple[Prediction, ...]
    errors: dict[str, tuple[float, int]]
    memory_errors: dict[str, tuple[float, int]]
    groups: tuple[GroupRanking, ...]
    fitting: tuple[int, int]
    unfitting: tuple[int, int]


def evaluate(rows: Sequence[Mapping[str, str]], usual: Device | None = None) -> Evaluation:
    """Predict each row and compare it with the measured ``step_s`` and ``mem_gib``, if given.

    Args:
        rows: cells by column; empty ones are unknown.
        usual: the device of rows without ``gpu``.
    """
    predictions = tuple(predict(row, usual) for row in rows)
    errors: dict[str, list[float]] = {}
    memory_errors: dict[str, list[float]] = {}
    groups: dict[str, list[tuple[float, float]]] = {}
    said: dict[bool, list[bool]] = {True: [], False: []}  # whether it fits, by whether it ran
    for row, prediction in zip(rows, predictions, strict=True):
        source = row.get("source") or "all rows"
        measured, peak = _measured(row), _measured(row, "mem_gib")
        ran_out = _measured(row, "oom") > 0
        if prediction.fits is not None and (measured or peak or ran_out):
            said[not ran_out].append(prediction.fits)
        if prediction.mem_gib is not None and peak and not ran_out:
            memory_errors.setdefault(source, []).append(abs(prediction.mem_gib / peak - 1))
        if prediction.step_s is None or not measured:
            continue
        errors.setdefault(source, []).append(abs(prediction.step_s / measured - 1))
        groups.setdefault(group_of(row), []).append((prediction.step_s, measured))
    rankings = [
        _ranking(name, pairs) for name, pairs in groups.items() if len(pairs) >= LEAST_OF_GROUP
    ]
    return Evaluation(
        predictions,
        _means(errors),
        _means(memory_errors),
        tuple(rankings),
        (sum(said[True]), len(said[True])),
        (said[False].count(False), len(said[False])),
    )


def _means(errors: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, int]]:
    """Return the mean in percent and the number of the errors of each source."""
    return {source: (100 * statistics.fmean(part), len(part)) for source, part in errors.items()}


def measured_reserve(rows: Sequence[Mapping[str, str]], usual: Device) -> int | None:
    """Return what devices used besides the tensors of the step, by the rows' ``mem_gib``.

    This is the median of measured minus estimated bytes, for ``DeviceMemory.reserved``; ``None``
    where no row has a peak.

    Args:
        rows: cells by column.
        usual: the device of the rows.
    """
    differences = []
    for row in rows:
        peak = _measured(row, "mem_gib")
        if peak and predict(row, usual).mem_gib is not None:
            differences.append(peak * 2**30 - row_memory(row, shape_of(row)).needed)
    return max(0, round(statistics.median(differences))) if differences else None


def group_of(row: Mapping[str, str]) -> str:
    """Return the name of the group whose layouts are compared: model, devices, global batch."""
    sizes = row.get("model") or " x ".join(row.get(name, "") for name in ("layers", "hidden"))
    return f"{sizes}, {row.get('gpus', '')} devices, global batch {row.get('gbs', '')}"


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
    except ValueError as error:
        return Prediction(why=str(error))
    seconds = step_time(shape, here).seconds
    try:
        needed = row_memory(row, shape)
    except ValueError as error:
        return Prediction(seconds, why=f"no memory: {error}")
    peak, fits = needed.on(here.memory.bytes - here.memory.reserved)
    return Prediction(seconds, (peak + here.memory.reserved) / 2**30, fits)


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
    shape = StepShape(
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
        zero=_zero(row, sizes["pp"]),
        micro_batch=micro_batch,
        microbatches=batch // (sizes["dp"] * micro_batch),
        recompute=_recompute(row),
        rank_layers=_rank_layers(_count(row, "layers"), sizes["pp"], experts > 0),
        frozen="lora" in f"{row.get('model', '')} {row.get('note', '')}".lower(),
        flash=_flash(row),
        dtype=_dtype(row.get("precision", "")),
        cast_bytes=_CAST_BYTES if "tensorwise" in row.get("precision", "") else 0.0,
        **sizes,
    )
    return replace(shape, reduce_bytes=gradient_bytes(row, shape))


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


def _ranking(name: str, pairs: list[tuple[float, float]]) -> GroupRanking:
    best = min(measured for _, measured in pairs)
    chosen = min(pairs)[1]
    return GroupRanking(name, len(pairs), kendall_tau(pairs), chosen / best - 1)


def _zero(row: Mapping[str, str], pp: int) -> int:
    """Return the stage of ZeRO; FSDP2 gathers a pipeline stage once in a step, as stage 1 does."""
    stage: int = _word(row, "shard", _ZERO, 0)
    return 1 if pp > 1 and "fsdp2" in row.get("shard", "").lower() else stage


def _recompute(row: Mapping[str, str]) -> str:
    """Return what is recomputed; torch's own FSDP2 comes with checkpointing by operator."""
    word: str = _word(row, "recompute", _RECOMPUTE, "none")
    return "products" if word == "selective" and "fsdp2" in row.get("shard", "") else word


def _flash(row: Mapping[str, str]) -> bool:
    """Return whether attention keeps its scores out of memory, by a row's note, model and device.

    Models of GPT-3's kind on devices before the H100, unless the note says so, are of the time
    before FlashAttention.
    """
    named = "flash" in row.get("note", "").lower() or "glu" in row.get("arch", "")
    return named or row.get("gpu", "A100")[:4] not in ("V100", "A100", "A800", "")


def _dtype(precision: str) -> str:
    """Return the dtype of products.

    Float8 with a scale for each row trains no faster than bfloat16, because of its casts
    (torchtitan's rows: 27.3 s against 27.4). The question mark of its H200 rows leads to float8:
    their published command gathers weights in float8, for which a matrix has one scale.
    """
    return "float8" if "8" in precision and not precision.endswith("rowwise") else "bfloat16"


def _word(row: Mapping[str, str], name: str, words: Mapping[str, Any], usual: Any) -> Any:
    text = row.get(name, "").lower()
    return next((value for word, value in words.items() if word in text), usual)


def _measured(row: Mapping[str, str], name: str = "step_s") -> float:
    """Return a measured number of a row; 0 where there is none, or the cell is no number."""
    try:
        return _number(row, name)
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
