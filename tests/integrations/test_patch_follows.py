"""A patched module computes what its original would, whatever is changed around it."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import followed_modules as followed
import home_made
import pytest
import torch
from families import DENSE, GPT2, IDS, needs_sdpa
from patch_testing import TOLERANCE, counted, distance, patched_pair
from torch import nn
from torch.utils._pytree import tree_map
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import fusedops
from fusedops.integrations.hf import original_code

functional = nn.functional
LEVELS = ["O1", "O2", "O3"]
ROWS = torch.randn(2, 6, followed.WIDTH, generator=torch.Generator().manual_seed(0))
Context = pytest.MonkeyPatch


class Case(NamedTuple):
    """A module, and a change of what it reads, made for each of two instances.

    Attributes:
        make: returns the module; or the name of a class in ``followed_modules``.
        change: makes the change.
        fused: whether the unchanged module calls fused ops at level O3.
    """

    make: Callable[[], nn.Module] | str
    change: Callable[[Context, Any], object]
    fused: bool = True

    def module(self) -> Any:
        return getattr(followed, self.make)() if isinstance(self.make, str) else self.make()


def at(place: str, value: Any) -> Callable[[Context, Any], object]:
    """Return the change of a place, by its name in ``followed_modules``."""
    *path, name = place.split(".")
    return lambda context, layer: context.setattr(
        functools.reduce(getattr, path, followed), name, value
    )


def item(table: str, key: Any, value: Any) -> Callable[[Context, Any], object]:
    return lambda context, layer: context.setitem(getattr(followed, table), key, value)


def own(name: str, value: Any) -> Callable[[Context, Any], object]:
    """Return the change of an attribute of the instance, which a function is as a method."""
    return lambda context, layer: context.setattr(
        layer,
        name,
        MethodType(value, layer) if isinstance(value, FunctionType) else value,
        raising=False,
    )


def child(name: str, value: nn.Module) -> Callable[[Context, Any], object]:
    return lambda context, layer: context.setitem(layer._modules, name, value)


def hooks(find: Callable[[Any], Any], factor: float = 2.0) -> Callable[[Context, Any], object]:
    return lambda context, layer: context.setitem(
        find(layer), 0, lambda module, args, output: factor * output
    )


def _sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8))


def _processed() -> nn.Module:
    return followed.ProcessorAttention(followed.Processor())


def _cell(context: Context, layer: Any) -> None:
    (cell,) = followed.ClosureNorm.forward.__closure__
    context.setattr(cell, "cell_contents", 1.0)


def _doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def _twice(self: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    return 2 * x


def _values(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return v


_OTHER_SDPA = at(
    "F.scaled_dot_product_attention", _doubled(functional.scaled_dot_product_attention)
)
_LINEAR = followed.LinearProcessor
CASES = {
    "method of the instance": Case("Norm", own("_norm", _twice)),
    "forward of the class": Case("Norm", at("Norm.forward", _twice)),
    "number of the class": Case("Norm", at("Norm.eps", 1.0)),
    "number of the class, on the instance": Case("Norm", own("eps", 1.0)),
    "number of the instance": Case("OwnNumberNorm", own("eps", 1.0)),
    "code of a method": Case("Norm", at("Norm._norm.__code__", _twice.__code__)),
    "forward of the base": Case("DerivedNorm", at("Norm.forward", _twice), fused=False),
    "method of the base": Case("DerivedNorm", at("Norm._norm", _twice), fused=False),
    "closure": Case("ClosureNorm", _cell, fused=False),
    "property": Case(
        "PropertyNorm", at("PropertyNorm.epsilon", property(lambda self: 1.0)), fused=False
    ),
    "global number": Case("GlobalNorm", at("EPS", 1.0)),
    "global number of a function": Case("HelpedNorm", at("EPS", 1.0)),
    "function of a function": Case("HelpedNorm", at("normed", lambda x, eps: 2 * x)),
    "method of the class": Case("Norm", at("Norm._norm", _twice)),
    "default of a method": Case("DefaultNorm", at("DefaultNorm._norm.__defaults__", (1.0,))),
    "code of the forward": Case("GlobalNorm", at("GlobalNorm.forward.__code__", _twice.__code__)),
    "table, in place": Case("TableNorm", item("EPSILONS", "norm", 1.0), fused=False),
    "hook of a global activation": Case(
        "FeedForward", hooks(lambda layer: followed.ACTIVATION._forward_hooks)
    ),
    "forward of a global activation": Case("FeedForward", at("ACTIVATION.forward", torch.relu)),
    "hooks of all modules": Case(
        "GatedFeedForward", hooks(lambda layer: nn.modules.module._global_forward_hooks, 1.25)
    ),
    "flag of the class": Case("FeedForward", at("FeedForward.doubled", True)),
    "flag on the instance": Case("FeedForward", own("doubled", True)),
    "method of a feed-forward layer": Case(
        "FunctionalFeedForward", own("activated", lambda self, x: self.up(x))
    ),
    "torch's activation": Case("FunctionalFeedForward", at("F.gelu", torch.relu)),
    "global flag": Case("GlobalFeedForward", at("SQUARED", True)),
    "global string": Case("GlobalFeedForward", at("APPROXIMATE", "tanh")),
    "torch's activation by another name": Case("OtherNameFeedForward", at("F.silu", torch.relu)),
    "argument of a loss": Case("SmoothedLoss", at("SMOOTHING", 0.5)),
    "factor of a loss": Case("ScaledLoss", at("SCALE", 3.0)),
    "child of a sequence": Case(_sequence, child("1", nn.Tanh())),
    "further child of a sequence": Case(_sequence, child("3", nn.Tanh())),
    **{
        f"hook of child {index}": Case(
            _sequence, hooks(lambda layer, index=index: layer[index]._forward_hooks)
        )
        for index in range(3)
    },
    "forward of a child": Case(
        "GatedFeedForward",
        lambda context, layer: context.setattr(
            layer.up, "forward", lambda x: layer.gate(x), raising=False
        ),
    ),
    "activation of a child": Case("GatedFeedForward", own("act", nn.ReLU())),
    "forward of the class of a child": Case("GatedFeedForward", at("nn.SiLU.forward", _twice)),
    "flag of attention": Case("Attention", at("CAUSAL", False)),
    "tensor of attention": Case("TableAttention", at("TABLE", torch.linspace(0, 1, 32))),
    "name of the file": Case("TableAttention", at("__file__", "another")),
    "default of attention": Case(
        "DefaultAttention", at("DefaultAttention.attend.__defaults__", (True,))
    ),
    "table of attention, in place": Case("Attention", item("HEADS", "count", 2)),
    "method of attention": Case("Attention", at("Attention.attend", _values)),
    "method of attention, on the instance": Case("Attention", own("attend", _values)),
    "method of the base of attention": Case("DerivedAttention", at("Attention.attend", _values)),
    "torch's attention": Case("Attention", _OTHER_SDPA),
    "torch's attention under another name": Case(
        "RenamedAttention", at("sdpa", _doubled(functional.scaled_dot_product_attention))
    ),
    "torch's attention of several heads": Case(
        lambda: home_made.SelfAttention(need_weights=False), _OTHER_SDPA
    ),
    "processor": Case(_processed, own("processor", _LINEAR())),
    "method of a processor": Case(_processed, at("Processor.__call__", _LINEAR.__call__)),
    "torch's attention in a processor": Case(_processed, _OTHER_SDPA),
    "function of torch": Case("Norm", at("torch.rsqrt", _doubled(torch.rsqrt))),
    "torch's product": Case("WrittenAttention", at("torch.matmul", _doubled(torch.matmul))),
    "torch's softmax": Case(
        "WrittenAttention", at("torch.softmax", lambda scores, dim: scores / 8)
    ),
}


def _call(layer: Any) -> list[torch.Tensor]:
    rows = ROWS.clone().requires_grad_()
    output = layer(rows)
    (gradient,) = torch.autograd.grad((output * torch.cos(output.detach())).sum(), rows)
    return [output.detach(), gradient]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert distance(actual.detach(), expected.detach()) <= TOLERANCE


def _assert_same(layer: Any, stock: Any) -> None:
    for actual, expected in zip(_call(layer), _call(stock), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("moment", ["after", "before", "between"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("own_products")
def test_a_change_is_followed(
    monkeypatch: pytest.MonkeyPatch, name: str, level: str, moment: str
) -> None:
    importlib.reload(followed)  # classes that patch has not seen
    case = CASES[name]
    stock = case.module()
    layer, unchanged = copy.deepcopy(stock), _call(stock)
    if moment != "before":
        fusedops.patch(layer, level=level)
        with counted() as calls:
            _assert_same(layer, stock)
        assert level != "O3" or bool(calls) == case.fused
    with monkeypatch.context() as context:
        for instance in (stock, layer):
            case.change(context, instance)
        if moment != "after":
            fusedops.patch(layer, level=level)
        assert not torch.equal(_call(stock)[0], unchanged[0])
        _assert_same(layer, stock)
    _assert_same(layer, stock)


@pytest.mark.parametrize("name", ["closure", "forward of the base", "method of the base"])
def test_what_no_rule_by_code_reads_yet_is_watched(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Cells of closures and bases: a class that reads them may have a rule in a table."""
    importlib.reload(followed)
    layer = CASES[name].module()
    watched = original_code.watch_list(type(layer))
    assert original_code.replaced(watched) is None
    CASES[name].change(monkeypatch, layer)
    assert original_code.replaced(watched) is not None


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "make",
    [followed.WrittenAttention, followed.TwoValues, followed.AsksForTensors, followed.FilledRows],
)
def test_attention_that_is_written_out_is_left_alone(make: type[nn.Module], level: str) -> None:
    stock = make()
    model = nn.Sequential(copy.deepcopy(stock))
    report = fusedops.patch(model, level=level)
    assert all(entry.name == "0.qkv" for entry in report.replaced)
    model[0].qkv = stock.qkv  # whose product may round differently
    for _ in range(2):
        results = []
        for layer in (model[0], stock):
            torch.manual_seed(1)
            results.append(layer(ROWS))
        assert torch.equal(*results)


