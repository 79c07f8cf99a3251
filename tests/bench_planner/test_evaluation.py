"""Predictions of the rows of published tables, their memory, and bisection."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from pathlib import Path

import evaluate
import evaluation
import fit
import pytest
from recursive_search import recursive_layout
from row_memory import row_memory

from fusedops.bench.tables import csv_text, kendall_tau, load_rows
from fusedops.planner import check, fastest, load_device, preset, step_shape, step_time

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


H100 = load_device("h100")


@pytest.mark.parametrize(
    ("name", "devices", "batch", "slower"),
    [
        ("llama3-8b", 8, 64, 1.05),
        ("gpt3", 512, 1024, 1.15),
        ("mixtral-8x7b", 64, 512, 1.15),
        pytest.param("llama3-405b", 16384, 2048, 1.1, marks=pytest.mark.ci),
    ],
)
def test_recursive_bisection_finds_good_layouts_without_a_device(
    name: str, devices: int, batch: int, slower: float
) -> None:
    model, memory = preset(name), H100.memory.usable
    row = recursive_layout(model, devices, batch, memory)
    assert row is not None and row.left(memory) >= 0
    check(model, row.layout, devices)
    config = row.layout.parallel
    assert config.dp * row.layout.training.micro_batch * config.microbatches == batch
    best = fastest(model, devices, H100, batch, keep=1).rows[0]
    seconds = step_time(step_shape(model, row.layout), H100).seconds
    assert best.seconds <= seconds <= slower * best.seconds


def cells(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


GPT_22B = cells(
    "arch=dense layers=48 hidden=6144 heads=64 vocab=51200 seq=2048 gpu=A100 gpu_mem_gb=80 "
    "precision=fp16 recompute=full tp=8 pp=1 dp=1 mbs=4 gbs=4"
)
INTERN_7B = cells(
    "arch=dense-glu layers=32 hidden=4096 heads=32 vocab=103168 ffn=11008 seq=2048 gpu=A800 "
    "gpu_mem_gb=80 precision=bf16 recompute=full mbs=1 tp=1 pp=1 dp=1"
)
GPT_182B = cells(
    "arch=dense layers=78 hidden=13824 heads=96 vocab=250880 seq=2048 gpu=A100 gpu_mem_gb=80 "
    "precision=fp16 recompute=full gbs=2048 shard=zero1"
)


@pytest.mark.parametrize(
    ("row", "gib"),
    [
        (INTERN_7B | {"shard": "fsdp", "dp": "3", "gbs": "12"}, 72),
        (INTERN_7B | {"shard": "fsdp", "dp": "6", "gbs": "24"}, 39),
        (INTERN_7B | {"shard": "fsdp", "tp": "4", "gbs": "4"}, 52),
        (INTERN_7B | {"shard": "zero1", "tp": "4", "gbs": "4"}, 61),
        (INTERN_7B | {"shard": "zero1", "pp": "5", "gbs": "4"}, 62),
        (GPT_182B | {"tp": "8", "pp": "6", "dp": "8", "mbs": "4"}, 59),
        (GPT_182B | {"tp": "4", "pp": "12", "dp": "8", "mbs": "2"}, 48),
        (GPT_182B | {"tp": "4", "pp": "6", "dp": "16", "mbs": "4"}, 75),
    ],
)
def test_published_peaks(row: dict[str, str], gib: float) -> None:
    prediction = evaluation.predict(row)
    assert prediction.mem_gib == pytest.approx(gib, rel=0.09) and prediction.fits


def bytes_of(row: dict[str, str]) -> int:
    return row_memory(row, evaluation.shape_of(row)).needed


def test_an_unsharded_fp16_optimizer_needs_20_bytes_per_parameter() -> None:
    # Megatron's documentation: weights and gradients 2 + 2, master weights and moments 12, float32
    # gradients while it steps 4.
    few_tokens = GPT_22B | {"seq": "128", "mbs": "1", "gbs": "1"}
    parameters = 22.1e9 / 8
    assert bytes_of(few_tokens) == pytest.approx(20 * parameters, rel=0.02)
    assert bytes_of(few_tokens | {"precision": "bf16"}) == pytest.approx(18 * parameters, rel=0.03)


def test_a_full_device_does_without_the_allocators_cache() -> None:
    row = INTERN_7B | {"shard": "zero1", "pp": "3", "gbs": "4"}
    assert bytes_of(row) > 80 << 30
    prediction = evaluation.predict(row)  # 75 were measured
    assert prediction.fits and prediction.mem_gib == 80
    smaller = evaluation.predict(row | {"gpu_mem_gb": "72"})
    assert not smaller.fits and smaller.mem_gib is not None and smaller.mem_gib > 72


def test_other_precisions_and_devices_have_no_such_optimizer() -> None:
    plain = INTERN_7B | {"shard": "fsdp", "dp": "4", "gbs": "16"}
    for change in ({"precision": "amp_bf16"}, {"precision": "bf16-pure"}, {"gpu": "H100"}):
        assert bytes_of(plain | change) < 0.75 * bytes_of(plain)


def test_zero3_gathers_one_product_and_fsdp_a_layer() -> None:
    row = GPT_182B | {"tp": "1", "pp": "1", "dp": "512", "mbs": "1", "precision": "amp"}
    layer, product = 12 * 13824**2, 4 * 13824**2
    gathered = bytes_of(row | {"shard": "fsdp"}) - bytes_of(row | {"shard": "zero3"})
    assert gathered == pytest.approx((layer - product) * (2 * 2 + 4), rel=0.01)


def test_a_reserve_is_the_median_of_what_the_peaks_show() -> None:
    device = load_device("a100-80")
    rows = []
    for tokens, more in (("1024", 2.0), ("2048", 3.5), ("512", 9.0)):
        row = GPT_22B | {"seq": tokens}
        rows.append(row | {"mem_gib": str(bytes_of(row) / 2**30 + more)})
    assert evaluation.measured_reserve(rows, device) == pytest.approx(3.5 * 2**30, rel=1e-6)
    assert evaluation.measured_reserve([GPT_22B], device) is None
    assert device.memory.usable < device.memory.bytes - device.memory.reserved


def test_an_evaluation_counts_errors_of_memory_and_what_ran_out() -> None:
    row = GPT_182B | {"tp": "8", "pp": "6", "dp": "8", "mbs": "4", "source": "here"}
    predicted = evaluation.predict(row).mem_gib
    assert predicted is not None
    rows = [
        row | {"mem_gib": str(predicted / 1.1)},
        row | {"mem_gib": str(predicted / 0.9)},
        row | {"tp": "2", "pp": "24", "oom": "1"},
        row | {"tp": "1", "pp": "8", "dp": "48", "oom": "1", "gbs": "1536"},
    ]
    result = evaluation.evaluate(rows)
    error, count = result.memory_errors["here"]
    assert error == pytest.approx(10.0) and count == 2 and not result.errors
    assert result.fitting == (2, 2) and result.unfitting[1] == 2
