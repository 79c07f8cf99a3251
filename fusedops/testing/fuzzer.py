"""``verify``: draw cases, run each on ranks, compare, and shrink the first that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops._core.labels import IGNORE_INDEX
from fusedops.testing import arguments, batches, case_run, standard, threads
from fusedops.testing.batches import Batch
from fusedops.testing.case import BATCH_SIZES, SEQ_LENS, Case, Space
from fusedops.testing.case_run import Reference, Subject
from fusedops.testing.processes import Processes
from fusedops.testing.ranks import RankError

RANKS = ("threads", "processes")
# A case that is refused (sizes that do not divide) is drawn again with other sizes so many times.
REDRAWS = 6
# Lines of differences that a failure shows.
SHOWN = 8
_MOST_SHRINKS = 60  # cases that are tried to find a smaller one that fails


class ParityError(AssertionError):
    """A parallel run is not the run of a single process; the message has the smallest such case."""


@dataclass
class Report:
    """What ``verify`` has done; it is true if cases passed."""

    passed: list[Case] = field(default_factory=list)  # cases that were as in a single process
    # Cases that all ranks refused, with the reason
    refused: list[tuple[Case, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.passed)

    def __str__(self) -> str:
        lines = [
            f"verify: {len(self.passed)} cases as in a single process, {len(self.refused)} refused"
        ]
        reasons = Counter(why for _, why in self.refused)
        lines += [f"  refused {count} x: {why}" for why, count in reasons.most_common(5)]
        return "\n".join(lines)


def verify(
    model_factory: Callable[[], nn.Module] | Mapping[str, Callable[[], nn.Module]],
    meshes: Sequence[Mapping[str, int]],
    *,
    parallelize: Callable[..., Any] | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    batch: Callable[[Case, torch.Generator], Batch] | None = None,
    loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, ...]] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seq_lens: Sequence[int] = SEQ_LENS,
    workloads: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float64,),
    cases: int = 32,
    seed: int = 0,
    ranks: str = "threads",
) -> Report:
    """Train a model in parallel in many ways, and compare each with a single process.

    A case is a mesh, a choice of each option, sizes, a workload and a dtype. The whole model is
    made on every rank from the same seed and given to ``parallelize``; then loss, every gradient,
    the norm of the gradients where they are clipped, and the weights after one or two steps of the
    optimizer must be those of one process that trains on the whole batch. The first case that fails
    is made as small as it gets; ``replay`` runs it again.

    Args:
        model_factory: returns the whole model, an ``nn.Module``, its weights drawn from torch's
            generator; or several such functions by name.
        meshes: sizes of the axes of each mesh to try, such as ``{"dp": 2, "tp": 2}``.
        parallelize: ``(model, mesh, case) -> Parallel``, or the parallel module, which is then
            trained over the mesh's axis ``dp``. A ``ValueError`` or ``UnsupportedError`` on all
            ranks means that it cannot be done, and is counted. The default is
            ``fusedops.models.parallelize``; the options are then fields of ``ParallelConfig``.
        options: what else there is to choose, by name; ``case.options`` has the choice. The first
            of each is the simplest.
        batch: ``(case, generator) -> dict`` of tensors with the whole batch; the default has
            ``tokens`` and ``labels`` for a model with ``config.vocab_size``.
        loss: ``(model, batch) -> (total, count)``: the sum of the losses and the number of targets,
            and a third that is added to their mean, if there is one; the default calls
            ``model(**batch)``.
        optimizer: ``(parameters) -> Optimizer``. The default is AdamW with a large ``eps``: with a
            small one a first step is the gradient's sign, and that of zero is rounding.
        batch_sizes: to choose from, like ``seq_lens``.
        seq_lens: tokens in a sequence.
        workloads: names of ``testing.WORKLOADS``; the default is all, ``documents`` only where the
            model takes ``document_ids``.
        dtypes: of the parameters. Float64 finds most: nothing hides in the rounding.
        cases: how many to run. Each combination of mesh and options comes before one comes twice.
        seed: of the draws.
        ranks: ``"threads"`` of this process, quick and deterministic, or gloo ``"processes"``.

    Returns:
        A ``Report`` of the cases that passed and of those that were refused.

    Raises:
        ParityError: a case failed, or none could be run.
        TypeError: an argument has the wrong type.
        ValueError: an axis, an option or a value is not known, or possible in no combination; this
            is found before anything runs.
    """
    factories = _factories(model_factory)
    checks.choice("verify", "ranks", ranks, RANKS)
    space = Space(
        meshes=meshes,
        options={} if options is None else options,
        models=list(factories),
        batch_sizes=batch_sizes,
        seq_lens=seq_lens,
        workloads=batches.WORKLOADS if workloads is None else workloads,
        dtypes=dtypes,
    )
    subject = _subject(space, cases, seed, factories, parallelize, batch, loss, optimizer)
    if workloads is None:
        space = dataclasses.replace(space, workloads=_workloads(factories))
    report = Report()
    with _runner(ranks, max(Case(mesh).ranks for mesh in meshes)) as run:
        for case, rng in itertools.islice(space.draw(seed), cases):
            outcome = _outcome(subject, case, run)
            for _ in range(REDRAWS):
                if outcome.kind != "refused":
                    break
                case = space.redrawn(case, rng)
                outcome = _outcome(subject, case, run)
            if outcome.kind == "refused":
                report.refused.append((case, outcome.why))
            elif outcome.kind:
                raise ParityError(_failure(case, outcome, space, subject, run))
            else:
                report.passed.append(case)
    if not report:
        raise ParityError(str(report))
    return report


def replay(
    case: Case,
    model_factory: Callable[[], nn.Module] | Mapping[str, Callable[[], nn.Module]],
    *,
    parallelize: Callable[..., Any] | None = None,
    batch: Callable[[Case, torch.Generator], Batch] | None = None,
    loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, ...]] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    ranks: str = "threads",
) -> None:
    """Run one case; the arguments are those of ``verify``.

    Raises:
        ParityError: it fails, or is refused.
        ValueError: it has an axis, an option, a model or a workload that is not known.
    """
    factories = _factories(model_factory)
    checks.choice("replay", "ranks", ranks, RANKS)
    if case.model not in factories:
        checks.fail("replay", "the case's model", f"one of {list(factories)}", repr(case.model))
    space = Space(
        meshes=[case.mesh],
        options={name: [value] for name, value in case.options.items()},
        batch_sizes=[case.batch_size],
        seq_lens=[case.seq_len],
        workloads=[case.workload],
        dtypes=[case.dtype],
    )
    subject = _subject(space, 1, case.seed, factories, parallelize, batch, loss, optimizer)
    with _runner(ranks, case.ranks) as run:
        outcome = _outcome(subject, case, run)
    if outcome.kind:
        raise ParityError(f"{case}: {outcome.kind}\n{outcome.why}")
    print(f"{case}: as in a single process")


def token_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return sum and number of a language model's losses, and a router's loss if there is one.

    A model that takes ``labels`` returns them so; one that returns logits is given its
    cross-entropy.
    """
    given = {name: tensor for name, tensor in batch.items() if name != "labels"}
    accepted = inspect.signature(model.forward).parameters
    if "labels" in accepted:
        return model(**batch)
    logits = model(**given).flatten(0, -2)
    labels = batch["labels"].flatten()
    total = nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
    return total, (labels != IGNORE_INDEX).sum()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW whose first step is no sign: see ``verify``."""
    return torch.optim.AdamW(parameters, **standard.ADAMW)


def _factories(
    given: Callable[[], nn.Module] | Mapping[str, Callable[[], nn.Module]],
) -> Mapping[str, Callable[[], nn.Module]]:
    if isinstance(given, Mapping):
        return given
    if isinstance(given, nn.Module) or not callable(given):
        raise TypeError(
            "verify: model_factory must be a function that returns a module (several are made), "
            f"got {checks.type_name(given)}"
        )
    return {"": given}


def _workloads(factories: Mapping[str, Callable[[], nn.Module]]) -> Sequence[str]:
    """Return the workloads that every model can be given."""
    models = [factory() for factory in factories.values()]
    packed = all("document_ids" in inspect.signature(model.forward).parameters for model in models)
    return [name for name in batches.WORKLOADS if packed or name != "documents"]


def _subject(
    space: Space,
    cases: int,
    seed: int,
    factories: Mapping[str, Callable[[], nn.Module]],
    parallelize: Callable[..., Any] | None,
    batch: Callable[[Case, torch.Generator], Batch] | None,
    loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, ...]] | None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None,
) -> Subject:
    """Check what may be drawn; return the functions that were given, or those by default."""
    own = {"own_parallelize": parallelize is not None, "own_batch": batch is not None}
    arguments.check(space, cases, seed, **own)
    if batch is None:
        model = next(iter(factories.values()))()
        vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
        if vocab_size is None:
            checks.fail("verify", "batch", "given where the model has no config.vocab_size", "None")
        batch = functools.partial(batches.token_batch, vocab_size=vocab_size)
    parallelize = parallelize or standard.standard
    return Subject(factories, parallelize, batch, loss or token_loss, optimizer or adamw)


@dataclass
class _Outcome:
    """``kind``: empty where all is well; ``"refused"``, ``"differs"``, or the name of an error."""

    kind: str
    why: str = ""


Runner = Callable[..., list[case_run.RankComparison]]


@contextlib.contextmanager
def _runner(ranks: str, most: int) -> Iterator[Runner]:
    """Return what runs a function on up to so many ranks."""
    if ranks == "threads":
        yield threads.run
        return
    with Processes(most) as pool:
        yield lambda *args, seed: pool.run(*args)  # processes have no order


def _outcome(subject: Subject, case: Case, run: Runner) -> _Outcome:
    known: Reference = case_run.reference(subject, case)
    try:
        verdicts = run(case_run.on_rank, case.ranks, subject, case, known, seed=case.seed)
    except RankError as error:
        kinds = {type(raised).__name__ for raised in error.errors.values()}
        if kinds and len(error.errors) == case.ranks and kinds <= set(case_run.REFUSALS):
            return _Outcome("refused", str(error.errors[min(error.errors)]))
        kind = min(kinds) if kinds else (error.why.splitlines() or ["no answer"])[0]
        return _Outcome(kind, str(error))
    differences = [difference for verdict in verdicts for difference in verdict.differences]
    differences += case_run.missing(known, verdicts)
    if not differences:
        return _Outcome("")
    # A wrong gradient spoils those that the backward computes after it: the last parameter, which
    # is the nearest to the loss, is the nearest to the cause.
    order = {key: place for place, key in enumerate(known.truth)}
    stages = ("loss", "gradient", "norm", "weight")
    differences.sort(
        key=lambda difference: (
            difference.step,
            stages.index(difference.kind),
            -order.get((difference.kind, difference.step, difference.name), 0),
        )
    )
    by_text: dict[str, list[int]] = {}
    for difference in differences:
        by_text.setdefault(str(difference), []).append(difference.rank)
    shown = [
        f"{text} (rank {', '.join(map(str, on))})" if on[0] >= 0 else text
        for text, on in list(by_text.items())[:SHOWN]
    ]
    if len(by_text) > SHOWN:
        shown.append(f"and {len(by_text) - SHOWN} more")
    return _Outcome("differs", "\n".join(shown))


def _failure(case: Case, outcome: _Outcome, space: Space, subject: Subject, run: Runner) -> str:
    """Return the message of a case that fails, made as small as it gets."""

    def fails(other: Case) -> bool:
        return _outcome(subject, other, run).kind == outcome.kind

    small = shrink(case, space, fails)
    last = _outcome(subject, small, run)
    return (
        f"{(last if last.kind else outcome).why}\n\n"
        f"the smallest case that fails, drawn as {case}:\n\n    testing.{small}\n\n"
        "fusedops.testing.replay runs it again, with the functions that verify was given"
    )


def shrink(case: Case, space: Space, fails: Callable[[Case], bool]) -> Case:
    """Make a failing case simpler, one change at a time, while it fails in the same way."""
    tried = {case.code()}
    while True:
        for simpler in space.simpler(case):
            if simpler.code() in tried or len(tried) > _MOST_SHRINKS:
                continue
            tried.add(simpler.code())
            if fails(simpler):
                case = simpler
                break
        else:
            return case
