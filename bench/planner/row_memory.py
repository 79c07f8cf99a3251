"""Bytes that a measured step of another trainer needed, of which a table has one row.

The estimate is that of ``memory.py`` for the row's model and layout, and what other trainers keep
in addition: gathers of one product, gradients of 16 bits, and on devices before the H100 the copies
that optimizers made before fused ones and FSDP2. ``docs/dev/planner_errors.md`` compares it with
measured peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusedops.models.config import TransformerConfig
from fusedops.planner.layout import PRECISIONS, Layout
from fusedops.planner.memory import Estimate, estimate_unchecked
from fusedops.planner.shapes import StepShape

# The precision of a row, by the first word that occurs in its cell.
_PRECISIONS = {
    "bf16-pure": "half",
    "amp": "autocast",
    "fp16": "half-gradients",
    "8": "half-gradients",  # trainers with float8 keep gradients in bfloat16
}
_BEFORE_H100 = ("V100", "A100", "A800")
# Optimizers over sharded 16-bit parameters before FSDP2, while they step, in bytes per parameter of
# the rank: float32 gradients (4), flat copies of the 16-bit gradients and parameters (4), and the
# temporaries of an AdamW that is not fused (4).
_STEP_BYTES = 12
# Without sharding: the float32 gradients of Megatron's fp16 optimizer.
_GRADIENT_BYTES = 4
# What their trainers hold besides tensors of the model: buckets, communicators, and what the
# allocator of the time cached. Fitted on 22 rows of two trainers, by ZeRO's stage.
_TRAINER_BYTES = {1: 29 << 29, 2: 29 << 29, 3: 13 << 29}
# Share of it that is the allocator's cache, which is freed before a device runs out of memory.
_CACHED = 0.5


@dataclass(frozen=True)
class RowMemory:
    """The memory of a row's step, without ``DeviceMemory.reserved``.

    Attributes:
        needed: bytes on the fullest device.
        cached: how many of them a device that is full does without.
    """

    needed: int
    cached: int = 0

    def on(self, capacity: int) -> tuple[int, bool]:
        """Return the peak on a device with so many bytes, and whether the step fits."""
        least = self.needed - self.cached
        return min(self.needed, max(least, capacity)), least <= capacity


def row_memory(row: Mapping[str, str], shape: StepShape) -> RowMemory:
    """Return the memory of a row's step on the fullest device.

    Args:
        row: cells by column; ``gpu``, ``precision`` and ``shard`` are read.
        shape: what the row computes.

    Raises:
        ValueError: the model cannot exist.
    """
    layout = _layout(row, shape)
    needed = estimate_unchecked(_model(shape), layout)
    peak = needed.peak
    if shape.recompute == "products" and not shape.experts:
        spared = 1 - _kept_by_operator(shape) / _kept_by_selective(shape)
        peak -= round(spared * needed.parts["activations"])
    if row.get("shard", "").startswith("zero3"):
        peak -= _spared_by_product(shape, layout)
    if shape.frozen:  # frozen weights have no gradients or states, and adapters have few weights
        peak -= needed.parts["gradients"] + needed.parts["states"]
    elif _wraps_optimizer(row):
        return _with_wrapped_optimizer(peak, needed, layout, shape.zero)
    return RowMemory(peak)


def gradient_bytes(row: Mapping[str, str], shape: StepShape) -> int:
    """Return the bytes of an element of a row's gradients."""
    return PRECISIONS[_precision(row, shape)].gradients


def _wraps_optimizer(row: Mapping[str, str]) -> bool:
    """Return whether an optimizer of float32 copies wraps the row's 16-bit parameters.

    Autocast has float32 parameters, and pure half precision no float32 copies.
    """
    precision, gpu = row.get("precision", "").lower(), row.get("gpu", "")[:4]
    return precision in ("fp16", "bf16") and gpu in _BEFORE_H100


def _with_wrapped_optimizer(peak: int, needed: Estimate, layout: Layout, zero: int) -> RowMemory:
    """Return the memory with what such an optimizer and its trainer keep."""
    parameters = needed.states / layout.bytes_of.states
    extra = _STEP_BYTES if zero else 0
    if not zero and layout.bytes_of.gradients < _GRADIENT_BYTES:
        extra = _GRADIENT_BYTES
    step = needed.static + extra * parameters
    trainer = _TRAINER_BYTES.get(zero, 0)
    return RowMemory(max(peak, round(step)) + trainer, int(_CACHED * trainer))


def _model(shape: StepShape) -> TransformerConfig:
    return TransformerConfig(
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


def _layout(row: Mapping[str, str], shape: StepShape) -> Layout:
    return Layout.of(
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
        recompute="selective" if shape.recompute == "products" else shape.recompute,
        kernels="fused" if shape.flash else "eager",
        precision=_precision(row, shape),
    )


def _precision(row: Mapping[str, str], shape: StepShape) -> str:
    """Return the precision of ``TrainingShape`` that is nearest to a row's.

    FSDP gathers weights in half precision, where autocast would keep casts of all. Megatron and
    DeepSpeed keep gradients of fp16 in 16 bits, and so do optimizers that shard bf16 parameters.
    """
    text = row.get("precision", "").lower()
    precision = next((value for word, value in _PRECISIONS.items() if word in text), "mixed")
    if precision == "autocast" and shape.zero == 3:
        return "mixed"
    if precision == "mixed" and shape.zero and _wraps_optimizer(row):
        return "half-gradients"
    return precision


def _spared_by_product(shape: StepShape, layout: Layout) -> int:
    """Return what DeepSpeed's ZeRO-3 spares, which gathers and reduces one product at a time."""
    layer, sizes = _model(shape).layer(0).total, layout.bytes_of
    product = shape.hidden * max(shape.projected, shape.inner)
    return int((layer - product) / shape.tp) * (2 * sizes.weights + sizes.gradients)


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
