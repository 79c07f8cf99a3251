"""Whole models: stock, compiled and patched, on the same inputs, interleaved, with their values.

A row of ours counts only if its loss, logits and gradients are right: compared with the same model
in float64 they may be off by twice what the stock model is off, plus rounding
(``_core/dtypes.py``). What is wrong has no time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fusedops._core import backends, dtypes
from fusedops.bench.cases import lead, peak_of, timed_row, ulps
from fusedops.bench.contenders import backends_since, error_line
from fusedops.bench.limits import LeastWork, Limits
from fusedops.bench.model_zoo import GivenTokenDecoder, Inputs, ModelFamily, ModelSize
from fusedops.bench.results import AUTOMATIC, COMPILE, EAGER, BenchRow, dtype_name, is_ours
from fusedops.bench.runner import BenchSettings
from fusedops.integrations import patch
from fusedops.runtime.timer import Clock, Timing, TimingPlan, Variant, measure

TRAINING, FORWARD, DECODING = "training", "forward", "decoding"
MODES = (TRAINING, FORWARD, DECODING)


@dataclass(frozen=True)
class ModelCase:
    """What is measured."""

    family: ModelFamily  # of transformers
    mode: str  # one of ``MODES``
    size: ModelSize  # of the model and of what it reads
    dtype: torch.dtype  # of the weights

    @property
    def label(self) -> str:
        """What the size is called in this mode."""
        return self.size.label + (f"+{self.size.steps}" if self.mode == DECODING else "")

    @property
    def title(self) -> str:
        """What the case is called."""
        return f"{self.family.name} {self.mode} {self.label} {dtype_name(self.dtype)}"


@dataclass(frozen=True)
class Values:
    """What a run computes: of training the loss, the logits and the gradients, else the logits."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FamilyResult:
    """What was found of one family in one mode and dtype."""

    rows: tuple[BenchRow, ...] = ()  # the figures
    notes: tuple[str, ...] = ()  # what could not be measured and why
    wrong: tuple[str, ...] = ()  # what our model computes wrong; there is no row of ours then


@dataclass(frozen=True)
class ModelContender:
    """A model in one mode."""

    name: str  # ``"eager"``, ``"compile"`` or ``"fusedops"``
    prepare: Callable[[], Any]  # makes what a run writes on, outside of what is timed
    # one training step without its optimiser, one forward, or all steps of decoding
    run: Callable[[Any], Any]
    values: Callable[[], Values]  # makes a run and returns what it computed


def time_steps(
    steps: dict[str, tuple[nn.Module, Callable[[], Any]]], clock: Clock, plan: TimingPlan
) -> Timing:
    """Time steps of training, each with the model whose gradients it makes."""

    def variant(name: str, model: nn.Module, step: Callable[[], Any]) -> Variant:
        return Variant(name, lambda _: step(), lambda: model.zero_grad(set_to_none=True))

    return measure([variant(name, *pair) for name, pair in steps.items()], clock, plan)


def sizes(family: ModelFamily, mode: str, size: ModelSize) -> tuple[ModelSize, ...]:
    """Return the sizes of a mode: decoding is measured for one sequence too, what chats are."""
    if mode != DECODING:
        return (size,)
    if not family.decodes:
        return ()
    return tuple(replace(size, batch=batch) for batch in dict.fromkeys((1, size.batch)))


def affordable(mode: str, size: ModelSize, dtype: torch.dtype, device: torch.device) -> ModelSize:
    """Return a smaller size where torch would need minutes for a step in training on a CPU.

    Its products for the gradients of float16 run at 1 GFLOP/s there (Zen 5, torch 2.13), and so do
    those of bfloat16 on a processor with AVX2 alone.
    """
    slow = dtype == torch.float16 or (
        dtype == torch.bfloat16 and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    )
    if mode == TRAINING and slow and device.type == "cpu":
        return replace(size, batch=1, seq_len=min(size.seq_len, 64))
    return size


