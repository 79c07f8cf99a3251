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
from fusedops._core.peak import peak_bytes
from fusedops._core.timer import Clock, Timing, TimingPlan, Variant, measure
from fusedops.bench.cases import lead
from fusedops.bench.contenders import AUTOMATIC, COMPILE, EAGER, is_ours
from fusedops.bench.limits import LeastWork, Limits
from fusedops.bench.model_zoo import GivenTokenDecoder, Inputs, ModelFamily, ModelSize
from fusedops.bench.results import BenchRow
from fusedops.integrations import patch

TRAINING, FORWARD, DECODING = "training", "forward", "decoding"
MODES = (TRAINING, FORWARD, DECODING)

Patch = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class ModelSettings:
    """How to measure.

    Attributes:
        device: where.
        plan: how long each row is timed.
        compiled: include torch.compile of the stock model.
        memory: measure the peak of a run too.
        allocator: ``"tuned"`` or ``"system"``: what the process was set to.
        cache_bytes: size of the last cache.
        report: is called with what is being measured.
        patch: what is done to the model that is ours.
    """

    device: torch.device
    plan: TimingPlan
    compiled: bool
    memory: bool
    allocator: str
    cache_bytes: int
    report: Callable[[str], None] = lambda what: None
    patch: Patch = patch


@dataclass(frozen=True)
class Values:
    """What a run computes: of training the loss, the logits and the gradients, else the logits."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FamilyResult:
    """What was found of one family in one mode and dtype.

    Attributes:
        rows: the figures.
        notes: what could not be measured and why.
        wrong: what our model computes wrong; there is no row of ours then.
    """

    rows: tuple[BenchRow, ...] = ()
    notes: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelContender:
    """A model in one mode.

    Attributes:
        name: ``"eager"``, ``"compile"`` or ``"fusedops"``.
        model: whose parameters get gradients.
        prepare: makes what a run writes on, outside of what is timed.
        run: one training step without its optimiser, one forward, or all steps of decoding.
        values: makes a run and returns what it computed.
    """

    name: str
    model: nn.Module
    prepare: Callable[[], Any]
    run: Callable[[Any], Any]
    values: Callable[[], Values]


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


def label(mode: str, size: ModelSize) -> str:
    """Return what a size is called in a mode."""
    return size.label + (f"+{size.steps}" if mode == DECODING else "")


def run_case(
    family: ModelFamily,
    mode: str,
    dtype: torch.dtype,
    size: ModelSize,
    settings: ModelSettings,
    limits: Limits,
    clock: Clock,
) -> FamilyResult:
    """Measure a family in one mode and dtype.

    Args:
        family: of transformers.
        mode: one of ``MODES``.
        dtype: of the weights.
        size: of the model and of what it reads.
        settings: how.
        limits: of this machine.
        clock: of the device.
    """
    title = f"{family.name} {mode} {label(mode, size)} {_short(dtype)}"
    try:
        settings.report("building")
        stock = family.build(size).to(settings.device, dtype).train(mode == TRAINING)
        eager = _contender(EAGER, stock, stock, family, mode, size, settings.device)
        settings.report("values")
        truth, flops = _truth(stock, family, mode, size, settings.device)
        known = eager.values()
    except Exception as error:
        # Too large for this machine, a dtype that torch lacks here, a transformers without it.
        return FamilyResult(notes=(f"{title}: no rows: {_line(error)}",))
    able, notes, wrong = [eager], [], []
    errors = {EAGER: _ulps(known, truth)}
    ours: ModelContender | None = None
    backend = ""
    try:
        patched = copy.deepcopy(stock)
        settings.patch(patched)
        ours = _contender(AUTOMATIC, patched, patched, family, mode, size, settings.device)
        before = backends.counters()
        values = ours.values()
        backend = _backends_since(before)
        wrong = [f"{title}: {text}" for text in differences(values, known, truth, dtype)]
        errors[AUTOMATIC] = _ulps(values, truth)
    except Exception as error:
        wrong = [f"{title}: the patched model raises {_line(error)}"]
    if settings.compiled:
        settings.report("compiling")
        try:
            torch._dynamo.reset()
            compiled = torch.compile(stock)
            rival = _contender(COMPILE, stock, compiled, family, mode, size, settings.device)
            errors[COMPILE] = _ulps(rival.values(), truth)
            able.append(rival)
        except Exception as error:
            notes.append(f"{title}: no {COMPILE} row: {_line(error)}")
    if ours is not None and not wrong:
        able.append(ours)
    del truth, known
    settings.report("memory")
    work = _work(stock, flops, mode, dtype, size, limits)
    peaks = {contender.name: _peak(contender, settings) for contender in able}
    settings.report("timing")
    timing = measure(
        [Variant(contender.name, contender.run, contender.prepare) for contender in able],
        clock,
        settings.plan,
    )
    rows = [
        _row(
            family,
            mode,
            dtype,
            size,
            contender.name,
            timing,
            work,
            settings,
            errors,
            peaks,
            backend,
        )
        for contender in able
    ]
    return FamilyResult(tuple(rows), tuple(notes), tuple(wrong))


def differences(ours: Values, stock: Values, truth: Values, dtype: torch.dtype) -> tuple[str, ...]:
    """Return what of ``ours`` is further from ``truth`` than rounding explains.

    Args:
        ours: of the patched model.
        stock: of the same model unpatched.
        truth: of that model in float64.
        dtype: of the weights.
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
    name: str,
    model: nn.Module,
    call: Any,
    family: ModelFamily,
    mode: str,
    size: ModelSize,
    device: torch.device,
) -> ModelContender:
    """Return ``call``, the model itself or its compilation, as what the timer runs."""
    if mode == DECODING:
        decoder = GivenTokenDecoder(family, model, size, device)
        decoder.model = call
        return ModelContender(
            name,
            model,
            decoder.prepare,
            decoder.run,
            lambda: Values(decoder.run(decoder.prepare())),
        )
    dtype = next(model.parameters()).dtype
    inputs = family.batch(size, device, dtype, labels=mode == TRAINING)
    if mode == FORWARD:
        return ModelContender(
            name,
            model,
            lambda: None,
            lambda _: _forward(call, inputs),
            lambda: Values(_forward(call, inputs).logits),
        )
    return ModelContender(
        name,
        model,
        lambda: model.zero_grad(set_to_none=True),
        lambda _: call(**inputs).loss.backward(),
        lambda: _step(model, call, inputs),
    )


