"""``fusedops bench`` from the command line, over a spec whose figures are known."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

import fusedops
from fusedops.bench import limits as limits_module
from fusedops.bench import peers
from fusedops.bench.cases import tiny_sample
from fusedops.bench.contenders import ContenderCall
from fusedops.bench.limits import Limit, Limits
from fusedops.bench.results import load_json
from fusedops.cli.main import app
from fusedops.runtime.architecture import cpu_slug
from fusedops.runtime.peak import peak_bytes
from fusedops.specs import BenchCase, Sample, Spec, all_specs

ROWS, COLUMNS = 64, 128
CPU = torch.device("cpu")


def eager(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x)


def twice_as_much_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x + 0.0)


def _make(device: torch.device, dtype: torch.dtype) -> Sample:
    x = torch.linspace(0.5, 1.0, ROWS * COLUMNS, device=device).reshape(ROWS, COLUMNS)
    return Sample("bench", (x.to(dtype).requires_grad_(),))


def _spec(name: str, **changes: Any) -> Spec:
    case = BenchCase(
        label="64x128",
        make=_make,
        bytes_forward=lambda dtype: 2 * ROWS * COLUMNS * dtype.itemsize,
        bytes_backward=lambda dtype: 3 * ROWS * COLUMNS * dtype.itemsize,
    )
    given: dict[str, Any] = {
        "op": eager,
        "eager": eager,
        "samples": lambda device, dtype: [
            Sample("tiny", (torch.ones(4, device=device, dtype=dtype).requires_grad_(),))
        ],
        "bad_inputs": lambda device: [],
        "bench_cases": (case,),
        "summary": "",
        "autocast": "keep",
    }
    return Spec(name=name, **(given | changes))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two private specs, and limits that need no measuring."""
    specs = {name: _spec(name) for name in ("exponential", "other")}
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: specs)
    peer = {"peer": twice_as_much_memory}
    monkeypatch.setattr(peers, "PEERS", {name: lambda: peer for name in specs})
    limits = Limits(Limit(1e9, "copy_", {}), {"float32": Limit(1e12, "torch.mm", {})})
    monkeypatch.setattr(limits_module, "measure_limits", lambda *_: limits)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def bench(*args: str) -> Any:
    options = ("--allocator", "system", "--threads", "1", "--seconds", "0.02", "--no-compile")
    return CliRunner().invoke(app, ["bench", *args, *options])


def test_files_hold_the_same_rows(known: None, tmp_path: Path) -> None:
    paths = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "svg")}
    options = [part for kind, path in paths.items() for part in (f"--{kind}", str(path))]
    done = bench("exponential", "--dtype", "float32", "--results", str(tmp_path), *options)
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


