"""The planner's clock: its parts follow their formulae, and bad devices and rows are refused."""

from __future__ import annotations

import csv
import itertools
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fusedops.cli.main import app
from fusedops.launch.config_table import InputError
from fusedops.planner import StepShape, evaluation, known_devices, load_device, step_time
from fusedops.planner.calibration import calibrate, measured_layers
from fusedops.planner.device import FOLDER
from fusedops.planner.step_time import PARTS, model_flops, utilization

SIZES: dict[str, Any] = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "inner": 14336,
    "gated": True,
    "vocab": 32000,
    "seq_len": 4096,
}
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


def shape(**options: Any) -> StepShape:
    return StepShape(**{**SIZES, **options})


@pytest.mark.parametrize("name", known_devices())
def test_a_known_device_is_complete(name: str) -> None:
    device = load_device(name)
    assert device.peak_of("float8") >= device.peak["bfloat16"] > device.peak["float32"]
    assert device.links.node > device.links.network
    assert {"peak", "memory", "node", "network", "host"} <= device.sources.keys()
    taken = step_time(shape(tp=2, dp=4, microbatches=8), device)
    assert taken.parts.keys() == set(PARTS)
    assert 0.05 < utilization(shape(tp=2, dp=4, microbatches=8), device, taken.seconds) < 1


def test_a_dense_step_has_the_operations_of_its_products() -> None:
    """6 operations per weight and token; the unmasked half of the scores is in the formula."""
    one = shape(microbatches=2, micro_batch=3)
    attention = 4096**2 * (2 + 2 * 8 / 32)
    weights = 32 * (attention + 3 * 4096 * 14336) + 32000 * 4096
    scores = 32 * 4096 * 4096
    assert model_flops(one) == 6 * 2 * 3 * 4096 * (weights + scores)


def test_time_is_the_sum_of_its_parts_and_grows_with_the_work() -> None:
    device = load_device("h100")
    one = step_time(shape(microbatches=4), device)
    assert one.seconds == pytest.approx(sum(one.parts.values())) and one.hidden == 0
    two = step_time(shape(microbatches=8), device)
    for name in ("products", "attention", "elementwise", "head"):
        assert two.parts[name] == pytest.approx(2 * one.parts[name])
    assert step_time(shape(microbatches=4, recompute="full"), device).seconds > one.seconds
    parts = step_time(shape(microbatches=4, recompute="selective"), device).parts
    assert 0 < parts["recomputation"] < one.parts["attention"]


def test_each_mode_has_its_communication_alone() -> None:
    device = load_device("h100")
    modes = {"tensor": {"tp": 8}, "context": {"cp": 2}, "pipeline": {"pp": 4}, "data": {"dp": 16}}
    for part, sizes in modes.items():
        found = step_time(shape(**sizes, microbatches=8), device).parts
        others = {"tensor", "experts", "pipeline"} - {part}
        assert found[part] > 0 and not any(found[name] for name in others)
    experts = step_time(shape(experts=8, top_k=2, dp=8, ep=8, microbatches=2), device).parts
    assert experts["experts"] > 0 and experts["tensor"] == 0


def test_float32_moves_twice_the_bytes_and_computes_by_its_own_peak() -> None:
    device = load_device("h100")
    slow = replace(device, peak={**device.peak, "float32": device.peak["bfloat16"] / 8})
    for part, sizes in (("tensor", {"tp": 8}), ("context", {"cp": 2})):
        half = step_time(shape(**sizes), device).parts
        full = step_time(shape(**sizes, dtype="float32"), slow).parts
        latency = 0.0
        if part == "tensor":  # of two sums, forward and backward, in each layer
            latency = 4 * 32 * 8**0.5 * device.efficiency.collective_seconds
        assert full[part] - latency == pytest.approx(2 * (half[part] - latency)), part
        assert full["elementwise"] == pytest.approx(2 * half["elementwise"])
        # The passes over the logits take twice as long, and products eight times.
        assert 6 < full["head"] / half["head"] < 8.1
    # Gradients are summed in float32 with either, and only gathered weights have the dtype.
    hidden = replace(device.efficiency, zero_gather=1 - device.efficiency.overlap)
    device = replace(device, efficiency=hidden)
    data = [
        step_time(shape(dp=16, zero=zero, dtype=dtype), device).parts["data"]
        for zero in (0, 1)
        for dtype in ("bfloat16", "float32")
    ]
    assert data[0] == data[1] == data[3] == pytest.approx(data[2] * 8 / 6)


