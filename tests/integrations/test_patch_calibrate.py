"""``patch(model, calibrate=True)``: the loser is left alone, with the reason, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_families import DENSE, IDS, SPARSE, loss
from encoder_families import FAMILIES as ENCODERS
from patch_testing import assert_same_training
from torch import nn

import fusedops
from fusedops._core.architecture import architecture
from fusedops._core.timer import Timing, Variant
from fusedops.integrations import describe
from fusedops.integrations.hf import tables
from fusedops.integrations.hf.calibration import calibrate, timing
from fusedops.integrations.hf.calibration.calibrate import CalibrationFinding
from fusedops.integrations.hf.calibration.timing import TimeShares
from fusedops.integrations.hf.rules import chain, torch_modules
from fusedops.integrations.hf.rules.rule import PatchRule
from fusedops.ops.gelu import gelu as fused_gelu

SLOW = 0.05  # seconds that a planted delay takes
FAST = 0.001  # and everything else together


class PlantedClock:
    """A clock that only planted delays advance: no other work on the machine changes a sample."""

    seconds = 0.0

    def sample(self, variant: Variant, repeat: int) -> tuple[float, bool]:
        with variant.context():
            values = [variant.prepare() for _ in range(repeat)]
            start = PlantedClock.seconds
            for value in values:
                variant.run(value)
            return FAST + (PlantedClock.seconds - start) / repeat, False

    def repeat(self, variant: Variant) -> int:
        return 1


@pytest.fixture(autouse=True)
def planted_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known, time is what was planted, and a busy machine has time for everything."""
    calibrate.clear()
    monkeypatch.setattr(calibrate, "clock_for", lambda device: PlantedClock())
    monkeypatch.setattr(calibrate, "BUDGET", 30.0)
    yield
    calibrate.clear()


def work() -> None:
    """Take the time of a planted delay."""
    PlantedClock.seconds += SLOW


def slow(function: Callable[..., Any]) -> Callable[..., Any]:
    def slowed(*args: Any, **kwargs: Any) -> Any:
        work()
        return function(*args, **kwargs)

    return slowed


def plant(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    monkeypatch.setattr(module, name, slow(getattr(module, name)))


class _Passes(torch.autograd.Function):
    """Nothing but time in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        work()
        return grad


class Gate(nn.Module):
    """A module with a rule of its own: its stock forward takes time."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work()
        return torch.nn.functional.gelu(x) * self.weight


class FusedGate(Gate):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused_gelu(x) * self.weight


class Strange(nn.Module):
    """What it takes is known to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, wind: int) -> torch.Tensor:
        return torch.nn.functional.gelu(x) * wind


class FusedStrange(Strange):
    def forward(self, x: torch.Tensor, wind: int) -> torch.Tensor:
        return fused_gelu(x) * wind


class Picky(nn.Module):
    """It runs for nobody but its own model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not now\nsecond line")


class FusedPicky(Picky):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused_gelu(x)


def add_rules(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[type, type]) -> None:
    known = tables.rules
    rules = {
        original: PatchRule(
            original, patched, ("gelu",), "O1", lambda module: fused_gelu(torch.zeros(1))
        )
        for original, patched in pairs
    }
    monkeypatch.setattr(tables, "rules", lambda: known() | rules)


def norms() -> nn.Sequential:
    return nn.Sequential(nn.RMSNorm(32), nn.Tanh(), nn.RMSNorm(32))


def test_a_slow_kernel_is_left_alone_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, torch_modules, "rms_norm")
    model = norms()
    expected = model(x := torch.randn(4, 32))
    report = fusedops.patch(model, calibrate=True)
    for name in ("0", "2"):
        assert type(model.get_submodule(name)) is nn.RMSNorm
        assert not report[name].replaced and not report[name].failed
        assert report[name].reason.startswith("stock kept: 0.")
        assert report[name].reason.endswith("x measured on this machine, float32, 1024x32")
    assert torch.equal(model(x), expected)
    assert describe(model)["0"].reason == report["0"].reason
    assert "stock kept: 0." in str(report)
    fusedops.unpatch(model)
    assert describe(model)["0"].reason == "not patched"


def test_a_slow_stock_module_is_replaced_with_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    add_rules(monkeypatch, (Gate, FusedGate))
    model = nn.Sequential(Gate())
    report = fusedops.patch(model, calibrate=True)
    assert type(model[0]) is FusedGate and report["0"].replaced
    speed_up, _, rest = report["0"].reason.partition("x measured on this machine, float32, ")
    assert float(speed_up) > 1 and rest == "1024x32"


