"""``fusedops bench`` and ``bench compare``, over a spec and rows whose figures are known."""

from __future__ import annotations

import csv
import io
import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from bench_records import fixed_timing, invoke, record, row

import fusedops
from fusedops._core import backends
from fusedops.bench import cases, contenders
from fusedops.bench.cases import tiny_sample, ulps
from fusedops.bench.compare import compare, parse_share
from fusedops.bench.limits import Limit, Limits
from fusedops.bench.results import BenchRecord, load_json, save_csv, save_json, save_parts, to_csv
from fusedops.runtime.architecture import cpu_slug
from fusedops.runtime.peak import peak_bytes
from fusedops.specs import BenchCase, Sample, Spec, all_specs
from fusedops.specs.make import TensorFactory
from fusedops.terminal.files import UserError

ROWS, COLUMNS = 64, 128
CPU = torch.device("cpu")
FLOAT32 = ("--dtype", "float32")
PEERS: dict[str, Callable[[], dict[str, Any]]] = {}  # of the private specs


def eager(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x)


def twice_as_much_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x + 0.0)


def _make(new: TensorFactory) -> Sample:
    x = torch.linspace(0.5, 1.0, ROWS * COLUMNS, device=new.device).reshape(ROWS, COLUMNS)
    return Sample("bench", (x.to(new.dtype).requires_grad_(),))


def _spec(
    name: str,
    make: Callable[..., Sample] = _make,
    labels: tuple[str, ...] = ("64x128",),
    *,
    op: Callable[..., Any] = eager,
    eager: Callable[..., Any] = eager,
    peer: Callable[..., Any] = twice_as_much_memory,
) -> Spec:
    PEERS[name] = lambda: {"peer": peer}
    return Spec(
        name=name,
        op=op,
        eager=eager,
        samples=lambda device, dtype: [
            Sample("tiny", (torch.ones(4, device=device, dtype=dtype).requires_grad_(),))
        ],
        bad_inputs=lambda device: [],
        bench_cases=tuple(
            BenchCase.moving(label, make, (2 * ROWS * COLUMNS, 3 * ROWS * COLUMNS)).headlined()
            for label in labels
        ),
        summary="",
        autocast="keep",
    )


def bench(*args: str, compiled: bool = False) -> Any:
    options = ["--allocator", "system", "--threads", "1", "--seconds", "0.02"]
    return invoke("bench", *args, *options, *([] if compiled else ["--no-compile"]))