@pytest.mark.parametrize("level", LEVELS)
def test_the_type_of_what_attention_returns_is_torchs(level: str) -> None:
    _assert_same(*patched_pair(followed.AsksForOutputs(), level=level))


@pytest.mark.parametrize("level", LEVELS)
def test_dropout_that_is_set_later_drops(level: str) -> None:
    layer = followed.CallingDropout()
    fusedops.patch(layer, level=level)
    expected = layer(ROWS)
    layer.dropout = 0.5
    first, second = layer(ROWS), layer(ROWS)
    assert not torch.allclose(first, second)
    assert_close(layer.eval()(ROWS), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_counters_of_a_file_are_counted(level: str) -> None:
    importlib.reload(followed)
    stock = followed.CountingAttention()
    layer, outputs = copy.deepcopy(stock), []
    fusedops.patch(layer, level=level)
    for module in (layer, stock):
        followed.STEP = followed.CALLS = 0
        first, second = module(ROWS), module(ROWS)
        followed.STEP = 7
        outputs.append(torch.stack([first, second, module(ROWS)]))
        assert (followed.STEP, followed.CALLS) == (8, 3)
    assert_close(*outputs)


def _row(value: Any, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(6, 6, dtype=dtype) if dtype != torch.bool else torch.ones(6, 6, dtype=dtype)
    mask[0], mask[1, 3:] = value, value
    return mask


MASKS = {
    "smallest number": _row(torch.finfo(torch.float32).min, torch.float32),
    "-1e9": _row(-1e9, torch.float32),
    "-10000": _row(-1e4, torch.float32),
    "-inf in part": _row(-torch.inf, torch.float32).index_fill(0, torch.tensor([0]), 0.0),
    "no key": _row(False, torch.bool),
    "-inf": _row(-torch.inf, torch.float32),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_numbers(name: str, level: str) -> None:
    layer, stock = patched_pair(followed.MaskedAttention(), level=level)
    assert_close(layer(ROWS, MASKS[name]), stock(ROWS, MASKS[name]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Qwen2"])
def test_rows_of_padding_are_stocks(name: str, implementation: str, level: str) -> None:
    if implementation == "sdpa":
        needs_sdpa(DENSE[name])
    stock = DENSE[name].model(attn_implementation=implementation).eval()
    model, _ = patched_pair(stock, level=level)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "output_hidden_states": True}
    output, expected = model(IDS, **options), stock(IDS, **options)
    pairs = zip(output.hidden_states, expected.hidden_states, strict=True)
    for actual, wanted in [*pairs, (output.logits, expected.logits)]:
        assert_close(actual, wanted)


class Answering(torch.Tensor):
    """A tensor that answers torch's functions itself: half of what they give, or an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.new_zeros, torch.Tensor.t):
            raise NotImplementedError(f"{func} of a packed weight")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.detach:
            return result.as_subclass(cls)
        return result / 2 if func in ANSWERED else result


ANSWERED = (
    *(functional.layer_norm, functional.rms_norm, functional.gelu, functional.silu),
    *(functional.linear, functional.scaled_dot_product_attention),
    *(torch.Tensor.pow, torch.Tensor.mul),
)


class Dispatching(torch.Tensor):
    """A tensor that is seen by torch's dispatcher only: numbers are halved after products."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    plain: torch.Tensor

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> Dispatching:
        result = torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)
        result.plain = plain
        return result

    def __init__(self, plain: torch.Tensor) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(
            lambda value: value.plain if isinstance(value, cls) else value, (args, kwargs or {})
        )
        result = func(*args, **kwargs)
        if func is torch.ops.aten.detach.default:
            return cls(result)
        return tree_map(
            lambda value: value / 2 if isinstance(value, torch.Tensor) else value, result
        )


SUBCLASSED: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(32),
    "RMSNorm": lambda: nn.RMSNorm(32),
    "norm by code": followed.Norm,
    "norm of Llama": lambda: LlamaRMSNorm(32),
    "norm of T5": lambda: T5LayerNorm(32),
    "GELU": nn.GELU,
    "Linear": lambda: nn.Linear(32, 8),
    "Sequential": lambda: nn.Sequential(nn.Linear(32, 8), nn.SiLU(), nn.Linear(8, 32)),
    "feed-forward": followed.FunctionalFeedForward,
    "gated": lambda: LlamaMLP(DENSE["Llama"].model().config),
    "attention": followed.Attention,
}


def plain(value: torch.Tensor) -> torch.Tensor:
    return value.plain if isinstance(value, Dispatching) else value.as_subclass(torch.Tensor)


@pytest.mark.parametrize("place", ["input", "weight", "parameter"])
@pytest.mark.parametrize("tensor", [Answering, Dispatching], ids=["function", "dispatch"])
@pytest.mark.parametrize("name", SUBCLASSED)
@pytest.mark.usefixtures("own_products")
def test_other_kinds_of_tensors_run_the_original(
    name: str, tensor: Callable[..., torch.Tensor], place: str
) -> None:
    stock, rows = SUBCLASSED[name](), ROWS.clone()
    unchanged = stock(rows).detach()
    model = nn.Sequential(copy.deepcopy(stock))
    fusedops.patch(model, level="O3")

    def other(value: torch.Tensor) -> torch.Tensor:
        return value.as_subclass(Answering) if tensor is Answering else Dispatching(value)

    modules = [] if place == "input" else [*stock.modules(), *model.modules()]
    owners = [each for each in modules if isinstance(getattr(each, "weight", None), nn.Parameter)]
    for module in owners:
        weight = other(module.weight.detach())
        if place == "parameter":
            weight = nn.Parameter(weight, requires_grad=False)
        else:
            del module.weight
        module.weight = weight
    if place == "input":
        rows = other(rows)
    with torch.no_grad():
        try:
            expected = stock(rows)
        except Exception as error:
            with pytest.raises(type(error)):
                model(rows)
            return
        report = fusedops.describe(model)
        for _ in range(2):  # before and after it is patched once more
            actual = model(rows)
            assert type(actual) is type(expected)
            assert_close(plain(actual), plain(expected))
            for entry in report.modules if owners else ():
                assert entry.cls != "Linear" or tensor.__name__ in entry.reason
            report = fusedops.patch(model, level="O3")
    if owners or place == "input":
        assert not torch.allclose(plain(expected), unchanged)


def test_the_configuration_of_attention_is_the_models() -> None:
    model, stock = patched_pair(DENSE["Llama"].model(attn_implementation="sdpa").eval())
    config = model.model.layers[0].self_attn.config
    assert config is model.config and "config" in vars(model.model.layers[0].self_attn)
    for copied in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(copied) is type(stock.config) and copied._attn_implementation == "sdpa"
    for changed in (config, stock.config):
        changed._attn_implementation = "eager"
    output, expected = model(IDS, output_attentions=True), stock(IDS, output_attentions=True)
    assert_close(output.logits, expected.logits)
    assert_close(output.attentions[0], expected.attentions[0])


def test_new_models_and_modules_are_stock() -> None:
    model = DENSE["Llama"].model(attn_implementation="sdpa").eval()
    fusedops.patch(model, level="O3")
    config = model.model.layers[0].self_attn.config
    made, new = LlamaAttention(config, 0), type(model)(config).eval()
    assert not any("fusedops" in type(module).__module__ for module in new.modules())
    fusedops.unpatch(model)
    with counted() as calls:
        made(ROWS, model.model.rotary_emb(ROWS, torch.arange(6)[None]), None)
        new(IDS, labels=IDS)
    assert not calls
    names = [vars(cls).get("__module__", "") for cls in nn.Module.__subclasses__()]
    assert not any(name.startswith("fusedops.integrations.hf.patched") for name in names)


_LOADS = """
import sys, torch
for model, rows, expected in torch.load(sys.argv[1], weights_only=False):
    with torch.no_grad():
        result = lambda: getattr(model(rows), "logits", model(rows))
        torch.testing.assert_close(result(), expected)
        import fusedops
        assert fusedops.counters()
        fusedops.unpatch(model)
        fusedops.reset_counters()
        torch.testing.assert_close(result(), expected)
        assert not fusedops.counters()
"""


def test_saved_models_load_in_another_process(tmp_path: Path) -> None:
    layers = (followed._Underscored(), followed.Norm(), followed.Attention(), nn.LayerNorm(32))
    own, gpt2 = nn.Sequential(*layers).eval(), GPT2.model().eval()
    fusedops.patch(own, level="O3")
    fusedops.patch(gpt2)
    saved = [(own, ROWS, own(ROWS)), (gpt2, IDS, gpt2(IDS).logits)]
    torch.save(saved, tmp_path / "models.pt")
    paths = [str(Path(followed.__file__).parent), *filter(None, sys.path)]
    subprocess.run(
        [sys.executable, "-c", _LOADS, str(tmp_path / "models.pt")],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout=120,
    )


def test_the_report_names_what_is_watched_and_what_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(followed.Norm())
    report = fusedops.patch(model)
    watched = " ".join(map(str, report.watched(model[0])))
    assert all(name in watched for name in ("forward", "_norm", "normed", "eps", "rsqrt"))
    monkeypatch.setattr(followed, "normed", lambda x, eps: 2 * x)
    assert "normed" in fusedops.describe(model)["0"].reason
