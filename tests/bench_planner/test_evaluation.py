"""Predictions of the rows of published tables, and the scripts that print and fit them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import evaluate
import evaluation
import fit
import pytest

from fusedops.bench.tables import csv_text, kendall_tau, load_rows
from fusedops.planner import load_device, step_time

GPT = {"layers": "24", "hidden": "2048", "heads": "16", "seq": "1024", "gpus": "8", "arch": "dense"}
ROW = {
    **GPT,
    "gpu": "A100",
    "gpu_mem_gb": "80",
    "vocab": "51200",
    "tp": "2",
    "pp": "1",
    "dp": "4",
    "mbs": "4",
    "gbs": "64",
    "recompute": "full",
    "source": "here",
    "model": "GPT",
}


def test_layers_of_a_table_are_divided_as_equally_as_can_be() -> None:
    unequal = evaluation.shape_of({**ROW, "pp": "5", "tp": "2", "dp": "1", "gpus": "10"})
    assert unequal.rank_layers == ((5, 0), (5, 0), (5, 0), (5, 0), (4, 0))
    experts = {"experts": "8", "topk": "2", "moe_ffn": "1024", "pp": "7", "dp": "1", "gpus": "14"}
    counts = evaluation.shape_of({**ROW, **experts}).rank_layers
    assert counts == ((0, 3), (0, 3), (0, 4), (0, 4), (0, 4), (0, 3), (0, 3))
    assert evaluation.shape_of(ROW).rank_layers == ()


def test_checkpointing_by_operator_keeps_fewer_bytes() -> None:
    row = {**ROW, "gpu": "H100", "recompute": "selective", "tp": "1", "dp": "8", "mbs": "1"}
    megatron, torch_native = ({**row, "shard": shard} for shard in ("fsdp", "fsdp2"))
    assert evaluation.shape_of(megatron).recompute == "selective"
    assert evaluation.shape_of(torch_native).recompute == "products"
    memory = [evaluation.predict(row).mem_gib or 0 for row in (megatron, torch_native)]
    # In each of 24 layers the output of a norm and the values: 2 x 2048 elements of 1,024 tokens.
    assert (memory[0] - memory[1]) * 2**30 == pytest.approx(24 * 2 * 2048 * 1024 * 2, rel=0.15)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gpus": "16"}, "tp x pp x dp x cp = 8 contradicts gpus = 16"),
        ({"gbs": "60"}, "dp x mbs = 16 does not divide gbs = 60"),
        ({"mbs": ""}, "mbs is empty"),
        ({"hidden": "wide"}, "hidden = 'wide' is not a number"),
        ({"layers": "2.5"}, "layers = 2.5 is not an integer from 1 on"),
        ({"gpu": "TPU"}, "gpu = TPU is unknown"),
        ({"gpu": ""}, "gpu is empty, and no --device was given"),
        ({"step_s": "nan"}, ""),
        ({"arch": "dense-glu", "ffn": ""}, "ffn is empty"),
    ],
)
def test_a_row_without_a_prediction_says_why(change: dict[str, str], why: str) -> None:
    prediction = evaluation.predict({**ROW, **change})
    assert (prediction.step_s is None) == bool(why) and prediction.why.startswith(why)


FSDP2 = {"shard": "fsdp2", "tp": "1", "dp": "4", "pp": "2"}
# What a row has, and a field of the shape that follows.
SHAPES: dict[str, tuple[dict[str, str], str, object]] = {
    "feed-forward width": ({}, "inner", 8192),
    "micro-batches": ({}, "microbatches", 4),
    "recomputation": ({}, "recompute", "full"),
    "virtual stages": ({"vp": "2"}, "virtual", 2),
    "no flash attention on an A100": ({}, "flash", False),
    "flash attention on an H100": ({"gpu": "H100"}, "flash", True),
    "float8": ({"precision": "FP8"}, "dtype", "float8"),
    "FSDP2": ({"shard": "fsdp2"}, "zero", 3),
    "FSDP2 gathers a pipeline stage once in a step": (FSDP2, "zero", 1),
    "FSDP gathers a pipeline stage for each micro-batch": (FSDP2 | {"shard": "fsdp"}, "zero", 3),
    "who converts to float8": ({"gpu": "H100", "precision": "FP8"}, "cast_bytes", 0),
    "torch's own float8": ({"precision": "float8-tensorwise"}, "cast_bytes", 8.0),
    # Megatron reduces fp16 gradients as they are, and accumulates those of bf16 in float32.
    "gradients of fp16": ({"precision": "fp16"}, "reduce_bytes", 2),
    "gradients of bf16": ({"precision": "bf16"}, "reduce_bytes", 4),
}


@pytest.mark.parametrize(("change", "field", "value"), SHAPES.values(), ids=SHAPES)
def test_a_row_is_the_shape_that_it_describes(
    change: dict[str, str], field: str, value: object
) -> None:
    assert getattr(evaluation.shape_of({**ROW, **change}), field) == value


def test_a_row_has_its_device() -> None:
    slow = {**ROW, "inter_gbit_per_gpu": "50", "gpus_per_node": "4"}
    assert evaluation.device_of(slow).links.network == 50e9 / 8
    for gpu, memory, name in (
        ("A100", "40", "40 GB"),
        ("H100", "80", "80 GB"),
        ("H100-96GB-HBM2e-500W", "96", "96 GB HBM2e, 500 W"),
    ):
        row = {**ROW, "gpu": gpu, "gpu_mem_gb": memory}
        assert evaluation.device_of(row).name.endswith(name)


def test_what_does_not_fit_is_said_not_to_fit() -> None:
    small = evaluation.predict(ROW)
    assert small.fits and small.mem_gib is not None and 5 < small.mem_gib < 40
    large = {**ROW, "layers": "96", "hidden": "12288", "heads": "96"}
    assert evaluation.predict(large).fits is False


def test_ranks_of_equal_orders_are_1() -> None:
    pairs = [(1.0, 2.0), (2.0, 3.0), (3.0, 5.0)]
    assert kendall_tau(pairs) == 1.0
    assert kendall_tau([(-a, b) for a, b in pairs]) == -1.0
    assert kendall_tau([(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) == pytest.approx(0.8165, 1e-4)


def test_the_script_adds_columns_and_prints_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {**ROW, "mbs": mbs, "step_s": step}
        for mbs, step in (("1", "1.2"), ("2", ".9"), ("4", ".8"))
    ]
    rows += [{**ROW, "gbs": "60", "step_s": "1"}, {**ROW, "step_s": "soon"}]
    steps, out = tmp_path / "steps.csv", tmp_path / "predictions.csv"
    steps.write_text(csv_text(rows, ROW | {"step_s": ""}))
    evaluate.main([str(steps), "--out", str(out)])
    printed = capsys.readouterr().out
    assert "Mean absolute errors" in printed and "1 groups" in printed
    written = load_rows(out)
    assert [bool(row["predicted_step_s"]) for row in written] == [True, True, True, False, True]
    assert written[3]["why"] == "dp x mbs = 16 does not divide gbs = 60"
    assert written[0]["predicted_fits"] == "1" and written[0]["source"] == "here"
    evaluate.main([str(steps), "--half", "--out", str(out)])
    assert [row["mbs"] for row in load_rows(out)] == ["2", "4"]


def test_a_fitted_device_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = load_device("a100-80")
    slower = replace(device, efficiency=replace(device.efficiency, products=0.5))
    rows = []
    for mbs, tp in itertools.product((1, 2, 4, 8), (1, 2)):
        row = {**ROW, "mbs": str(mbs), "tp": str(tp), "dp": str(8 // tp), "hidden": "8192"}
        seconds = step_time(evaluation.shape_of(row), slower).seconds
        peak = {"mem_gib": "70"} if mbs == 1 else {"mem_gib": ""}
        rows.append({**row, "gpu": "", "step_s": f"{seconds:.6f}", **peak})
    steps, out = tmp_path / "steps.csv", tmp_path / "mine.toml"
    steps.write_text(csv_text(rows, rows[0]))
    fit.main([str(steps), "--names", "products,attention", "--out", str(out)])
    mine = load_device(out)
    assert asdict(mine.links) == asdict(device.links) and "8 steps" in mine.sources["efficiency"]
    assert mine.efficiency.products == pytest.approx(0.5, rel=0.02)
    assert mine.memory.reserved == evaluation.measured_reserve(rows, device)
    errors = evaluation.evaluate(rows, mine).errors
    assert errors["here"][0] < 1 < evaluation.evaluate(rows, device).errors["here"][0]
    # Rows that are not fitted say nothing of the constants.
    for row in rows[1::2]:
        row["step_s"] = "1000"
    steps.write_text(csv_text(rows, rows[0]))
    capsys.readouterr()
    fit.main([str(steps), "--names", "products,attention", "--half"])
    printed = capsys.readouterr().out
    assert "products = 0.5\n" in printed and "not fitted: here: 4 steps" in printed


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (evaluate.main, ["missing.csv"], "cannot read missing.csv"),
        (fit.main, ["missing.csv", "--device", "h10"], "did you mean h100"),
        (fit.main, ["missing.csv=h10"], "did you mean h100"),
    ],
)
def test_a_wrong_call_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    main: Callable[[list[str]], None],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


# VIA-Research/vTrain, data/ground_truth_multi.csv: GPT of 3.6 billion parameters on 8 nodes of 8
# A100 with 100 Gbit/s per device, global batch 512 of 2048 tokens, by tp, micro-batch and seconds.
# No constant was fitted on them.
SEVERAL_NODES = (
    (16, 32, 10.5806),
    (16, 16, 10.7193),
    (16, 8, 10.894),
    (16, 4, 11.9601),
    (16, 2, 13.4722),
    (8, 16, 5.0178),
    (4, 16, 4.4921),
    (2, 16, 3.9375),
    (1, 8, 3.5665),
)


@pytest.mark.parametrize(("tp", "micro_batch", "seconds"), SEVERAL_NODES)
def test_measured_steps_on_several_nodes(tp: int, micro_batch: int, seconds: float) -> None:
    row = {"gpu": "A100", "gpu_mem_gb": "80", "inter_gbit_per_gpu": "100", "precision": "fp16"}
    row |= {"layers": "30", "hidden": "3072", "heads": "32", "seq": "2048", "vocab": "51200"}
    row |= {"tp": str(tp), "pp": "1", "dp": str(64 // tp), "recompute": "full"}
    row |= {"mbs": str(micro_batch), "gbs": "512"}
    assert evaluation.predict(row).step_s == pytest.approx(seconds, rel=0.2)
