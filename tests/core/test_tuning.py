"""Tuning tables: what is read, what is refused and how loudly, and that every path obeys them."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedops
from fusedops._core import backends, env, extension, tuning
from fusedops._core.architecture import architecture
from fusedops.specs import all_specs
from fusedops.specs.comparison import difference_from_truth, fresh, run

CPU = torch.device("cpu")
ORDER = {"cpu": ("cpp", "torch"), "cuda": ("cuda", "triton", "torch")}
OPS = ("layer_norm", "layer_norm_backward", "gelu")
# Of layer_norm on 4 x 8 float32 elements.
KEY = ("layer_norm", torch.float32, 5)
native = pytest.mark.skipif(extension.cpu_library() is not None, reason="no compiled library")


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "op": "layer_norm",
        "dtype": "float32",
        "size_class": 5,
        "backend": "torch",
        "config": None,
        "median_us": {"cpp": 15.1, "torch": 12.3},
        "ratio": 1.23,
        "cases": ["4x8"],
    } | changes


def table(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "schema": tuning.SCHEMA,
        "architecture": architecture(CPU),
        "versions": {"torch": torch.__version__},
        "entries": list(entries) or [entry()],
    } | changes


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def prefer(backend: str, **changes: Any) -> dict[tuning.Key, tuning.Entry]:
    parsed = tuning.parse(table(entry(backend=backend, **changes)), OPS, ORDER)
    return {KEY: parsed.entries[0]}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """An empty shipped folder, a path for a user's file, and what puts them in force."""
    shipped, own = tmp_path / "shipped", tmp_path / "own.json"
    shipped.mkdir()
    monkeypatch.setattr(tuning, "SHIPPED", shipped)
    monkeypatch.delenv("FUSEDOPS_TUNING", raising=False)
    monkeypatch.setattr(backends, "_WARNED", set())

    def load(asked: Path | str | None = None) -> tuning.LoadedTable:
        if asked is not None:
            monkeypatch.setenv("FUSEDOPS_TUNING", str(asked))
        backends._tuned.pop(CPU, None)
        return backends.tuning_in_force(CPU)

    before = backends.tuning_in_force(CPU)
    yield SimpleNamespace(shipped=shipped / f"{architecture(CPU)}.json", own=own, load=load)
    backends._put_in_force(CPU, before)


def layer_norm(rows: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return fusedops.layer_norm(torch.randn(rows, 8, dtype=dtype), (8,))


def resolved(rows: int = 4) -> backends.Resolution:
    return fusedops.resolve("layer_norm", torch.randn(rows, 8), (8,), None, None, 1e-5)


def test_what_is_written_is_read_again() -> None:
    high = entry(op="layer_norm_backward", size_class=9)
    first = tuning.parse(table(high, entry()), OPS, ORDER)
    text = tuning.dump(first)
    again = tuning.parse(json.loads(text), OPS, ORDER)
    assert again.entries == first.entries[::-1]  # sorted
    assert (again.architecture, again.versions) == (first.architecture, first.versions)
    assert sum('"op"' in line for line in text.splitlines()) == 2
    assert (
        json.loads(tuning.dump(tuning.TuningTable("sm_90", {"torch": "2.13"}, ())))["entries"] == []
    )


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ([], "no tuning table"),
        ({"entries": []}, "no tuning table"),
        (table(schema=2), "schema 2"),
        (table(architecture=3), "architecture"),
        (table(versions={}), "version of torch"),
        (table(entries={}), "no list of entries"),
        (table("x"), "entry 1 is no object"),  # type: ignore[arg-type]
        (table(entry(), entry(dtype="float8")), "entry 2 has dtype 'float8'"),
        (table(entry(size_class=True)), "size_class True"),
        (table(entry(size_class=63)), "size_class 63"),
        (table(entry(backend="triton")), "backend 'triton'"),  # not on the CPU
        (table(entry(backend=["cpp"])), "backend"),
        (table(entry(config="wide")), "config 'wide'"),
        (table(entry(median_us={})), "median_us"),
        (table(entry(median_us={"torch": "fast"})), "median_us"),
        (table(entry(median_us={"cpp": 1.0})), "no median of its winner"),
        (table(entry(ratio=float("nan"))), "ratio nan"),
        (table(entry(ratio=None)), "ratio None"),
        (table(entry(cases=7)), "cases 7"),
        (table(entry(op="conv9d")), "no op conv9d"),
        (table(entry(op=None)), "op None"),
    ],
)
def test_damage_is_named(broken: Any, says: str) -> None:
    with pytest.raises(tuning.TableError, match=says):
        tuning.parse(broken, OPS, ORDER)


