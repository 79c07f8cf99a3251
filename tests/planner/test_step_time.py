"""The planner's clock and curves of collectives follow formulae; bad devices are refused."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusedops.bench.tables import csv_text, load_rows
from fusedops.cli.bench.communication_rows import fit
from fusedops.launch.config_table import InputError
from fusedops.planner import StepShape, known_devices, load_device, step_time
from fusedops.planner.communication import (
    CommunicationCurve,
    CommunicationModel,
    fit_curve,
    mean_error,
)
from fusedops.planner.device import FOLDER
from fusedops.planner.step_time import PARTS, model_flops, utilization
from fusedops.terminal.files import UserError

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
    for offload in ("optimizer", "activations"):
        other = shape(microbatches=4, offload=(offload,), saved_bytes=1e9)
        assert step_time(other, device).seconds >= one.seconds


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
    half = step_time(shape(cp=2), device).parts
    full = step_time(shape(cp=2, dtype="float32"), slow).parts
    assert full["context"] == pytest.approx(2 * half["context"])
    assert full["elementwise"] == pytest.approx(2 * half["elementwise"])
    # The passes over the logits take twice as long, and products eight times.
    assert 6 < full["head"] / half["head"] < 8.1
    # Gradients are summed in float32 with either, unless in other bytes.
    data = [
        step_time(shape(dp=16, **options), device).parts["data"]
        for options in ({}, {"dtype": "float32"}, {"reduce_bytes": 2})
    ]
    assert data[0] == data[1] == pytest.approx(2 * data[2])


def test_halves_of_a_micro_batch_hide_each_others_collectives() -> None:
    device = load_device("a100-80")
    share = device.efficiency.overlap_microbatches
    for sizes in ({"tp": 8}, {"experts": 64, "top_k": 8, "ep": 8, "dp": 8, "inner": 1024}):
        halves: dict[str, Any] = {**sizes, "overlap_microbatches": True}
        plain = step_time(shape(**sizes, micro_batch=2), device)
        halved = step_time(shape(**halves, micro_batch=2), device)
        sent, left = (time.parts["tensor"] + time.parts["experts"] for time in (plain, halved))
        # Two halves have twice the latencies of one.
        assert (1 - share) * sent <= left < 1.2 * (1 - share) * sent
        assert halved.parts["products"] > plain.parts["products"]
        # A sequence is not halved.
        assert step_time(shape(**halves), device) == step_time(shape(**sizes), device)


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


def test_all_network_cards_of_a_node_carry_a_group_that_spans_nodes() -> None:
    """An all-reduce of 16 ranks on two nodes leaves each node by the cards of its 8 devices."""
    device = load_device("a100-80")
    links = replace(device.links, network=1.25e10)
    plain = replace(device.efficiency, collective_seconds=1e-12)
    slow = replace(device, links=links, efficiency=plain)
    one = shape(tp=16, kv_heads=32)
    sums = 2 * 2 * 32  # two of each layer, forward and backward
    moved = 2 * 15 / 16 * 4096 * 4096 * 2
    rate = 8 * 1.25e10 * plain.ring
    assert step_time(one, slow).parts["tensor"] == pytest.approx(sums * moved / rate)
    # Links inside of the node bound it where the network is faster.
    fast = replace(slow, links=replace(links, network=1e12))
    inside = links.node * plain.node
    assert step_time(one, fast).parts["tensor"] == pytest.approx(sums * moved / inside)


BYTES = [2.0**power for power in range(10, 30)]
CURVES = {
    "one regime": CommunicationCurve(2e-5, (1e-10,)),
    "two": CommunicationCurve(1e-5, (1e-9, 1e-10), (3e5,)),
    "three": CommunicationCurve(1.5e-5, (1e-12, 8e-10, 5e-11), (4e4, 5e6)),
    "no latency": CommunicationCurve(0.0, (1e-10,)),
}


def fitted(curve: CommunicationCurve, sizes: list[float]) -> CommunicationCurve:
    return fit_curve(sizes, [curve.seconds(size) for size in sizes])


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_every_other_size_predicts_the_rest(curve: CommunicationCurve) -> None:
    model = fitted(curve, BYTES[::2])
    worst = max(abs(math.log(model.seconds(x) / curve.seconds(x))) for x in BYTES[1:-1:2])
    assert worst < 0.03


def test_a_curve_is_continuous_and_never_falls() -> None:
    curve = CURVES["three"]
    assert curve.seconds(0) == curve.latency
    for knee in curve.knees:
        assert curve.seconds(knee * (1 + 1e-9)) == pytest.approx(curve.seconds(knee), rel=1e-6)
    assert curve.bandwidth == pytest.approx(2e10)
    assert curve.seconds(2e9) - curve.seconds(1e9) == pytest.approx(1e9 * 5e-11)


def test_one_disturbed_measurement_moves_nothing() -> None:
    curve = CURVES["two"]
    times = [curve.seconds(size) for size in BYTES]
    times[1] *= 4
    assert abs(math.log(fit_curve(BYTES, times).seconds(BYTES[2]) / times[2])) < 0.02


def test_noise_of_some_percent_stays_noise() -> None:
    noise = random.Random(3)
    for name, curve in CURVES.items():
        times = [curve.seconds(size) * math.exp(noise.gauss(0, 0.03)) for size in BYTES]
        error = mean_error(fit_curve(BYTES, times), BYTES, [curve.seconds(x) for x in BYTES])
        assert error < 0.03, name


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_sizes_are_enough(count: int) -> None:
    curve = fitted(CURVES["one regime"], BYTES[-count:])
    wanted = CURVES["one regime"].seconds(BYTES[-1])
    assert curve.seconds(BYTES[-1]) == pytest.approx(wanted, rel=1e-3)


def test_falling_times_become_a_constant() -> None:
    curve = fit_curve([1e3, 2e3, 4e3], [3e-5, 2e-5, 1e-5])
    assert all(slope >= 0 for slope in curve.slopes) and curve.seconds(1e3) > 0


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([], []), ([1.0], []), ([0.0], [1.0]), ([1.0], [math.nan])]
)
def test_impossible_measurements_are_refused(sizes: list[float], seconds: list[float]) -> None:
    with pytest.raises(InputError):
        fit_curve(sizes, seconds)


@pytest.mark.parametrize(
    "arguments", [(-1.0, (1.0,)), (0.0, (1.0, 2.0)), (0.0, (1.0, 2.0, 3.0), (2.0, 1.0))]
)
def test_impossible_curves_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="must be"):
        CommunicationCurve(*arguments)


def test_a_model_is_read_from_the_json_of_the_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    curve = {"collective": "all_reduce", "backend": "gloo", "ranks": 2, "latency": 1e-5}
    path.write_text(json.dumps({"curves": [curve | {"slopes": [1e-9], "knees": []}]}))
    model = CommunicationModel.load(path)
    assert model.curves["all_reduce", "gloo", "2"].seconds(1e4) == pytest.approx(2e-5)
    for text in ("{", "[]", '{"curves": [{}]}'):
        path.write_text(text)
        with pytest.raises(InputError, match="links.json"):
            CommunicationModel.load(path)


def test_the_command_predicts_the_rows_of_another_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = CURVES["two"]
    rows = [
        {"gpu": gpu, "op": "sum", "bytes": size, "time_us": factor * 1e6 * curve.seconds(size)}
        for gpu, factor in (("A", 1), ("B", 3))
        for size in BYTES
    ]
    odd, even, out = (tmp_path / name for name in ("odd.csv", "even.csv", "out.csv"))
    odd.write_text(csv_text(rows[1::2], rows[0]))
    even.write_text(csv_text(rows[::2], rows[0]))
    fit(odd, even, out)
    predicted = load_rows(out)
    assert [row["bytes"] for row in predicted] == [str(row["bytes"]) for row in rows[::2]]
    for row in predicted:
        assert float(row["predicted_us"]) == pytest.approx(float(row["time_us"]), rel=0.03)
    assert "20 measured rows: median error" in capsys.readouterr().out

    even.write_text("gpu,op,bytes\nC,sum,4\n")
    fit(odd, even, out)
    assert "no row that was fitted has these gpu, op" in out.read_text()


def test_the_command_refuses_a_row_without_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("op,bytes,time_us\nall_reduce,4,soon\n")
    with pytest.raises(UserError, match="time_us = 'soon'"):
        fit(path, None, None)