def test_without_it_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "measure", lambda *_: pytest.fail("measured"))
    plant(monkeypatch, torch_modules, "rms_norm")
    assert fusedops.patch(norms()).num_replaced == 2


def test_what_was_measured_is_known_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def measure(*_: Any) -> Timing:
        runs.append(1)
        rounds = {"stock": [2.0] * 5, "patched": [1.0] * 5}
        return Timing(rounds, {name: [False] * 5 for name in rounds}, least=1)

    monkeypatch.setattr(calibrate, "measure", measure)
    first = fusedops.patch(norms(), calibrate=True)
    assert len(runs) == 1  # two norms of one shape
    second = fusedops.patch(norms(), calibrate=True)
    assert len(runs) == 1 and second["0"].reason == first["0"].reason
    fusedops.patch(norms().bfloat16(), calibrate=True)
    fusedops.patch(norms().eval(), calibrate=True)
    fusedops.patch(nn.Sequential(nn.RMSNorm(64)), calibrate=True)
    assert len(runs) == 4  # another dtype, mode and shape


def test_a_backward_counts_where_the_model_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch_modules.rms_norm
    slowed = lambda x, *args: op(_Passes.apply(x), *args)  # noqa: E731
    monkeypatch.setattr(torch_modules, "rms_norm", slowed)
    training, evaluated = norms(), norms().eval()
    assert fusedops.patch(training, calibrate=True)["0"].reason.startswith("stock kept: 0.")
    assert "stock kept" not in fusedops.patch(evaluated, calibrate=True)["0"].reason or (
        float(describe(evaluated)["0"].reason.split()[2].rstrip("x")) > 0.2
    )


def test_under_autocast_that_is_what_is_measured() -> None:
    plain = fusedops.patch(norms(), calibrate=True)["0"].reason
    with torch.autocast("cpu", torch.bfloat16):
        lower = fusedops.patch(norms(), calibrate=True)["0"].reason
    assert plain.endswith("machine, float32, 1024x32")
    assert lower.endswith("machine, float32 under autocast to bfloat16, 1024x32")


@pytest.mark.usefixtures("own_products")
def test_a_block_that_loses_leaves_its_children_to_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    plant(monkeypatch, chain, "mlp")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2))
    report = fusedops.patch(model, calibrate=True)
    for name in ("transformer.h.0.mlp", "transformer.h.1.mlp"):
        assert type(model.get_submodule(name)) is GPT2MLP
        assert report[name].reason.startswith("stock kept: 0.")
        assert "measured" in report[f"{name}.c_fc"].reason
        assert "measured" in report[f"{name}.act"].reason
    assert report["transformer.h.0.attn"].op == "attention"
    calls = []
    monkeypatch.setattr(chain, "mlp", lambda *_, **__: calls.append(1))
    model(IDS)
    assert calls == []


def test_what_cannot_be_run_is_listed_and_stays_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    add_rules(monkeypatch, (Strange, FusedStrange), (Picky, FusedPicky))
    model = nn.Sequential(Strange(), Picky(), nn.GELU(), nn.RMSNorm(8, elementwise_affine=False))
    report = fusedops.patch(model, calibrate=True)
    assert [module.reason for module in report.modules] == [
        "not measured: what its argument 'wind' is, is not known",
        "not measured: RuntimeError: not now",
        "not measured: no weight tells the size of its input",
        "not measured: no weight tells the size of its input",
    ]
    assert report.num_replaced == 4
    assert [type(each) for each in model][:2] == [FusedStrange, FusedPicky]


def test_time_that_is_over_leaves_the_rest_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "BUDGET", 0.0)
    plant(monkeypatch, torch_modules, "rms_norm")
    model = norms()
    report = fusedops.patch(model, calibrate=True)
    assert report.num_replaced == 2
    assert report["0"].reason == "not measured: the time for calibration was over"
    # Another calibration goes on where this one ended.
    monkeypatch.setattr(calibrate, "BUDGET", 30.0)
    assert fusedops.patch(model, calibrate=True)["0"].reason.startswith("stock kept: 0.")


def test_a_module_too_large_for_its_share_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two variants in five rounds and a warm-up do not fit, a look at the module does.
    monkeypatch.setattr(calibrate, "BUDGET", 10 * SLOW)
    plant(monkeypatch, torch_modules, "rms_norm")
    reason = fusedops.patch(nn.Sequential(nn.RMSNorm(32)), calibrate=True)["0"].reason
    assert reason.startswith("not measured: 16 rows take ")
    assert reason.endswith("ms, more than there was time for")