def test_the_example_in_the_documentation_is_a_table() -> None:
    page = Path(fusedops.__file__).parent.parent / "docs" / "tuning.md"
    (example,) = re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
    table = tuning.parse(json.loads(example), OPS, ORDER)
    assert tuning.dump(table) == example


OTHER_TORCH = {"torch": "1.9.1"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (table(schema=0), "schema 0"),
        (table(architecture="cpu-other"), "it is for cpu-other, this is"),
        (table(entry(op="conv9d")), "no op conv9d"),
        (table(versions=OTHER_TORCH), "measured with torch 1.9, this is"),
        (None, "No such file"),
    ],
    ids=["corrupt", "binary", "schema", "architecture", "op", "torch", "absent"],
)
def test_a_table_that_does_not_fit_is_ignored_with_one_warning(
    tables: SimpleNamespace, caplog: pytest.LogCaptureFixture, content: Any, says: str
) -> None:
    if isinstance(content, bytes):
        tables.own.write_bytes(content)
    elif content is not None:
        tables.own.write_text(content if isinstance(content, str) else json.dumps(content))
    with caplog.at_level(logging.WARNING, "fusedops"):
        loaded = tables.load(tables.own)
        tables.load(tables.own)
        layer_norm()
        layer_norm()
    assert loaded.entries == {} and loaded.tables == ()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert says in messages[0] and str(tables.own) in messages[0]
    assert "fusedops bench tune" in messages[0] and "unset FUSEDOPS_TUNING" in messages[0]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch may see a GPU")
