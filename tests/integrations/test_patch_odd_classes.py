"""``patch`` takes any class: it is replaced or left alone, with a reason, and never kept alive."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch
from patch_testing import assert_close
from torch import nn
from written_modules import written

import fusedops
from fusedops.integrations.hf import tables

_LAYER = """
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
"""
_ATTENDS = "F.scaled_dot_product_attention(x, x, x)"
FEED_FORWARD = f"""{_LAYER}
    def forward(self, x):
        return self.down(F.silu(self.up(x)))
"""

CODES = {
    "names itself": f"""
class Layer(nn.Module):
    {_LAYER}
    @staticmethod
    def split(x):
        return x
    def forward(self, x):
        assert isinstance(self, Layer)
        return Layer.split(self.down(self.up({_ATTENDS})))
""",
    "super of itself": f"""
class Layer(nn.Module):
    {_LAYER}
    def extra_repr(self):
        return super(Layer, self).extra_repr()
    def forward(self, x):
        super(Layer, self).extra_repr()
        return {_ATTENDS}
""",
    "two that name one another": f"""
class Other(nn.Module):
    def forward(self, x):
        return x if isinstance(x, Layer) else {_ATTENDS}

class Layer(nn.Module):
    {_LAYER}
    def forward(self, x):
        return x if isinstance(x, Other) else {_ATTENDS}
""",
    "keyword of subclasses": f"""
class Base(nn.Module):
    def __init_subclass__(cls, *, tag):
        super().__init_subclass__()

class Layer(Base, tag="layer"):
    {FEED_FORWARD}
""",
    "metaclass": f"""
class Meta(type):
    def __new__(meta, name, bases, body, *, tag):
        return super().__new__(meta, name, bases, body)
    def __init__(cls, name, bases, body, *, tag):
        super().__init__(name, bases, body)

class Layer(nn.Module, metaclass=Meta, tag="layer"):
    {FEED_FORWARD}
""",
    "method made by exec": f"""
class Layer(nn.Module):
    {_LAYER}
    exec("def forward(self, x): return {_ATTENDS}", {{"F": F}}, locals())
""",
    "relative import": f"""
FACTOR = 2.0
class Layer(nn.Module):
    {_LAYER}
    def forward(self, x):
        from .layers import FACTOR
        return FACTOR * {_ATTENDS}
""",
    "forward that is no function": f"""
import functools

class Forward:
    def __call__(self, x):
        return {_ATTENDS}

class Layer(nn.Module):
    {_LAYER}
    forward = Forward()
""",
    "global without a hash": f"""
class Odd(list):
    __hash__ = None
    def __call__(self, x):
        return x

ODD = Odd()
class Layer(nn.Module):
    {_LAYER}
    def forward(self, x):
        return self.down(F.silu(self.up(ODD(x))))
""",
    "class that refuses attributes": f"""
class Meta(type):
    def __setattr__(cls, name, value):
        raise TypeError("frozen")

class Layer(nn.Module, metaclass=Meta):
    {FEED_FORWARD}
""",
    "not importable": f"""
class Layer(nn.Module):
    {FEED_FORWARD}

Layer.__name__ = "Local"
""",
    "underscore": f"""
class _Layer(nn.Module):
    {FEED_FORWARD}

Layer = _Layer
""",
}


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", CODES)
def test_a_class_is_replaced_or_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, level: str
) -> None:
    module = written(monkeypatch, CODES[name])
    stock = nn.Sequential(module.Layer())
    rows = torch.linspace(-1, 1, 64).view(2, 4, 8)
    model = copy.deepcopy(stock)
    fusedops.patch(model, level=level)
    assert_close(model(rows), stock(rows))
    if name != "not importable":  # pickling is by the name of the class
        assert_close(pickle.loads(pickle.dumps(model))(rows), stock(rows))


REGISTRIES = {
    "base": f"""
class Base(nn.Module):
    classes = []
    def __init_subclass__(cls):
        super().__init_subclass__()
        Base.classes.append(cls)

class Layer(Base):
    {FEED_FORWARD}
""",
    "metaclass": f"""
class Base(type):
    classes = []
    def __init__(cls, name, bases, body):
        super().__init__(name, bases, body)
        Base.classes.append(cls)

class Layer(nn.Module, metaclass=Base):
    {FEED_FORWARD}
""",
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_a_registry_of_classes_does_not_see_the_patched_one(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = written(monkeypatch, REGISTRIES[name])
    model = nn.Sequential(module.Layer())
    stock, rows = copy.deepcopy(model), torch.randn(5, 8)
    report = fusedops.patch(model)
    assert report["0"].replaced == (name == "base") and isinstance(model[0], module.Layer)
    assert name == "base" or report["0"].reason.startswith("Base acts for each class that")
    assert module.Base.classes == [module.Layer]
    assert_close(model(rows), stock(rows))


def test_an_error_while_a_class_is_read_is_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(cls: type) -> None:
        raise ZeroDivisionError("odd")

    by_code = sys.modules["fusedops.integrations.hf.rules.by_code"]
    monkeypatch.setattr(by_code, "rule_by_code", fails)
    module = written(monkeypatch, f"class Layer(nn.Module):\n    {FEED_FORWARD}")
    for _ in range(2):
        report = fusedops.patch(nn.Sequential(module.Layer()))
        assert report["0"].reason == "its code could not be read: ZeroDivisionError: odd"
    assert len(caplog.records) == 1


def test_code_of_a_later_python_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_NEWEST_PYTHON", (3, 9))
    module = written(monkeypatch, f"class Layer(nn.Module):\n    {FEED_FORWARD}")
    report = fusedops.patch(nn.Sequential(module.Layer()))
    assert report["0"].reason == "its code is that of a later Python than the rules know"


@pytest.mark.parametrize("unpatches", [True, False], ids=["unpatched", "deleted"])
@pytest.mark.parametrize("name", CODES)
def test_a_class_is_collected(
    monkeypatch: pytest.MonkeyPatch, name: str, *, unpatches: bool
) -> None:
    with monkeypatch.context() as context:
        cls = written(context, CODES[name]).Layer
        model = nn.Sequential(cls())
        fusedops.patch(model, level="O3")
        model(torch.zeros(2, 4, 8))
        if unpatches:
            fusedops.unpatch(model)
    alive = weakref.ref(cls)
    del model, cls
    gc.collect()
    assert alive() is None