def test_time_is_not_kept_for_what_is_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 7.0)
    sizes = {"norm": 0, "layer": 10**6, "head": 10**8}
    shares = TimeShares(2.0, runs=12)
    shares.plan(sizes)
    norm, layer, head = (1000 + size**0.5 for size in sizes.values())
    assert shares.take("norm") == pytest.approx(2 * norm / (norm + layer + head))
    assert shares.expected(10**8) == 0.0
    shares.learn(10**3, 1.0)  # too small to tell
    assert shares.expected(10**8) == 0.0
    shares.learn(10**6, 0.01)
    assert shares.expected(10**8) == pytest.approx(1.0)  # 12 runs take 12 of 2 seconds
    assert shares.take("layer") == pytest.approx(2.0)


@pytest.mark.usefixtures("own_products")
def test_what_would_take_too_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeShares, "expected", lambda self, size: 9.5 if size > 10**5 else 0.0)
    runs = []
    monkeypatch.setattr(calibrate, "inputs", lambda *_: runs.append(1))
    report = fusedops.patch(nn.Sequential(nn.Linear(400, 400)), calibrate=True)
    assert runs == [] and report["0"].replaced
    assert report["0"].reason == (
        "not measured: 64 rows would take about 9500.0 ms, more than there was time for"
    )
    assert "about 9500.0 ms" in str(report)


def test_what_is_left_over_goes_to_those_that_had_too_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    def measured(module: Any, model: Any, share: float, time: Any) -> CalibrationFinding:
        asked.append(share)
        if len(asked) == 1:
            return CalibrationFinding(problem="16 rows take 9.0 ms", for_want_of_time=True)
        return CalibrationFinding(0.5, True, "float32, 64x32")

    monkeypatch.setattr(calibrate, "_measured", measured)
    report = fusedops.patch(nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32)), calibrate=True)
    assert len(asked) == 3 and asked[2] > asked[0]
    assert all(each.reason.startswith("stock kept: 0.50x") for each in report.modules)


def test_a_loser_is_heard_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def timings(*patched: list[float]) -> Callable[..., Timing]:
        waiting = list(patched)

        def measure(*_: Any) -> Timing:
            rounds = {"stock": [1.0] * 5, "patched": waiting.pop(0)}
            return Timing(rounds, {name: [False] * 5 for name in rounds}, least=1)

        return measure

    for heard, kept, figure in (
        ([[2.0] * 5, [1.25] * 5], True, "0.80x"),
        ([[2.0] * 5, [2.0] * 4 + [0.9]], True, "0.50x"),
        ([[2.0] * 5, [2.0] * 3 + [0.9] * 2], False, "0.50x"),
        ([[2.0] * 3 + [0.9] * 2], False, "0.50x"),
        ([[1.04] * 5, [1.04] * 5], False, "0.96x"),
        ([[0.5] * 5], False, "2.00x"),
    ):
        calibrate.clear()
        monkeypatch.setattr(calibrate, "measure", timings(*heard))
        report = fusedops.patch(nn.Sequential(nn.RMSNorm(32)), calibrate=True)
        prefix = "stock kept: " if kept else ""
        assert report["0"].reason.startswith(f"{prefix}{figure} measured")
        assert report["0"].replaced == (not kept)


def test_a_block_that_does_its_childrens_dropout_is_not_judged_without_it() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).train()
    name = "transformer.h.0"
    said = fusedops.patch(model, calibrate=True)[name].reason
    assert said == "not measured: it does the dropout of its children"
    said = fusedops.patch(model.eval(), calibrate=True)[name].reason
    assert "measured on this machine" in said


def test_hooks_are_not_called_and_concern_their_module_only() -> None:
    model = norms()
    heard: list[int] = []
    model[2].register_forward_hook(lambda *_: heard.append(1))  # the first that is asked
    report = fusedops.patch(model, calibrate=True)
    assert heard == [] and report["2"].reason == "not measured: it has hooks"
    assert "measured on this machine" in report["0"].reason


def test_weights_gradients_random_numbers_and_mode_stay() -> None:
    model = DENSE["Llama"].model()
    model(IDS, labels=IDS).loss.backward()
    before = {name: each.detach().clone() for name, each in model.state_dict().items()}
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    modes = [each.training for each in model.modules()]
    plain = copy.deepcopy(model)
    fusedops.patch(plain)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    fusedops.patch(model, calibrate=True)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(torch.equal(each.grad, grads[name]) for name, each in model.named_parameters())
    assert [each.training for each in model.modules()] == modes
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        assert vars(module).keys() == vars(other).keys()


FAMILIES = {
    **{name: (DENSE[name].model, loss) for name in ("Llama", "Gemma2", "GPTNeoX", "OPT")},
    **{name: (SPARSE[name].model, loss) for name in ("Mixtral", "GptOss")},
    **{
        name: (ENCODERS[name].model, ENCODERS[name].loss)
        for name in ("BertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification")
    },
}