def test_the_table_of_a_gpu_is_foreign_to_a_torch_without_cuda(
    tables: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    medians = {"cuda": 2.0, "triton": 1.0}
    write(tables.own, table(entry(backend="triton", median_us=medians), architecture="sm_90"))
    with caplog.at_level(logging.WARNING, "fusedops"):
        tables.load(tables.own)
    assert [record.getMessage().count("sm_90") for record in caplog.records] == [1]


def test_a_shipped_table_that_is_old_makes_no_noise(
    tables: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    write(tables.shipped, table(versions=OTHER_TORCH))
    with caplog.at_level(logging.INFO, "fusedops"):
        loaded = tables.load()
    assert loaded.entries == {} and len(loaded.ignored) == 1
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_another_patch_release_of_torch_keeps_the_table(tables: SimpleNamespace) -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    write(tables.own, table(versions={"torch": f"{minor}.99+cu999"}))
    assert set(tables.load(tables.own).entries) == {KEY}


def test_the_users_entries_win_over_the_shipped(tables: SimpleNamespace) -> None:
    write(tables.shipped, table(entry(), entry(op="gelu")))
    assert set(tables.load().entries) == {KEY, ("gelu", torch.float32, 5)}
    write(tables.own, table(entry(backend="cpp")))
    loaded = tables.load(tables.own)
    assert set(loaded.entries) == {("gelu", torch.float32, 5)}
    assert [each.path for each in loaded.tables] == [tables.shipped, tables.own]


def test_a_folder_is_searched_for_this_architecture(tables: SimpleNamespace) -> None:
    folder = tables.own.parent / "mine"
    folder.mkdir()
    write(folder / "sm_90.json", "not looked at")
    assert tables.load(folder) == tuning.LoadedTable()
    write(folder / f"{architecture(CPU)}.json", table())
    assert set(tables.load(folder).entries) == {KEY}


def test_off_means_no_table(tables: SimpleNamespace) -> None:
    write(tables.shipped, table())
    assert set(tables.load().entries) == {KEY}
    assert tables.load("off") == tuning.LoadedTable()


def test_classes_between_two_alike_follow_them(tables: SimpleNamespace) -> None:
    rows = [entry(size_class=3), entry(size_class=6), entry(size_class=8, backend="cpp")]
    write(tables.own, table(*rows, entry(size_class=10)))
    entries = tables.load(tables.own).entries
    assert sorted(size for _, _, size in entries) == [3, 4, 5, 6, 10]
    nearest = {size: found.size_class for (_, _, size), found in entries.items()}
    assert nearest == {3: 3, 4: 3, 5: 6, 6: 6, 10: 10}
    assert "at 2^6 elements, the nearest measured (12.3 / 15.1 us)" in str(resolved())


@native
def test_resolve_gives_the_table_as_reason(tables: SimpleNamespace) -> None:
    write(tables.own, table())
    tables.load(tables.own)
    assert str(resolved()) == (
        "torch (not cpp: tuning table: torch is faster at this size (12.3 / 15.1 us))"
    )
    assert resolved(rows=8).backend == "cpp"


@native
def test_the_router_turns_away_only_what_the_table_names() -> None:
    fusedops.reset_counters()
    with backends.use_tuning(CPU, prefer("torch")):
        layer_norm(4)  # 2^5 elements
        layer_norm(7)  # 56: still that class
        layer_norm(8)
        layer_norm(3)
        layer_norm(4, torch.bfloat16)
        layer_norm(4, torch.float64)
        fusedops.gelu(torch.randn(4, 8))
    layer_norm(4)
    assert fusedops.counters() == {
        ("layer_norm", "torch"): 2,
        ("layer_norm", "cpp"): 5,
        ("gelu", "cpp"): 1,
    }


@native
def test_the_backward_has_entries_of_its_own() -> None:
    chosen = prefer("torch", op="layer_norm_backward")[KEY]
    x = torch.randn(4, 8, requires_grad=True)
    want = torch.autograd.grad(fusedops.layer_norm(x, (8,)).square().sum(), x)[0]
    fusedops.reset_counters()
    with backends.use_tuning(CPU, {("layer_norm_backward", torch.float32, 5): chosen}):
        got = torch.autograd.grad(fusedops.layer_norm(x, (8,)).square().sum(), x)[0]
    assert fusedops.counters() == {("layer_norm", "cpp"): 1, ("layer_norm_backward", "torch"): 1}
    torch.testing.assert_close(got, want)


@native
def test_empty_tensors_are_of_class_zero() -> None:
    fusedops.reset_counters()
    with backends.use_tuning(CPU, {("layer_norm", torch.float32, 0): prefer("torch")[KEY]}):
        layer_norm(0)
    assert fusedops.counters() == {("layer_norm", "torch"): 1}


@native
def test_the_gradient_of_a_loss_does_not_set_the_size() -> None:
    logits = torch.randn(4, 8)
    chosen = prefer("torch")[KEY]
    entries = {("cross_entropy_backward", torch.float32, 5): chosen}
    fusedops.reset_counters()
    with backends.use_tuning(CPU, entries):
        for rows in (4, 8):
            x = logits.repeat(rows // 4, 1).requires_grad_()
            fusedops.cross_entropy(x, torch.zeros(rows, dtype=torch.long)).backward()
    found = {key: count for key, count in fusedops.counters().items() if "backward" in key[0]}
    assert found == {
        ("cross_entropy_backward", "torch"): 1,
        ("cross_entropy_backward", "cpp"): 1,
    }
    one = torch.ones(1)
    assert tuning.key("gelu", (one, "none")) == ("gelu", torch.float32, 0)
    empty = torch.ones(0)
    assert tuning.key("gelu", (None, one.double(), empty)) == ("gelu", torch.float32, 0)


@native
def test_tensors_in_lists_do_not_count_on_either_side() -> None:
    """Not as the first tensor of a call, nor where there is no other."""
    tensors = [torch.ones(4)]
    assert tuning.key("square_sums", (tensors,)) is None
    by_first = ("square_sums", torch.float32, tuning.size_class(4))
    fusedops.reset_counters()
    with backends.use_tuning(CPU, {by_first: replace(prefer("torch")[KEY], op="square_sums")}):
        assert fusedops.resolve("square_sums", tensors).backend == "cpp"
        torch.ops.fusedops.square_sums(tensors)
    assert fusedops.counters() == {("square_sums", "cpp"): 1}


@native
@pytest.mark.parametrize("asked", ["cpp", "torch"])
def test_a_request_wins_over_the_table(asked: str) -> None:
    other = {"cpp": "torch", "torch": "cpp"}[asked]
    fusedops.reset_counters()
    with backends.use_tuning(CPU, prefer(other)), fusedops.use_backend(asked):
        layer_norm()
        assert resolved() == backends.Resolution(asked, ())
        with fusedops.use_backend(None):
            layer_norm()
    assert fusedops.counters() == {("layer_norm", asked): 1, ("layer_norm", other): 1}


@native
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_obeys_a_table_that_comes_later(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: fusedops.layer_norm(x, (8,)), backend=backend, fullgraph=True
    )
    x = torch.randn(4, 8)
    want = compiled(x)
    fusedops.reset_counters()
    with backends.use_tuning(CPU, prefer("torch")):
        got = compiled(x)
    compiled(x)
    assert fusedops.counters() == {("layer_norm", "torch"): 1, ("layer_norm", "cpp"): 1}
    torch.testing.assert_close(got, want)


def test_what_the_table_names_but_cannot_run_steps_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_ORDER", {"cpu": ("torch", "cpp")})
    monkeypatch.setattr(extension, "cpu_library", lambda: "it is gone")
    monkeypatch.setitem(backends._tuned, CPU, tuning.LoadedTable(prefer("cpp")))
    resolution = resolved()
    assert resolution.backend == "torch"
    assert dict(resolution.passed_over)["cpp"] == "the tuning table names it, but it is gone"


def test_a_triton_configuration_reaches_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    def forward(*args: Any, config: str | None = None) -> str:
        launched.append(config)
        return "done"

    module = SimpleNamespace(forward=forward, configs=lambda: ("wide", "narrow"))
    monkeypatch.setitem(sys.modules, "fusedops_test_kernels", module)
    kernels = replace(backends._KERNELS["layer_norm"], triton="fusedops_test_kernels")
    monkeypatch.setitem(backends._KERNELS, "layer_norm", kernels)
    monkeypatch.setattr(backends, "_ORDER", {"cpu": ("triton", "torch")})
    monkeypatch.setattr(extension, "triton_missing", lambda: None)
    monkeypatch.setattr(env, "triton_interpreted", lambda: True)
    arguments = (torch.randn(4, 8), (8,), None, None, 1e-5)

    def run(config: str | None) -> str:
        medians = {tuning.label("triton", config): 1.0}
        row = entry(backend="triton", config=config, median_us=medians)
        parsed = tuning.parse(table(row), OPS, backends._ORDER)
        monkeypatch.setitem(backends._tuned, CPU, tuning.LoadedTable({KEY: parsed.entries[0]}))
        resolution = fusedops.resolve("layer_norm", *arguments)
        backends.run("layer_norm", arguments)
        return str(resolution)

    assert backends.configurations("layer_norm") == ("wide", "narrow")
    assert run("narrow") == "triton:narrow"
    assert run(None) == "triton"
    assert launched == ["narrow", None]
    assert run("gone") == (
        "torch (not triton: the tuning table names it, but it has no configuration 'gone')"
    )


@native
def test_the_environment_puts_a_table_in_force(tables: SimpleNamespace) -> None:
    write(tables.own, table())
    code = """
        import torch, fusedops
        fusedops.layer_norm(torch.ones(4, 8), (8,))
        fusedops.layer_norm(torch.ones(8, 8), (8,))
        print(fusedops.counters())
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "FUSEDOPS_TUNING": str(tables.own)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{('layer_norm', 'torch'): 1, ('layer_norm', 'cpp'): 1}"
    assert done.stderr == ""


PRODUCTS = ("linear_act", "linear_glu", "mlp", "baddbmm", "grouped_mm", "moe_mlp")


@native
@pytest.mark.parametrize("op", PRODUCTS)
def test_a_shipped_table_may_name_torchs_product(op: str, tables: SimpleNamespace) -> None:
    spec = all_specs()[op]
    entries = [
        entry(op=name, dtype="float32", size_class=size)
        for name in (op, f"{op}_backward")
        for size in range(24)
    ]
    write(tables.shipped, table(*entries))
    assert not tables.load().ignored
    given = next(sample for sample in spec.samples(CPU, torch.float32) if sample.leaves)
    fusedops.reset_counters()
    found = run(spec.op, fresh(given))
    ran = {key for key in fusedops.counters() if key[0].removesuffix("_backward") == op}
    assert ran == {(op, "torch"), (f"{op}_backward", "torch")}
    assert difference_from_truth(found, spec, given) is None
    # A table of another architecture says nothing here.
    tables.shipped.unlink()
    write(tables.shipped.with_name("cpu-other.json"), table(*entries, architecture="cpu-other"))
    tables.load()
    fusedops.reset_counters()
    run(spec.op, fresh(given))
    assert (op, "cpp") in fusedops.counters() and (op, "torch") not in fusedops.counters()


@native
def test_a_patched_layer_obeys_the_table_for_its_product(tables: SimpleNamespace) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Tanh()).bfloat16()
    report = fusedops.patch(model)
    assert report["0"].backend == "cpp"
    x = torch.randn(4, 32, dtype=torch.bfloat16)  # 2^7 elements
    want = model(x)
    write(tables.shipped, table(entry(op="linear_act", dtype="bfloat16", size_class=7)))
    tables.load()
    fusedops.reset_counters()
    torch.testing.assert_close(model(x), want)
    model(torch.randn(64, 32, dtype=torch.bfloat16))
    assert fusedops.counters() == {("linear_act", "torch"): 1, ("linear_act", "cpp"): 1}
