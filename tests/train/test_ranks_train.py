"""Several processes: the losses of one, other layouts go on, and what ends one ends all alike."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import on_fresh_ranks
from train_runs import STEPS, Watching, around_backward, config, digest, whole

from fusedops._core import dtypes, extension
from fusedops.train import InputError, builder, train
from fusedops.train.builder import Run

pytestmark = pytest.mark.distributed
needs_library = pytest.mark.skipif(extension.cpu_library() is not None, reason="no library")
VERSION = torch.__version__
PLAIN = {"model": {"preset": "tiny-llama"}, "optimizer": {"lr": 3e-3}, "batch": 8}
# Processes, the step that they stop at, and how they share the work.
LAYOUTS = (
    (2, 4, {"dp": 2, "zero": 2, "microbatches": 2}),
    (2, 7, {"tp": 2, "sp": True}),
    (2, 9, {"cp": 2}),
    (2, 11, {"pp": 2, "microbatches": 2}),
    (1, STEPS, {"microbatches": 4}),
)
ONE_LAYER = {"preset": "tiny-gpt2", "num_layers": 1}


# Changes of the configuration and of its data, and what is told.
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mesh": ({"parallel": {"tp": 3}}, {}, "dp x tp x pp x cp = 1 x 3 x 1 x 1 = 3 must be the 2"),
    "heads": ({"parallel": {"tp": 2}, "model": ONE_LAYER | {"num_heads": 1}}, {}, "heads"),
    "batch": ({"batch": 3}, {}, "dp x microbatches must be a divisor of batch, 3, got 2"),
    "sequence": (
        {"parallel": {"tp": 2, "sp": True}},
        {"seq_len": 33},
        "tokens of a sequence must be a multiple of",
    ),
    "corpus": ({}, {"train": ["bad/text.txt"]}, "text.txt is not UTF-8: byte 3"),
    "cache": ({}, {"cache": "elsewhere"}, "all processes must see that folder"),
    "empty": ({}, {"train": ["bad/empty.txt"]}, "the corpus is empty: no text in 1 files"),
    "key": ({"optimizer": {"lrr": 1.0}}, {}, "unknown key 'lrr' in [optimizer]: did you mean"),
    "model": ({"model": ONE_LAYER}, {}, "is of another model or optimizer"),
}


def _train(rank: int, folder: str, changes: dict[str, Any], stop: int = 0) -> Any:
    """Train, up to a step; only the first rank is asked to stop there, and all must.

    Returns the result, and what was recorded.
    """

    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    watching = Watching(stop - 1, terminate)
    result = train(config(Path(folder), **changes), callback=watching)
    return result.step, result.loss, [dict(record) for record in watching.records]


def test_a_run_goes_on_in_other_layouts_with_the_losses_of_one_process(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(200):
        text = "".join(f"{n} plus {number} is {n + number}.\n" for n in range(number % 5))
        (texts / f"{number}.txt").write_text(f"{number}\n{text}")
    data = {"train": [str(texts)], "seq_len": 32, "documents": True}
    model = {"preset": "tiny-llama", "dropout": 0.2, "attention_dropout": 0.2}
    given = PLAIN | {"data": data, "model": model}
    wanted = whole(tmp_path, **given).records
    found: list[dict[str, Any]] = []
    for ranks, stop, parallel in LAYOUTS:
        changes = given | {"parallel": parallel}
        results = on_fresh_ranks(ranks, _train, str(tmp_path), changes, stop)
        assert all(isinstance(result, tuple) for result in results), results
        assert [each[:2] for each in results] == [(stop, results[0][1])] * ranks
        assert all(not records for *_, records in results[1:])
        found += results[0][2]
    for key in ("loss", "validation_loss", "grad_norm"):
        one, other = ([each[key] for each in run if key in each] for run in (found, wanted))
        assert one == pytest.approx(other, rel=dtypes.training_difference(STEPS)), key


def test_float32_masters_go_on_in_a_layout_that_stores_them_as_weights(tmp_path: Path) -> None:
    """Without zero they are states of the optimizer, and with it the weights are."""
    given = PLAIN | {"precision": {"param": "bfloat16"}, "steps": 6}
    plain, sharded = ({"dp": 2, "microbatches": 2, "zero": zero} for zero in (0, 2))
    losses = []
    for out, layouts in (("one", [(6, plain)]), ("both", [(3, plain), (5, sharded), (6, plain)])):
        records = []
        for stop, parallel in layouts:
            changes = given | {"parallel": parallel, "out": f"{tmp_path}/{out}"}
            results = on_fresh_ranks(2, _train, str(tmp_path), changes, stop)
            assert all(isinstance(result, tuple) for result in results), results
            records += results[0][2]
        losses.append([record["loss"] for record in records])
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=dtypes.training_difference(STEPS))


def _dying(rank: int, folder: str, out: str, die: int) -> tuple[int, str]:
    """Train with dropout; the second rank kills itself in a step."""

    def kill(run: Run) -> None:
        if rank == 1 and run.step == die:
            run.checkpointer.wait()  # for the checkpoint of step 5, on both ranks
            os.kill(os.getpid(), signal.SIGKILL)

    with around_backward(before=kill) as runs:
        train(config(Path(folder), out=f"{folder}/{out}", parallel={"zero": 1}))
    return len(runs), digest(runs[0])


def test_a_run_whose_rank_was_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole_run = on_fresh_ranks(2, _dying, str(tmp_path), "whole", -1)
    killed = on_fresh_ranks(2, _dying, str(tmp_path), "killed", 8)
    assert killed[1] == "died" and "rank 1 of its group of 2 has ended" in killed[0]
    resumed = on_fresh_ranks(2, _dying, str(tmp_path), "killed", -1)
    assert whole_run == [(STEPS, digest) for _, digest in whole_run]
    assert resumed == [(STEPS - 5, digest) for _, digest in whole_run]


def _switching(rank: int, folder: str, parallel: dict[str, Any]) -> tuple[str, str]:
    """Train with and without offloaded states, and from one to the other and back."""
    digests = {}
    for out, switches in (("plain", {6: False}), ("switched", {2: False, 4: True, 6: False})):
        for steps, is_offloaded in switches.items():
            given = parallel | ({"offload": ["optimizer"]} if is_offloaded else {})
            changes = PLAIN | {"out": f"{folder}/{out}", "parallel": given, "steps": 6}
            with around_backward() as runs:
                train(config(Path(folder), **changes), [f"steps={steps}", "schedule.kind=constant"])
        digests[out] = digest(runs[-1])
    return digests["plain"], digests["switched"]


# The layout of one process, and others on two.
@pytest.mark.ci(every=4)
@pytest.mark.parametrize(
    "parallel", [{}, {"zero": 1}, {"zero": 3}, {"tp": 2}, {"pp": 2, "microbatches": 2}], ids=str
)
def test_offload_is_switched_on_and_off_with_the_same_bits(
    parallel: dict[str, Any], tmp_path: Path
) -> None:
    results = on_fresh_ranks(2, _switching, str(tmp_path), parallel)
    for one, other in results:
        assert one == other


def test_dp_follows_from_the_processes_with_experts_too(tmp_path: Path) -> None:
    given = {"model": {"preset": "tiny-mixtral"}, "steps": 2, "parallel": {"ep": 2}}
    results = on_fresh_ranks(2, _train, str(tmp_path), PLAIN | given)
    assert [result[0] for result in results] == [2, 2], results
    for parallel, ranks, wanted in (
        ({"ep": 2, "ep_nodes": 2}, 4, {"dp": 4, "ep": 2}),
        ({"ep": 4, "cp": 2}, 4, {"dp": 2, "cp": 2, "ep": 4}),
        ({"ep": 2, "tp": 2, "shard_ranks": 2, "zero": 1}, 8, {"dp": 4, "tp": 2}),
        ({"mode": "data"}, 3, {"dp": 3}),
    ):
        found = builder.layout_of(parallel, ranks)
        assert {name: getattr(found, name) for name in wanted} == wanted
    with pytest.raises(ValueError, match="= 3 must be the 4 processes"):
        builder.layout_of({"tp": 3}, 4)
    with pytest.raises(ValueError, match="ep must be a divisor of dp x cp = 2"):
        builder.layout_of({"ep": 4}, 2)


def _overflowing(rank: int, folder: str) -> Any:
    """Train while the part of a gradient that only the second rank has overflows in a step."""

    def overflow(run: Run) -> None:
        if rank == 1 and run.step == 2:
            parameter: Any = next(run.parallel.model.parameters())
            parameter.grad.to_local()[0] = float("inf")

    watching = Watching()
    changes = PLAIN | {"parallel": {"zero": 2}, "precision": {"compute": "float16"}, "steps": 5}
    with around_backward(after=overflow) as runs:
        train(config(Path(folder), **changes), callback=watching)
    run = runs[0]
    steps = {int(each["step"]) for each in run.optimizer.state.values()}
    return steps, run.scale.value, [record["action"] for record in watching.records]


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    first, second = on_fresh_ranks(2, _overflowing, str(tmp_path))
    assert first[:2] == second[:2] == ({4}, 32768.0)
    assert first[2] == ["go", "go", "overflow", "go", "go"]


def _refused(rank: int, folder: str) -> list[str]:
    """Return what each case is refused with."""
    train(config(Path(folder), out=f"{folder}/other", steps=1))
    told = []
    for case, (changes, data, _) in BAD.items():
        given = config(Path(folder), **PLAIN | changes)
        given["data"] |= data
        if case == "model":
            given |= {"out": f"{folder}/other"}
        os.chdir("/" if case == "cache" and rank else folder)
        with pytest.raises(InputError) as caught:
            train(given)
        told.append(str(caught.value))
    return told


def test_a_mistake_is_told_by_all_ranks_and_none_waits(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "empty.txt").write_text("\n")
    (tmp_path / "bad" / "text.txt").write_bytes(b"tea\xff" * 400)
    config(tmp_path)
    first, second = on_fresh_ranks(2, _refused, str(tmp_path))
    assert isinstance(first, list) and first == second, first
    for told, (case, (*_, wanted)) in zip(first, BAD.items(), strict=True):
        assert wanted in told, case


# What the second rank is started with instead, and the message.
UNEQUAL: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"batch": 4}, "batch is 8 on rank 0, 4 on rank 1"),
    "several": ({"seed": 1, "steps": 3}, "seed is 0 on rank 0, 1 on rank 1; steps is 12 on rank 0"),
    "optimizer": ({"optimizer": {"lr": 1e-3}}, "optimizer.lr is 0.003 on rank 0, 0.001 on rank 1"),
    "dtype": ({"precision": {"compute": "bfloat16"}}, 'precision.compute is "float32" on rank 0'),
    "layout": ({"parallel": {"tp": 2}}, "parallel.tp is not set on rank 0, 2 on rank 1"),
    "model": ({"model": {"preset": "tiny-gpt2"}}, 'model.preset is "tiny-llama" on rank 0'),
    "tokens": ({}, 'tokens is "'),
    "torch": ({}, f'torch is "{torch.__version__}" on rank 0, "0.1" on rank 1'),
}


def _started_unequally(rank: int, folder: str) -> list[str]:
    """Return what each case is refused with."""
    messages = []
    for case, (changes, _) in UNEQUAL.items():
        given = config(Path(folder), **PLAIN, data={"train": ["t.bin"], "seq_len": 32})
        os.makedirs(f"{folder}/{case}-{rank}", exist_ok=True)
        os.chdir(f"{folder}/{case}-{rank}")
        first = rank if case == "tokens" else 0
        torch.arange(first, first + 250, dtype=torch.uint8).short().numpy().tofile("t.bin")
        torch.__version__ = "0.1" if case == "torch" and rank == 1 else VERSION
        with pytest.raises(InputError) as caught:
            train(given | (changes if rank == 1 else {}))
        messages.append(str(caught.value))
    return messages


def test_ranks_that_are_started_unequally_end_with_what_differs(tmp_path: Path) -> None:
    first, second = on_fresh_ranks(2, _started_unequally, str(tmp_path))
    assert isinstance(first, list) and first == second, (first, second)
    for told, (case, (_, wanted)) in zip(first, UNEQUAL.items(), strict=True):
        assert wanted in told, case


# Ranks, and what they share or save.
ARENAS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "recompute": (1, {"microbatches": 2, "recompute": "full"}),
    "offload": (1, {"offload": ["activations"]}),
    "pipeline": (2, {"pp": 2, "microbatches": 4}),
    "zero 3": (2, {"dp": 2, "zero": 3, "microbatches": 2}),
    "tensor": (2, {"tp": 2, "sp": True}),
}


def _in_arena(rank: int, folder: str, out: str, changes: dict[str, Any]) -> tuple[str, float, str]:
    """Return a digest of this rank's weights, and of a step the share in the block and the note."""
    found: list[tuple[float, str]] = [(0.0, "")]

    def look(run: Run) -> None:
        if run.arena is not None and run.step:  # the figures of this step so far
            report = run.arena.report()
            found.append((report.served_bytes / report.step_bytes, report.note))

    with around_backward(after=look) as runs:
        train(config(Path(folder), out=f"{folder}/{out}", **changes))
    return digest(runs[0]), *found[-1]


@needs_library
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("zero 3", "tensor") else ())
        for name in ARENAS
    ],
)
def test_training_in_an_arena_keeps_its_bits(tmp_path: Path, layout: str) -> None:
    config(tmp_path)  # writes the corpus
    ranks, parallel = ARENAS[layout]
    changes = {"model": {"preset": "tiny-llama"}, "parallel": parallel, "steps": 8}
    plain = on_fresh_ranks(ranks, _in_arena, str(tmp_path), "plain", changes)
    using = on_fresh_ranks(ranks, _in_arena, str(tmp_path), "arena", changes | {"arena": True})
    assert all(isinstance(result, tuple) for result in [*plain, *using]), (plain, using)
    for (weights, share, note), (expected, *_) in zip(using, plain, strict=True):
        assert weights == expected and not note
        assert share > (0.5 if ranks == 1 else 0.3)


def test_training_on_another_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "cpu_library", lambda: "it is not built")
    with pytest.raises(InputError, match="arena = true is not possible: use_arena: it needs the"):
        train(config(tmp_path, arena=True))