@torch.no_grad()
def _forward(call: Any, inputs: Inputs) -> Any:
    return call(**inputs)


def _step(model: nn.Module, call: Any, inputs: Inputs) -> Values:
    model.zero_grad(set_to_none=True)
    output = call(**inputs)
    output.loss.backward()
    named = model.named_parameters()
    grads = {name: module.grad for name, module in named if module.grad is not None}
    model.zero_grad(set_to_none=True)
    return Values(output.logits.detach(), output.loss.detach(), grads)


def _truth(
    stock: nn.Module, family: ModelFamily, mode: str, size: ModelSize, device: torch.device
) -> tuple[Values, int]:
    """Return what the stock model computes in float64, and the operations of its products."""
    model: Any = copy.deepcopy(stock).double()
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # the one that knows float64
    exact = _contender("truth", model, model, family, mode, size, device)
    with FlopCounterMode(display=False) as counter:
        values = exact.values()
    return values, counter.get_total_flops()


def _backends_since(before: dict[tuple[str, str], int]) -> str:
    after = backends.counters()
    ran = {backend for (op, backend), n in after.items() if n > before.get((op, backend), 0)}
    return "+".join(sorted(ran))


def _ulps(values: Values, truth: Values) -> tuple[float, float]:
    """Return the largest and the mean error of the logits."""
    error = dtypes.ulps(values.logits, truth.logits)
    return float(error.max()), float(error.mean())


def _peak(contender: ModelContender, settings: ModelSettings) -> int | None:
    if not settings.memory:
        return None
    value = contender.prepare()
    peak = peak_bytes(lambda: contender.run(value), settings.device)
    contender.model.zero_grad(set_to_none=True)
    return peak


def _work(
    model: nn.Module, flops: int, mode: str, dtype: torch.dtype, size: ModelSize, limits: Limits
) -> LeastWork:
    """Return the least that a run has to do: its products, and weights to read and to write."""
    rows = size.batch * (1 if mode == DECODING else size.seq_len)
    # In training weights are read twice and their gradients written.
    passes = {TRAINING: 3, FORWARD: 1, DECODING: size.steps}[mode]
    moved = int(passes * _weight_bytes(model, rows))
    return LeastWork.of([(moved, flops)], _short(dtype), limits)


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


def _row(
    family: ModelFamily,
    mode: str,
    dtype: torch.dtype,
    size: ModelSize,
    name: str,
    timing: Timing,
    work: LeastWork,
    settings: ModelSettings,
    errors: dict[str, tuple[float, float]],
    peaks: dict[str, int | None],
    backend: str,
) -> BenchRow:
    spread, ratio = timing.spread(name), timing.ratio(EAGER, name)
    against = lead(timing, name)
    return BenchRow(
        op=family.name,
        case=label(mode, size),
        dtype=_short(dtype),
        direction=mode,
        variant=name,
        backend=backend if is_ours(name) else "",
        allocator=settings.allocator,
        speedup=ratio.median,
        speedup_q1=ratio.q1,
        speedup_q3=ratio.q3,
        median_us=spread.median * 1e6,
        q1_us=spread.q1 * 1e6,
        q3_us=spread.q3 * 1e6,
        samples=spread.count,
        discarded=timing.discarded(name),
        trusted=all(map(timing.trusted, {name, EAGER, against.get("rival", EAGER)})),
        gb_per_s=work.bytes_moved / spread.median * 1e-9,
        tflop_per_s=work.flops / spread.median * 1e-12,
        limit_share=work.least_seconds / spread.median,
        in_cache=work.in_memory and work.bytes_moved < 2 * settings.cache_bytes,
        host_us=None,
        peak_bytes=peaks[name],
        error_max_ulps=errors[name][0],
        error_mean_ulps=errors[name][1],
        **against,
    )


def slower(rows: Sequence[BenchRow], ratio: float) -> tuple[list[BenchRow], list[BenchRow]]:
    """Return our rows below ``ratio`` of the fastest other, apart those that were disturbed."""
    below = [row for row in rows if row.lead is not None and row.lead < ratio]
    return [row for row in below if row.trusted], [row for row in below if not row.trusted]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"