def test_halves_of_a_micro_batch_hide_each_others_collectives() -> None:
    device = load_device("a100-80")
    for sizes in ({"tp": 8}, {"experts": 64, "top_k": 8, "ep": 8, "dp": 8, "inner": 1024}):
        plain = step_time(shape(**sizes, micro_batch=2), device)
        halved = step_time(shape(**sizes, micro_batch=2, overlap_microbatches=True), device)
        sent = plain.parts["tensor"] + plain.parts["experts"]
        left = halved.parts["tensor"] + halved.parts["experts"]
        share = device.efficiency.overlap_microbatches
        # Two halves have twice the latencies of one.
        assert (1 - share) * sent <= left < 1.2 * (1 - share) * sent
        assert halved.hidden - plain.hidden == pytest.approx(share / (1 - share) * left)
        assert halved.parts["products"] > plain.parts["products"]
        one = step_time(shape(**sizes, overlap_microbatches=True), device)
        assert one == step_time(shape(**sizes), device)  # a sequence is not halved


def test_casts_to_float8_read_inputs_and_gradients_of_outputs() -> None:
    device = replace(load_device("h100"), layers=())
    row = {**ROW, "gpu": "H100", "precision": "float8-tensorwise", "shard": "fsdp2"}
    assert evaluation.shape_of(row).cast_bytes > 0
    assert evaluation.shape_of(row | {"precision": "FP8"}).cast_bytes == 0
    plain, cast = (
        step_time(shape(dtype="float8", cast_bytes=size, recompute=recompute), device).parts
        for size, recompute in ((0.0, "full"), (8.0, "full"))
    )
    inputs = 4096 * (4096 + 4096 + 4096 + 14336)  # of qkv, output, gate and up, down
    outputs = 4096 * (6144 + 4096 + 2 * 14336 + 4096)
    rate = device.memory.bandwidth * device.efficiency.elementwise / (8 * 32)
    assert cast["elementwise"] - plain["elementwise"] == pytest.approx((inputs + outputs) / rate)
    assert cast["recomputation"] - plain["recomputation"] == pytest.approx(inputs / rate)


def test_waits_and_slower_collectives_of_a_device_are_added() -> None:
    device = load_device("a100-80")
    other = replace(device.efficiency, sequence=1.5, stage_wait=0.1, zero_gather=1.0)
    slow = replace(device, efficiency=other)
    for part, sizes in (
        ("tensor", {"tp": 2, "sp": True}),
        ("bubble", {"pp": 2, "microbatches": 8}),
        ("data", {"dp": 8, "zero": 1}),
    ):
        before, after = (step_time(shape(**sizes), where).parts for where in (device, slow))
        assert after[part] > before[part]
        assert {name for name in before if before[name] != after[name]} == {part}
    assert step_time(shape(tp=2), slow).parts == step_time(shape(tp=2), device).parts