@pytest.mark.parametrize("choice", ["measured", "all stock"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("own_products")
def test_whatever_wins_the_model_trains_the_same(
    family: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, objective = FAMILIES[family]
    stock = build()
    patched = copy.deepcopy(stock)
    if choice == "all stock":
        lost = CalibrationFinding(0.5, True, "float32, 1024x32")
        monkeypatch.setattr(calibrate, "_measured", lambda *_: lost)
    report = fusedops.patch(patched, calibrate=True)
    findings = map(calibrate.finding_of, patched.modules())
    asked = [finding for finding in findings if finding is not None]
    assert asked and sum(each.speed_up is not None for each in asked) > len(asked) / 2
    if choice == "all stock":
        kept = {each.reason for each in report.kept if "stock kept" in each.reason}
        assert kept == {"stock kept: 0.50x measured on this machine, float32, 1024x32"}
        assert all(each.op == "cross_entropy" for each in report.replaced), report
    assert_same_training(patched, stock, objective)


def test_strict_is_about_what_cannot_be_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, torch_modules, "rms_norm")
    report = fusedops.patch(norms(), strict=True, calibrate=True)
    assert report.num_replaced == 0 and report.failed == ()


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "measure", interrupted)
    model = norms()
    with pytest.raises(KeyboardInterrupt):
        fusedops.patch(model, calibrate=True)
    assert type(model[0]) is nn.RMSNorm and "forward" not in vars(model[0])


def test_a_file_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with monkeypatch.context() as patched:
        plant(patched, torch_modules, "rms_norm")
        first = fusedops.patch(norms(), calibrate=path)
    assert first["0"].reason.startswith("stock kept: 0.")
    # Another process, without the slow kernel and without measuring.
    calibrate.clear()
    measure = calibrate.measure
    monkeypatch.setattr(calibrate, "measure", lambda *_: pytest.fail("measured"))
    second = fusedops.patch(norms(), calibrate=str(path))
    assert second["0"].reason == first["0"].reason
    # What is not in it is measured and added; what the process knows otherwise does not win.
    monkeypatch.setattr(calibrate, "measure", measure)
    model = nn.Sequential(nn.RMSNorm(32), nn.RMSNorm(64))
    report = fusedops.patch(model, calibrate=path)
    assert report["0"].reason == first["0"].reason
    entries = json.loads(path.read_text())["entries"]
    assert [entry["key"].split("; ")[1] for entry in entries] == ["weight[32]", "weight[64]"]
    assert all(architecture(torch.device("cpu")) in each["key"] for each in entries)


def test_a_file_of_another_torch_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    fusedops.patch(norms(), calibrate=path)
    data = json.loads(path.read_text())
    data["torch"] = "1.13"
    data["entries"][0] |= {"speed_up": 0.01, "sure": True}
    path.write_text(json.dumps(data))
    calibrate.clear()
    assert "0.01x" not in fusedops.patch(norms(), calibrate=path)["0"].reason
    assert json.loads(path.read_text())["torch"] == ".".join(torch.__version__.split(".")[:2])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 1}',
        '{"kind": "calibration", "schema": 9, "torch": "2.13", "entries": []}',
        '{"kind": "calibration", "schema": 1, "torch": "2.13", "entries": [{"key": "a"}]}',
        '{"kind": "calibration", "schema": 1, "torch": "2.13", "entries": [{"speed_up": 1}]}',
        '{"kind": "calibration", "schema": 1, "torch": "2.13", '
        '"entries": [{"key": "a", "speed_up": "fast"}]}',
    ],
)
def test_a_file_of_something_else_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    model = norms()
    with pytest.raises(ValueError, match="patch: calibrate must name a file .*other.json"):
        fusedops.patch(model, calibrate=path)
    assert path.read_text() == text and type(model[0]) is nn.RMSNorm


def test_a_missing_folder_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, measured = norms(), []
    monkeypatch.setattr(calibrate, "calibrate", lambda *args: measured.append(args) or {})
    with pytest.raises(FileNotFoundError, match=r"a folder that exists, got .*missing.found\.json"):
        fusedops.patch(model, calibrate=tmp_path / "missing" / "found.json")
    assert not measured
    assert type(model[0]) is nn.RMSNorm and describe(model)["0"].reason == "not patched"


def test_it_must_be_a_bool_or_a_path() -> None:
    with pytest.raises(TypeError, match="patch: calibrate must be a bool or a path, got int"):
        fusedops.patch(norms(), calibrate=1)