def test_rows_say_what_was_measured(known: None, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = bench("exponential", "--dtype", "float32", "--json", str(path))
    assert done.exit_code == 0, done.output
    rows = {(row.variant, row.direction): row for row in load_json(path).rows}
    size = ROWS * COLUMNS * 4
    for direction, moved in (("forward", 2 * size), ("backward", 3 * size), ("both", 5 * size)):
        row = rows["eager", direction]
        assert row.speedup == 1.0 and row.allocator == "system"
        assert row.gb_per_s == pytest.approx(moved / row.median_us * 1e-3)
        # The fixture's machine copies 1 GB/s.
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


def test_error_against_float64_is_in_ulps(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) * (1 + 64 * torch.finfo(x.dtype).eps)

    monkeypatch.setattr("fusedops.specs.all_specs", lambda: {"wrong": _spec("wrong", op=wrong)})
    done = bench("wrong", "--dtype", "float32", "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    rows = {(row.variant, row.direction): row for row in load_json(tmp_path / "a.json").rows}
    found = rows["fusedops", "forward"].error_max_ulps
    # exp of [0.5, 1] lies in [1.6, 2.7]: 64 relative eps are 82 to 128 units, and one of rounding.
    assert found is not None and 80 < found < 130


def test_contender_that_fails_costs_only_its_rows(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image\nsecond line")

    spec = _spec("exponential")
    monkeypatch.setitem(peers.PEERS, "exponential", lambda: {"peer": broken})
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: {"exponential": spec})
    done = bench("exponential", "--dtype", "float32", "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0
    record = load_json(tmp_path / "a.json")
    assert {row.variant for row in record.rows} == {"eager", "fusedops"}
    assert record.notes == (
        "exponential 64x128 float32: no peer row: RuntimeError: no kernel image",
    )


def test_contender_without_gradient_has_forward_rows_only(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x.detach()).requires_grad_()

    spec = _spec("exponential")
    monkeypatch.setitem(peers.PEERS, "exponential", lambda: {"peer": without})
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: {"exponential": spec})
    done = bench("exponential", "--dtype", "float32", "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    record = load_json(tmp_path / "a.json")
    assert [row.direction for row in record.rows if row.variant == "peer"] == ["forward"]
    assert record.notes == (
        "exponential 64x128 float32: peer has forward rows only: "
        "it gives no gradient to 1 of 1 inputs",
    )


class Overwriting:
    """A peer that leaves zeros where its argument and its incoming gradient were."""

    overwrites = True

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(x)
            ctx.save_for_backward(y)
            x.zero_()
            return y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            result = grad * ctx.saved_tensors[0]
            grad.zero_()
            return result

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.Function.apply(x)


def test_a_peer_that_overwrites_its_arguments_gets_copies(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(device: torch.device, dtype: torch.dtype) -> Sample:
        made.append(_make(device, dtype))
        return made[-1]

    spec = _spec("exponential")
    monkeypatch.setitem(peers.PEERS, "exponential", lambda: {"peer": Overwriting()})
    spec = replace(spec, bench_cases=(replace(spec.bench_cases[0], make=make),))
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: {"exponential": spec})
    done = bench("exponential", "--dtype", "float32", "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    rows = [row for row in load_json(tmp_path / "a.json").rows if row.variant == "peer"]
    assert [row.direction for row in rows] == ["forward", "backward", "both"]
    assert [row.direction for row in rows] == ["forward", "backward", "both"]
    assert all(row.error_max_ulps is not None and row.error_max_ulps < 2 for row in rows)
    wanted = _make(CPU, torch.float32).args[0]
    assert all(torch.equal(sample.args[0], wanted) for sample in made)


def test_eager_that_fails_leaves_a_note_and_the_other_ops(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nsecond line")

    specs = {"broken": _spec("broken", eager=broken), "whole": _spec("whole")}
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: specs)
    done = bench("--dtype", "float32", "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    record = load_json(tmp_path / "a.json")
    assert {row.op for row in record.rows} == {"whole"}
    assert record.notes == (
        "broken 64x128 float32: no rows: DefaultCPUAllocator: can't allocate memory",
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_keeps_the_table_and_the_other_files(known: None, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    done = bench("exponential", "--dtype", "float32", "--json", "/dev/full", "--csv", str(path))
    assert done.exit_code == 2
    assert "cannot write /dev/full: No space left on device" in done.stderr
    assert "of limit" in done.stdout and len(path.read_text().splitlines()) == 10


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_what_was_measured_before(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    def interrupted(device: torch.device, dtype: torch.dtype) -> Sample:
        signal.raise_signal(by)
        raise AssertionError("still running")

    stopped = _spec("other")
    stopped = replace(stopped, bench_cases=(replace(stopped.bench_cases[0], make=interrupted),))
    specs = {"exponential": _spec("exponential"), "other": stopped}
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: specs)
    # A shell that starts tests in the background has them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = bench("--dtype", "float32", "--results", str(tmp_path))
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 130, done.output
    (path,) = tmp_path.glob("*/*.csv")
    assert path.name == "exponential-float32.csv" and len(path.read_text().splitlines()) == 10
    assert "interrupted at other 64x128 float32" in done.stdout


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    found: list[set[str]] = []

    def looks(device: torch.device, dtype: torch.dtype) -> Sample:
        if path.exists():
            found.append({row.op for row in load_json(path).rows})
        return _make(device, dtype)

    other = _spec("other")
    other = replace(other, bench_cases=(replace(other.bench_cases[0], make=looks),))
    specs = {"exponential": _spec("exponential"), "other": other}
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: specs)
    assert bench("--dtype", "float32", "--json", str(path)).exit_code == 0
    assert found and found[0] == {"exponential"}


def test_variants_keep_eager_and_the_named(known: None, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    done = bench("--variants", "peer", "--dtype", "float32,float64", "--json", str(path))
    assert done.exit_code == 0, done.output
    rows = load_json(path).rows
    assert {row.variant for row in rows} == {"eager", "peer"}
    assert {row.op for row in rows} == {"exponential", "other"}
    assert {row.dtype for row in rows} == {"float32", "float64"}


def test_sizes_are_a_label_or_its_first_words(
    known: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (case,) = _spec("a").bench_cases
    labels = ("64x128", "64x128, dropout 0.1", "9x9")
    cases = tuple(replace(case, label=label) for label in labels)
    monkeypatch.setattr("fusedops.specs.all_specs", lambda: {"a": _spec("a", bench_cases=cases)})
    path = tmp_path / "a.json"
    for sizes, found in (
        ("64x128", labels[:1]),
        ("64x128,9x9", labels),
        (labels[1], labels[1:2]),
    ):
        done = bench("--dtype", "float32", "--sizes", sizes, "--json", str(path))
        assert done.exit_code == 0, done.output
        assert {row.case for row in load_json(path).rows} == set(found)


def test_real_op_runs_and_names_its_backend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = Limits(Limit(1e9, "copy_", {}), {})
    monkeypatch.setattr(limits_module, "measure_limits", lambda *_: limits)
    path = tmp_path / "a.json"
    done = bench(
        "layer_norm", "--dtype", "float32", "--sizes", "16x768", "--all-backends",
        "--json", str(path),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = {row.variant: row for row in load_json(path).rows if row.direction == "both"}
    assert rows["fusedops:torch"].backend == "torch"
    assert rows["fusedops"].backend in ("cpp", "torch")
    assert all(row.error_max_ulps is not None for row in rows.values())


@pytest.mark.gpu
def test_gpu_rows_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    done = bench("layer_norm", "--device", "cuda", "--dtype", "bfloat16", "--json", str(path))
    assert done.exit_code == 0, done.output
    record = load_json(path)
    assert {row.direction for row in record.rows} == {"forward", "backward", "both"}
    ours = [row for row in record.rows if row.variant == "fusedops"]
    assert all(row.backend in ("cuda", "triton") and row.peak_bytes for row in ours)
    # A time without its synchronisation would beat the memory it has to move several times over.
    assert all(row.limit_share < 2 for row in record.rows)
    assert record.machine["gpu_state"] and record.versions["cuda"]


@pytest.mark.slow
def test_compile_row_is_measured(known: None, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    options = ["--allocator", "system", "--threads", "1", "--seconds", "0.02"]
    command = ["bench", "exponential", "--dtype", "float32", "--json", str(path), *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "compile" in {row.variant for row in load_json(path).rows}, load_json(path).notes


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["exponentiall"], "unknown op 'exponentiall': did you mean exponential?"),
        (["gelu"], "op 'gelu' has no spec: write fusedops/specs/gelu.py"),
        (["exponential", "--all"], "name ops or say --all, not both"),
        (["--dtype", "float23"], "unknown dtype 'float23': did you mean float"),
        (["--dtype", ""], "--dtype is empty"),
        (["--sizes", "64x127"], "unknown sizes '64x127': did you mean 64x128?"),
        (["--variants", "eagre"], "unknown variants 'eagre': did you mean eager?"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--device", "cpu:x"], "unknown device 'cpu:x'"),
        (["--device", "cpu:7"], "there is no device cpu:7: the CPU is one device, cpu"),
        (["--json", "missing/a.json"], "folder"),
        (["--csv", "."], "it is a folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    known: None, args: list[str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("measured before the input was checked")

    monkeypatch.setattr(limits_module, "measure_limits", never)
    monkeypatch.chdir(tmp_path)
    done = bench(*args)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert done.stderr.startswith("fusedops: error: ") and done.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_one_sentence(known: None) -> None:
    done = bench("--device", "cuda")
    assert done.exit_code == 2 and "this torch sees no CUDA device" in done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["bench", "layer_norm", "--json", "/nowhere/at/all.json"], "does not exist"),
        (["bench", "compare", "none.json", "none.json"], "cannot read none.json"),
        (["bench", "compare", "pyproject.toml", "pyproject.toml"], "is not valid JSON"),
        (["doctor", "--device", "tpu"], "no device 'tpu' here"),
    ],
)
def test_a_wrong_command_is_one_line(
    command: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(fusedops.__file__).resolve().parent.parent)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert says in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_a_process_ends_with_2_and_no_traceback() -> None:
    command = [sys.executable, "-m", "fusedops.cli.main", "bench", "layer_nrom"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean layer_norm?" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_help_tells_the_options() -> None:
    done = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "--all-sizes" in done.output and "compare" in done.output


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


def test_call_in_float64_has_the_same_values_and_gradients() -> None:
    spec = all_specs()["layer_norm"]
    call = ContenderCall.of(spec, spec.samples(CPU, torch.bfloat16)[0])
    wide = call.double()
    assert [leaf.dtype for leaf in wide.leaves] == [torch.float64] * len(call.leaves)
    for narrow, leaf in zip(call.leaves, wide.leaves, strict=True):
        assert torch.equal(narrow.double(), leaf)
    assert len(wide.backward(wide.forward(spec.eager))) == len(call.leaves)


def test_every_op_has_a_tiny_sample_for_the_host_overhead() -> None:
    for spec in all_specs().values():
        assert tiny_sample(spec, CPU, torch.float32) is not None, spec.name


@pytest.mark.parametrize(
    ("info", "slug"),
    [
        ({"vendor_id": "AuthenticAMD", "cpu family": "26", "model": "2"}, "cpu-zen5"),
        ({"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "17"}, "cpu-zen4"),
        ({"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "1"}, "cpu-zen3"),
        ({"vendor_id": "GenuineIntel", "cpu family": "6", "model": "143"}, "cpu-sapphire-rapids"),
        ({"CPU part": "0xd4f"}, "cpu-neoverse-v2"),
        ({"vendor_id": "GenuineIntel", "model name": "Odd (TM) 9"}, "cpu-odd-tm-9"),
    ],
)
def test_cpu_has_a_slug(info: dict[str, str], slug: str) -> None:
    assert cpu_slug(info) == slug


def test_record_is_valid_json_without_nan(known: None, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert bench("exponential", "--dtype", "float32", "--json", str(path)).exit_code == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