def test_a_ring_leaves_a_node_by_the_links_of_all_its_ranks_there() -> None:
    device = load_device("h100")
    fast = replace(device, links=replace(device.links, node=1e15))
    of_one, of_two, of_eight = (
        step_time(shape(tp=tp, dp=64 // tp), fast).parts["data"] * tp for tp in (8, 4, 1)
    )
    # The same parameters in all; (n - 1) / n of them travel.
    assert of_one / (7 / 8) == pytest.approx(2 * of_two / (15 / 16), rel=0.1)
    assert of_one / (7 / 8) == pytest.approx(8 * of_eight / (63 / 64), rel=0.1)
    slow = replace(device, links=replace(device.links, node=1e9))
    inside, outside = (step_time(shape(dp=dp), slow).parts["data"] for dp in (8, 64))
    assert outside / inside == pytest.approx(63 / 64 * 8 / 7)  # the links in the node are slower


def test_a_measured_layer_is_exact_at_its_sizes_and_says_nothing_of_others() -> None:
    device = replace(load_device("a100-80"), layers=())
    usual = device.efficiency
    slow = shape(micro_batch=2, flash=False, recompute="full", microbatches=4)
    steps = [
        (replace(slow, layers=layers), device, 1.2 * step_time(slow, device).seconds * layers / 32)
        for layers in (16, 32)
    ]
    layers = measured_layers(steps, usual)
    assert [(layer.tokens, layer.hidden, layer.steps) for layer in layers] == [(8192, 4096, 2)]
    known = replace(device, layers=tuple(layers))
    # Two steps against half a step that says 1.
    factor = layers[0].factor ** (2 / 2.5)
    assert known.layer_factor(slow.kind, slow.place) == pytest.approx(factor)
    assert 1.1 < step_time(slow, known).seconds / step_time(slow, device).seconds < 1.2
    for other in (replace(slow, micro_batch=4), replace(slow, flash=True), replace(slow, tp=2)):
        assert step_time(other, known).seconds == pytest.approx(
            step_time(other, device).seconds, rel=1e-6
        )
    near = replace(slow, hidden=4352, heads=34, inner=15232)
    assert 1.0 < known.layer_factor(near.kind, near.place) < factor


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


def test_a_bubble_is_p_minus_1_stages_of_one_micro_batch() -> None:
    device = load_device("a100-80")
    plain = step_time(shape(pp=4, microbatches=8), device).parts
    stages = sum(plain[name] for name in ("products", "attention", "elementwise", "layers", "host"))
    assert plain["bubble"] == pytest.approx(3 * stages / 8)
    halved = step_time(shape(pp=4, microbatches=8, virtual=2), device).parts
    assert halved["bubble"] == pytest.approx(plain["bubble"] / 2)


def test_small_layers_are_bound_by_the_host() -> None:
    device = load_device("a100-80")
    small = shape(hidden=512, heads=8, kv_heads=8, inner=2048, seq_len=256, layers=4)
    parts = step_time(small, device).parts
    assert parts["host"] > parts["products"]
    assert step_time(shape(), device).parts["host"] == 0


def test_efficiencies_that_made_the_times_are_found_again() -> None:
    device = load_device("a100-80")
    true = replace(device.efficiency, products=0.6, node=0.5, attention=0.25)
    shapes = [
        shape(tp=tp, micro_batch=mbs, seq_len=length)
        for tp, mbs, length in itertools.product((1, 2, 8), (1, 4), (1024, 8192))
    ]
    steps = [
        (one, device, step_time(one, replace(device, efficiency=true)).seconds) for one in shapes
    ]
    fitted = calibrate(steps, device.efficiency, names=("products", "node", "attention"))
    for name in ("products", "node", "attention"):
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=0.01)
    assert fitted.host_seconds == device.efficiency.host_seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("bandwidth = 2.039e+12", "bandwidth = 0"), "memory.bandwidth must be positive"),
        (("bandwidth = 2.039e+12", ""), "memory.bandwidth is missing"),
        (("e+12  # bytes/s", "e+12\nreserved = 85899345920"), "memory.reserved must be below"),
        (("[memory]", "threads = -1\n[memory]"), "threads must be"),
        (("node = 3e+11", 'node = "fast"'), "links.node must be"),
        (("bfloat16 = 3.12e+14", ""), "bfloat16 among the dtypes"),
        (("bfloat16 = 3.12e+14", "bfloat15 = 3.12e+14"), "did you mean"),
        (("[links]", "[link]"), "unknown key 'link'"),
        (("[sources]", "[efficiency]\nproducts = 2.0\n[sources]"), "products must be at most 1"),
        (("[sources]", "[efficiency]\nspeed = 2.0\n[sources]"), "unknown key 'speed'"),
        (("name", "= name"), "is not valid TOML"),
    ],
)
def test_a_bad_device_file_is_one_sentence(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((FOLDER / "a100-80.toml").read_text().replace(*change, 1))
    with pytest.raises(InputError) as caught:
        load_device(path)
    assert message in str(caught.value) and "mine.toml" in str(caught.value)


def test_an_unknown_device_has_a_nearest_one() -> None:
    with pytest.raises(InputError, match="did you mean h100"):
        load_device("h1000")


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


def test_a_row_is_the_shape_that_it_describes() -> None:
    found = evaluation.shape_of({**ROW, "vp": "2", "shard": "fsdp2", "precision": "FP8"})
    assert (found.inner, found.microbatches, found.recompute) == (8192, 4, "full")
    assert (found.zero, found.dtype, found.virtual, found.flash) == (3, "float8", 2, False)
    assert evaluation.shape_of({**ROW, "gpu": "H100"}).flash
    slow = {**ROW, "inter_gbit_per_gpu": "50", "gpus_per_node": "4"}
    assert evaluation.device_of(slow).links.network == 50e9 / 8
    assert evaluation.device_of({**ROW, "gpu_mem_gb": "40"}).name.endswith("40 GB")
    named = {"H100": "80 GB", "H100-96GB-HBM2e-500W": "96 GB HBM2e, 500 W"}
    for gpu, end in named.items():
        row = {**ROW, "gpu": gpu, "gpu_mem_gb": "96" if "96" in gpu else "80"}
        assert evaluation.device_of(row).name.endswith(end)


def test_fsdp2_gathers_a_pipeline_stage_once_in_a_step() -> None:
    row = {**ROW, "shard": "fsdp2", "tp": "1", "gpus": "8", "dp": "8"}
    assert evaluation.shape_of(row).zero == 3
    assert evaluation.shape_of(row | {"pp": "2", "dp": "4"}).zero == 1
    assert evaluation.shape_of(row | {"pp": "2", "dp": "4", "shard": "fsdp"}).zero == 3


def test_what_does_not_fit_is_said_not_to_fit() -> None:
    small = evaluation.predict(ROW)
    assert small.fits and small.mem_gib is not None and 5 < small.mem_gib < 40
    large = {**ROW, "layers": "96", "hidden": "12288", "heads": "96"}
    assert evaluation.predict(large).fits is False


def test_ranks_of_equal_orders_are_1() -> None:
    pairs = [(1.0, 2.0), (2.0, 3.0), (3.0, 5.0)]
    assert evaluation.kendall_tau(pairs) == 1.0
    assert evaluation.kendall_tau([(-a, b) for a, b in pairs]) == -1.0
    assert evaluation.kendall_tau([(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) == pytest.approx(
        0.8165, 1e-4
    )


def test_the_command_adds_columns_and_prints_errors(tmp_path: Path) -> None:
    rows = [
        {**ROW, "mbs": mbs, "step_s": step}
        for mbs, step in (("1", "1.2"), ("2", ".9"), ("4", ".8"))
    ]
    rows += [{**ROW, "gbs": "60", "step_s": "1"}, {**ROW, "step_s": "soon"}]
    steps, out = tmp_path / "steps.csv", tmp_path / "predictions.csv"
    write(steps, rows)
    done = CliRunner().invoke(app, ["plan", "--evaluate", str(steps), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "Mean absolute errors" in done.output and "1 groups" in done.output
    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [bool(row["predicted_step_s"]) for row in written] == [True, True, True, False, True]
    assert written[3]["why"] == "dp x mbs = 16 does not divide gbs = 60"
    assert written[0]["predicted_fits"] == "1" and written[0]["source"] == "here"


def test_the_command_writes_a_device_that_can_be_used(tmp_path: Path) -> None:
    device = load_device("a100-80")
    slower = replace(device, efficiency=replace(device.efficiency, products=0.5))
    rows = []
    for mbs, tp in itertools.product((1, 2, 4, 8), (1, 2)):
        row = {**ROW, "mbs": str(mbs), "tp": str(tp), "dp": str(8 // tp), "hidden": "8192"}
        seconds = step_time(evaluation.shape_of(row), slower).seconds
        rows.append({**row, "gpu": "", "step_s": f"{seconds:.6f}"})
    steps, out = tmp_path / "steps.csv", tmp_path / "mine.toml"
    write(steps, rows)
    words = ["plan", "--calibrate", str(steps), "--device", "a100-80", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    mine = load_device(out)
    assert asdict(mine.links) == asdict(device.links) and "8 steps" in mine.sources["efficiency"]
    assert {layer.steps for layer in mine.layers} == {1} and len(mine.layers) == 8
    errors = evaluation.evaluate(rows, mine).errors
    assert errors["here"][0] < 2 < evaluation.evaluate(rows, device).errors["here"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--evaluate", "missing.csv"], "cannot read missing.csv"),
        (["--calibrate", "missing.csv"], "--calibrate needs --device"),
        (["--calibrate", "missing.csv", "--device", "h10", "--out", "x.toml"], "did you mean h100"),
    ],
)
def test_a_wrong_call_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == 2 and message in done.output


def write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_heads_that_tensor_cores_do_not_take_are_slow() -> None:
    times = {
        size: step_time(shape(hidden=16 * size, heads=16, flash=False), load_device("a100-80"))
        for size in (104, 108, 112)
    }
    attention = {size: time.parts["attention"] for size, time in times.items()}
    assert attention[104] == pytest.approx(attention[112]) and attention[108] > 2 * attention[112]


def test_routed_rows_are_those_of_a_rank_and_travel_once_to_a_node() -> None:
    sizes: dict[str, Any] = {"experts": 64, "top_k": 8, "ep": 32, "dp": 32, "inner": 1024}
    device = load_device("h100")
    plain = step_time(shape(**sizes), device).parts
    shared = step_time(shape(**sizes, tp=2, sp=True), device).parts
    replicated = step_time(shape(**sizes, tp=2), device).parts
    # On twice as many nodes a token reaches more of them, with half of the tokens.
    assert shared["experts"] == pytest.approx(replicated["experts"] / 2)
    one = step_time(shape(**sizes | {"ep": 8}), device).parts
    assert one["experts"] < plain["experts"] / 2  # inside a node
    fewer = step_time(shape(**sizes | {"top_k": 1}), device).parts
    assert plain["experts"] < 5 * fewer["experts"]  # 4 nodes
    assert plain["layers"] > step_time(shape(), device).parts["layers"]