def run_case(case: ModelCase, settings: BenchSettings) -> FamilyResult:
    """Measure a family in one mode and dtype."""
    try:
        settings.report("building")
        stock = case.family.build(case.size).to(settings.device, case.dtype)
        stock.train(case.mode == TRAINING)
        eager = _contender(EAGER, stock, stock, case, settings.device)
        settings.report("values")
        truth, flops = _truth(stock, case, settings.device)
        known = eager.values()
    except Exception as error:
        # Too large for this machine, a dtype that torch lacks here, a transformers without it.
        return FamilyResult(notes=(f"{case.title}: no rows: {error_line(error)}",))
    able, notes, wrong = [eager], [], []
    errors = {EAGER: ulps([known.logits], [truth.logits])}
    ours: ModelContender | None = None
    backend = ""
    try:
        patched = copy.deepcopy(stock)
        patch(patched, **_calibration(case, settings))
        ours = _contender(AUTOMATIC, patched, patched, case, settings.device)
        before = backends.counters()
        values = ours.values()
        backend = backends_since(before)
        wrong = [f"{case.title}: {text}" for text in differences(values, known, truth, case.dtype)]
        errors[AUTOMATIC] = ulps([values.logits], [truth.logits])
    except Exception as error:
        wrong = [f"{case.title}: the patched model raises {error_line(error)}"]
    if settings.compiled:
        settings.report("compiling")
        try:
            torch._dynamo.reset()
            compiled = torch.compile(stock)
            rival = _contender(COMPILE, stock, compiled, case, settings.device)
            errors[COMPILE] = ulps([rival.values().logits], [truth.logits])
            able.append(rival)
        except Exception as error:
            notes.append(f"{case.title}: no {COMPILE} row: {error_line(error)}")
    if ours is not None and not wrong:
        able.append(ours)
    del truth, known
    settings.report("memory")
    work = _work(stock, flops, case, settings.limits)
    variants = [Variant(contender.name, contender.run, contender.prepare) for contender in able]
    peaks = {
        variant.name: peak_of(variant, settings.device) if settings.memory else None
        for variant in variants
    }
    settings.report("timing")
    timing = measure(variants, settings.clock, settings.plan)
    rows = []
    for name, peak in peaks.items():
        against = lead(timing, name)
        row = timed_row(
            timing,
            name,
            work,
            settings,
            errors[name],
            op=case.family.name,
            case=case.label,
            dtype=dtype_name(case.dtype),
            direction=case.mode,
            backend=backend if is_ours(name) else "",
            trusted=all(map(timing.trusted, {name, EAGER, against.get("rival", EAGER)})),
            host_us=None,
            peak_bytes=peak,
            **against,
        )
        rows.append(row)
    return FamilyResult(tuple(rows), tuple(notes), tuple(wrong))


def _calibration(case: ModelCase, settings: BenchSettings) -> dict[str, Any]:
    """Return the arguments of ``patch`` that let it calibrate; when decoding, on single tokens."""
    if not settings.calibrate:
        return {}
    size = replace(case.size, seq_len=1) if case.mode == DECODING else case.size
    labels = case.mode == TRAINING
    batch = case.family.batch(size, settings.device, case.dtype, labels=labels)
    return {"calibrate": True, "example": batch}


def differences(ours: Values, stock: Values, truth: Values, dtype: torch.dtype) -> tuple[str, ...]:
    """Return what of the patched model is further from float64 than rounding explains.

    ``stock`` is of the same model unpatched, ``truth`` of that in float64.
    """
    problems = []
    depth = truth.logits.shape[-2] if truth.logits.dim() > 1 else 1
    if ours.logits.shape != truth.logits.shape:
        return (f"logits have shape {tuple(ours.logits.shape)}",)
    allowed = dtypes.error_budget(stock.logits, truth.logits, dtype, depth=64)
    excess = (ours.logits.double() - truth.logits).abs() - allowed
    if not bool((excess <= 0).all()):  # NaN is not below anything
        problems.append(f"logits are off by {float(excess.max()):.2g} more than rounding explains")
    problems += _off("logits", ours.logits, stock.logits, truth.logits, dtype)
    if truth.loss is not None and stock.loss is not None and ours.loss is not None:
        budget = float(dtypes.error_budget(stock.loss, truth.loss, dtype, depth=depth))
        off = abs(float(ours.loss) - float(truth.loss))
        if not off <= budget:
            problems.append(f"loss is {float(ours.loss):.6g}, float64 has {float(truth.loss):.6g}")
    missing = sorted(truth.grads.keys() ^ ours.grads.keys())
    if missing:
        problems.append(f"gradients are missing, or there are others: {', '.join(missing[:3])}")
    for name in truth.grads.keys() & ours.grads.keys() & stock.grads.keys():
        problems += _off(
            f"gradient of {name}", ours.grads[name], stock.grads[name], truth.grads[name], dtype
        )
    return tuple(problems)