@pytest.fixture(autouse=True)
def two_specs(specs: dict[str, Spec], known_limits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two private specs, and limits that need no measuring."""
    PEERS.clear()
    monkeypatch.setattr(contenders, "load_peers", lambda: SimpleNamespace(PEERS=PEERS))
    specs.clear()
    specs.update({name: _spec(name) for name in ("exponential", "other")})


@pytest.fixture
def measured(specs: dict[str, Spec], tmp_path: Path) -> Callable[..., BenchRecord]:
    """``measured(*words, **specs)`` is the record of a command, over other specs if given."""

    def run(*words: str, compiled: bool = False, **others: Spec) -> BenchRecord:
        if others:
            specs.clear()
            specs.update(others)
        done = bench(*words, "--json", str(tmp_path / "record.json"), compiled=compiled)
        assert done.exit_code == 0, done.output
        return load_json(tmp_path / "record.json")

    return run


@pytest.mark.parametrize(("seconds", "code"), [(1.1, 1), (1.0, 0)])
def test_an_op_that_is_slower_than_its_rival_fails(
    monkeypatch: pytest.MonkeyPatch, seconds: float, code: int
) -> None:
    measured = fixed_timing(eager=1.0, peer=1.0, fusedops=seconds)
    monkeypatch.setattr(cases, "measure", measured)
    words = "exponential", "--dtype", "float32"
    done = bench(*words, "--fail-if-slower")
    assert done.exit_code == code, done.output
    assert ("slower: exponential 64x128 float32 forward" in done.output) == bool(code)
    assert bench(*words).exit_code == 0  # nothing is judged


def test_every_op_has_a_row_in_the_default_run() -> None:
    specs = all_specs().items()
    headlines = {name: [case for case in spec.bench_cases if case.headline] for name, spec in specs}
    assert [name for name, cases in headlines.items() if not cases] == []


def test_files_hold_the_same_rows(tmp_path: Path) -> None:
    paths = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "svg")}
    options = [part for kind, path in paths.items() for part in (f"--{kind}", str(path))]
    done = bench("exponential", *FLOAT32, "--results", str(tmp_path), *options)
    assert done.exit_code == 0, done.output
    record = load_json(paths["json"])
    keys = {row.key for row in record.rows}
    assert keys == {
        ("exponential", "64x128", "float32", direction, who)
        for direction in ("forward", "backward", "both")
        for who in ("eager", "fusedops", "peer")
    }
    table = list(csv.DictReader(paths["csv"].open()))
    assert [tuple(line[k] for k in ("direction", "variant")) for line in table] == [
        (row.direction, row.variant) for row in record.rows
    ]
    picture = ElementTree.parse(paths["svg"]).getroot()
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "exponential both 64x128 float32" in texts
    saved = tmp_path / record.machine["slug"] / "exponential-float32.csv"
    assert saved.read_text() == paths["csv"].read_text()
    assert "exponential" in done.output and "allocator system" in done.output
    if (Path(fusedops.__file__).parents[1] / ".git").exists():
        assert len(record.git["commit"]) == 40
        assert table[0]["commit"].rstrip("+") == record.git["commit"][:12]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(paths["json"].read_text(), parse_constant=refuse)


def test_rows_say_what_was_measured(measured: Callable[..., BenchRecord]) -> None:
    record = measured("exponential", *FLOAT32)
    rows = {(row.variant, row.direction): row for row in record.rows}
    size = ROWS * COLUMNS * 4
    for direction, moved in (("forward", 2 * size), ("backward", 3 * size), ("both", 5 * size)):
        row = rows["eager", direction]
        assert row.speedup == 1.0 and row.allocator == "system"
        assert row.gb_per_s == pytest.approx(moved / row.median_us * 1e-3)
        assert row.limit_share == pytest.approx(row.gb_per_s)
        assert row.samples >= 1 and row.q1_us <= row.median_us <= row.q3_us
        assert row.host_us is not None and row.host_us > 0
        ours = rows["fusedops", direction]
        others = {who: rows[who, direction].median_us for who in ("eager", "peer")}
        assert ours.rival == min(others, key=lambda who: others[who])
        assert row.lead is None and ours.lead is not None and ours.lead_q1 is not None
        assert ours.lead_q1 <= ours.lead <= (ours.lead_q3 or 0.0)
    assert rows["eager", "forward"].peak_bytes == size
    assert rows["peer", "forward"].peak_bytes == 2 * size
    # exp in float32 is right to about one unit in the last place.
    assert rows["eager", "forward"].error_max_ulps is not None
    assert 0 < rows["eager", "forward"].error_max_ulps <= 2


def test_error_against_float64_is_in_ulps(measured: Callable[..., BenchRecord]) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) * (1 + 64 * torch.finfo(x.dtype).eps)

    record = measured(*FLOAT32, wrong=_spec("wrong", op=wrong))
    rows = {(row.variant, row.direction): row for row in record.rows}
    found = rows["fusedops", "forward"].error_max_ulps
    # exp of [0.5, 1] lies in [1.6, 2.7]: 64 relative eps are 82 to 128 units, and one of rounding.
    assert found is not None and 80 < found < 130


def _broken(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image\nsecond line")


def _without_gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x.detach()).requires_grad_()


# What changes in the spec, the rows that are left, and what is noted.
LACKING: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "a peer that fails": (
        {"peer": _broken},
        {"eager": 3, "fusedops": 3},
        "no peer row: RuntimeError: no kernel image",
    ),
    "a peer without gradient": (
        {"peer": _without_gradient},
        {"eager": 3, "fusedops": 3, "peer": 1},
        "peer has forward rows only: it gives no gradient to 1 of 1 inputs",
    ),
    "eager fails": ({"eager": _broken}, {}, "no rows: no kernel image"),
}


@pytest.mark.parametrize(("changes", "left", "note"), LACKING.values(), ids=LACKING)
def test_what_fails_costs_only_its_rows(
    measured: Callable[..., BenchRecord], changes: dict[str, Any], left: dict[str, int], note: str
) -> None:
    record = measured(*FLOAT32, odd=_spec("odd", **changes), whole=_spec("whole"))
    odd = [row.variant for row in record.rows if row.op == "odd"]
    assert {name: odd.count(name) for name in odd} == left
    assert len([row for row in record.rows if row.op == "whole"]) == 9
    assert record.notes == (f"odd 64x128 float32: {note}",)


def overwriting(x: torch.Tensor) -> torch.Tensor:
    """A peer that leaves zeros where its argument and its incoming gradient were."""

    def wiped(grad: torch.Tensor) -> torch.Tensor:
        kept = grad.clone()
        grad.zero_()
        return kept

    y = torch.exp(x)
    y.register_hook(wiped)
    x.detach().zero_()
    return y


overwriting.overwrites = True  # type: ignore[attr-defined]


def test_a_peer_that_overwrites_its_arguments_gets_copies(
    measured: Callable[..., BenchRecord],
) -> None:
    made = []

    def make(new: TensorFactory) -> Sample:
        made.append(_make(new))
        return made[-1]

    record = measured(*FLOAT32, a=_spec("a", make, peer=overwriting))
    rows = [row for row in record.rows if row.variant == "peer"]
    assert [row.direction for row in rows] == ["forward", "backward", "both"]
    assert all(row.error_max_ulps is not None and row.error_max_ulps < 2 for row in rows)
    wanted = _make(TensorFactory(CPU, torch.float32)).args[0]
    assert all(torch.equal(sample.args[0], wanted) for sample in made)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_keeps_the_table_and_the_other_files(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    done = bench("exponential", *FLOAT32, "--json", "/dev/full", "--csv", str(path))
    assert done.exit_code == 2
    assert "cannot write /dev/full: No space left on device" in done.stderr
    assert "of limit" in done.stdout and len(path.read_text().splitlines()) == 10


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured_before(
    specs: dict[str, Spec], tmp_path: Path, by: signal.Signals
) -> None:
    """Rows are written as they come."""
    path, before = tmp_path / "a.json", []

    def interrupted(new: TensorFactory) -> Sample:
        before.extend(load_json(path).rows)
        signal.raise_signal(by)
        raise AssertionError("still running")

    specs["other"] = _spec("other", interrupted)
    # A shell that starts tests in the background has them ignore Ctrl-C.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = bench(*FLOAT32, "--results", str(tmp_path), "--json", str(path))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert done.exit_code == 130, done.output
    (saved,) = tmp_path.glob("*/*.csv")
    assert saved.name == "exponential-float32.csv" and len(saved.read_text().splitlines()) == 10
    assert "interrupted at other 64x128 float32" in done.stdout
    assert len(before) == 9 and {row.op for row in before} == {"exponential"}


def test_variants_keep_eager_and_the_named(measured: Callable[..., BenchRecord]) -> None:
    rows = measured("--variants", "peer", "--dtype", "float32,float64").rows
    assert {row.variant for row in rows} == {"eager", "peer"}
    assert {row.op for row in rows} == {"exponential", "other"}
    assert {row.dtype for row in rows} == {"float32", "float64"}


def test_sizes_are_a_label_or_its_first_words(measured: Callable[..., BenchRecord]) -> None:
    labels = ("64x128", "64x128, dropout 0.1", "9x9")
    for sizes, found in (("64x128", labels[:1]), ("64x128,9x9", labels), (labels[1], labels[1:2])):
        record = measured(*FLOAT32, "--sizes", sizes, a=_spec("a", labels=labels))
        assert {row.case for row in record.rows} == set(found)


def test_real_op_runs_and_names_its_backend(measured: Callable[..., BenchRecord]) -> None:
    spec = all_specs()["layer_norm"]
    record = measured(*FLOAT32, "--sizes", "16x768", "--all-backends", layer_norm=spec)
    rows = {row.variant: row for row in record.rows if row.direction == "both"}
    assert rows["fusedops:torch"].backend == "torch"
    assert rows["fusedops"].backend in ("cpp", "torch")
    assert all(
        row.error_mean_ulps is not None and row.error_mean_ulps < 100 for row in rows.values()
    )


@pytest.mark.gpu
def test_gpu_rows_are_measured(
    measured: Callable[..., BenchRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # with the real limits
    record = measured("layer_norm", "--device", "cuda", "--dtype", "bfloat16")
    assert {row.direction for row in record.rows} == {"forward", "backward", "both"}
    ours = [row for row in record.rows if row.variant == "fusedops"]
    assert all(row.backend in ("cuda", "triton") and row.peak_bytes for row in ours)
    # A time without its synchronisation would beat the memory it has to move several times over.
    assert all(row.limit_share < 2 for row in record.rows)
    assert record.machine["gpu_state"] and record.versions["cuda"]


@pytest.mark.slow
def test_compile_row_is_measured(measured: Callable[..., BenchRecord]) -> None:
    record = measured("exponential", *FLOAT32, compiled=True)
    assert "compile" in {row.variant for row in record.rows}, record.notes


def test_outside_of_a_source_tree_there_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with the real peers
    assert "liger" in contenders.peers_of("layer_norm")
    monkeypatch.setattr(contenders, "_PEERS", Path("/no/bench/peers.py"))
    monkeypatch.setattr(contenders, "load_peers", contenders.load_peers.__wrapped__)
    assert contenders.peers_of("layer_norm") == {}
    names = ("eager", "compile", "fusedops", *(f"fusedops:{name}" for name in backends.BACKENDS))
    assert contenders.names(all_specs()["layer_norm"]) == list(names)


def test_an_op_without_a_spec_is_named() -> None:
    done = bench("gelu")
    assert done.exit_code == 2
    assert "op 'gelu' has no spec: write fusedops/specs/gelu.py" in done.stderr


def test_peak_counts_results_and_temporaries_but_nothing_from_before() -> None:
    mib = 1 << 20
    held = torch.zeros(4 * mib, dtype=torch.uint8)

    def run() -> torch.Tensor:
        temporary = torch.zeros(mib, dtype=torch.uint8)
        result = torch.zeros(2 * mib, dtype=torch.uint8)
        del temporary
        torch.zeros(mib // 2, dtype=torch.uint8)
        return result

    assert peak_bytes(run, CPU) == 3 * mib
    assert held.numel() == 4 * mib


def test_limit_of_a_row_is_the_slower_of_memory_and_products() -> None:
    limits = Limits(Limit(100.0, "copy_", {}), {"float32": Limit(10.0, "torch.mm", {})})
    assert limits.least_seconds(200, 0, "float32") == 2.0
    assert limits.least_seconds(200, 50, "float32") == 5.0
    assert limits.least_seconds(200, 50, "bfloat16") == 2.0


def test_every_op_has_a_tiny_sample_for_the_host_overhead() -> None:
    for spec in all_specs().values():
        assert tiny_sample(spec, CPU, torch.float32) is not None, spec.name


SLUGS: dict[str, dict[str, str]] = {
    "cpu-zen5": {"vendor_id": "AuthenticAMD", "cpu family": "26", "model": "2"},
    "cpu-zen4": {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "17"},
    "cpu-zen3": {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "1"},
    "cpu-sapphire-rapids": {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "143"},
    "cpu-odd-tm-9": {"vendor_id": "GenuineIntel", "model name": "Odd (TM) 9"},
}


@pytest.mark.parametrize("slug", SLUGS)
def test_cpu_has_a_slug(slug: str) -> None:
    assert cpu_slug(SLUGS[slug]) == slug


def test_an_element_that_is_no_number_is_the_largest_error() -> None:
    truth = torch.ones(2, dtype=torch.float64)
    largest, mean = ulps([torch.tensor([float("nan"), 1.0]), torch.ones(2)], [truth, truth])
    assert math.isnan(largest) and math.isnan(mean)


def run_compare(tmp_path: Path, before: BenchRecord, after: BenchRecord, *options: str) -> Any:
    save_json(tmp_path / "a.json", before)
    save_json(tmp_path / "b.json", after)
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    return invoke("bench", "compare", *paths, *options)


def test_json_round_trip(tmp_path: Path) -> None:
    before = record(row(), row("eager", host_us=3.25))
    save_json(tmp_path / "a.json", before)
    assert load_json(tmp_path / "a.json") == before


SLOWER = "slower: gelu 16x16 float32 forward fusedops: 100.0 -> 120.0 us (+20.0%"
NONE = "no row became slower"
MISSING = "only in the first record: gelu 9x9 float32 forward fusedops"
DOUBTFUL = "not judged, disturbed while measured: gelu"
EAGER = row("eager")
# Rows before and after, options, the exit code, and what is printed.
VERDICTS: dict[str, tuple[list[Any], list[Any], tuple[str, ...], int, str]] = {
    "slower": ([row(), EAGER], [row(median=120), EAGER], (), 1, SLOWER),
    "within the spread": ([row()], [row(median=120, spread=0.3)], (), 0, NONE),
    "allowed": ([row()], [row(median=120)], ("--fail-if-slower", "25%"), 0, NONE),
    "not allowed": ([row()], [row(median=120)], ("--fail-if-slower", "0.1"), 1, SLOWER),
    "faster": ([row()], [row(median=50)], (), 0, "faster: gelu"),
    "eager alone": ([row(), EAGER], [row(), row("eager", median=150)], (), 0, "+50%"),
    "disturbed": ([row()], [row(median=500, trusted=False)], (), 0, DOUBTFUL),
    "missing": ([row(), row(case="9x9")], [row()], (), 0, MISSING),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_what_is_slower_fails_and_is_listed(name: str, tmp_path: Path) -> None:
    before, after, options, code, printed = VERDICTS[name]
    done = run_compare(tmp_path, record(*before), record(*after), *options)
    assert done.exit_code == code and printed in done.output


def test_faster_within_the_spread_is_not_listed(tmp_path: Path) -> None:
    within_spread = record(row(median=80, spread=0.3))
    assert "faster: gelu" not in run_compare(tmp_path, record(row()), within_spread).output


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (record(row(), name="Xeon"), "machine"),
        (record(row(), threads=4), "threads"),
        (replace(record(row()), settings={"allocator": "system"}), "allocator"),
        (record(row(dtype="bfloat16")), "dtype"),
    ],
)
def test_different_conditions_are_refused_unless_told(
    tmp_path: Path, other: BenchRecord, word: str
) -> None:
    done = run_compare(tmp_path, record(row()), other)
    assert done.exit_code == 2
    assert f"differ in {word}" in done.stderr and "--allow-different" in done.stderr
    assert run_compare(tmp_path, record(row()), other, "--allow-different").exit_code == 0


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(UserError, match="no row in common"):
        compare(record(row()), record(row(op="mlp")), allowed=0.05)


@pytest.mark.parametrize("text", ["five", "", "-1%", "nan", "inf"])
def test_wrong_share_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--fail-if-slower"):
        parse_share(text)


@pytest.mark.parametrize(
    "text", ['{"rows": 1}', "[]", '{"rows": [], "format": 99}', '{"rows": [{}], "format": 1}']
)
def test_json_that_is_no_record_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"a\.json "):
        load_json(tmp_path / "a.json")


def test_csv_has_versions_in_each_row(tmp_path: Path) -> None:
    table = list(csv.DictReader(io.StringIO(to_csv(record(row())))))
    assert len(table) == 1
    assert table[0]["median_us"] == "100" and table[0]["tflop_per_s"] == ""
    assert table[0]["torch"] == "2.13.0" and table[0]["device"] == "cpu-zen5"
    assert table[0]["commit"] == "0123456789ab+"


def test_results_go_to_one_file_per_op_and_dtype(tmp_path: Path) -> None:
    rows = (row(), row(dtype="bfloat16"), row(op="mlp"))
    written = save_parts(tmp_path, record(*rows), "{}-{}.csv", save_csv)
    names = ["gelu-float32.csv", "gelu-bfloat16.csv", "mlp-float32.csv"]
    assert written == [tmp_path / "cpu-zen5" / name for name in names]
    assert all(len(path.read_text().splitlines()) == 2 for path in written)