def _off(
    what: str, ours: torch.Tensor, stock: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype
) -> list[str]:
    error, allowed = dtypes.rms(ours.double() - truth), dtypes.rms_budget(stock, truth, dtype)
    if error <= allowed:
        return []
    return [f"{what}: root mean square error {error:.2g}, rounding explains {allowed:.2g}"]


def _contender(
    name: str, model: nn.Module, call: Any, case: ModelCase, device: torch.device
) -> ModelContender:
    """Return ``call``, the model itself or its compilation, as what the timer runs."""
    if case.mode == DECODING:
        decoder = GivenTokenDecoder(case.family, model, case.size, device)
        decoder.model = call
        prepare, run = decoder.prepare, decoder.run
        return ModelContender(name, prepare, run, lambda: Values(run(prepare())))
    dtype = next(model.parameters()).dtype
    inputs = case.family.batch(case.size, device, dtype, labels=case.mode == TRAINING)
    if case.mode == FORWARD:
        forward = torch.no_grad()(lambda _=None: call(**inputs))
        return ModelContender(name, lambda: None, forward, lambda: Values(forward().logits))
    return ModelContender(
        name,
        lambda: model.zero_grad(set_to_none=True),
        lambda _: call(**inputs).loss.backward(),
        lambda: _step(model, call, inputs),
    )


def _step(model: nn.Module, call: Any, inputs: Inputs) -> Values:
    model.zero_grad(set_to_none=True)
    output = call(**inputs)
    output.loss.backward()
    named = model.named_parameters()
    grads = {name: weight.grad for name, weight in named if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return Values(output.logits.detach(), output.loss.detach(), grads)


def _truth(stock: nn.Module, case: ModelCase, device: torch.device) -> tuple[Values, int]:
    """Return what the stock model computes in float64, and the operations of its products."""
    model: Any = copy.deepcopy(stock).double()
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # the one that knows float64
    exact = _contender("truth", model, model, case, device)
    with FlopCounterMode(display=False) as counter:
        values = exact.values()
    return values, counter.get_total_flops()


def _work(model: nn.Module, flops: int, case: ModelCase, limits: Limits) -> LeastWork:
    """Return the least that a run has to do: its products, and weights to read and to write."""
    rows = case.size.batch * (1 if case.mode == DECODING else case.size.seq_len)
    # In training weights are read twice and their gradients written.
    passes = {TRAINING: 3, FORWARD: 1, DECODING: case.size.steps}[case.mode]
    moved = int(passes * _weight_bytes(model, rows))
    return LeastWork.of([(moved, flops)], dtype_name(case.dtype), limits)


def _weight_bytes(model: Any, rows: int) -> float:
    """Return the bytes of weights that ``rows`` rows need: of experts those that are chosen."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    tables -= {id(head.weight)} if head is not None else set()
    chosen = getattr(model.config, "num_experts_per_tok", 0)
    total = 0.0
    for parameter in model.parameters():
        if id(parameter) in tables:
            continue
        experts = parameter.dim() == 3 and chosen > 0
        share = min(1.0, rows * chosen / parameter.shape[0]) if experts else 1.0
        total += share * parameter.numel() * parameter.element_size()
    return total


def slower(rows: Sequence[BenchRow], ratio: float) -> tuple[list[BenchRow], list[BenchRow]]:
    """Return our rows below ``ratio`` of the fastest other, apart those that were disturbed."""
    below = [row for row in rows if row.lead is not None and row.lead < ratio]
    return [row for row in below if row.trusted], [row for row in below if not row.trusted]
