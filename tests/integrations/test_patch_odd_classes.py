"""``patch`` takes any class: it is replaced or left alone, with a reason, and never kept alive."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from itertools import count
from types import ModuleType
from typing import Any

import pytest
import torch
from patch_testing import assert_close
from torch import nn

import fusedops
from fusedops.integrations.hf import tables

_numbers = count()


def written(monkeypatch: pytest.MonkeyPatch, source: str) -> Any:
    """Return a module with this code, in a package of its own, which imports torch."""
    package = f"written_{next(_numbers)}"
    for name in (package, f"{package}.layers"):
        module = ModuleType(name)
        module.__package__ = package
        module.__file__ = "written/layers.py"
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules[package])["__path__"] = []
    imports = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
    exec(imports + source, vars(module))
    return module


FEED_FORWARD = """
    def forward(self, x):
        return self.down(F.silu(self.up(x)))
"""


def layer(body: str = FEED_FORWARD, head: str = "nn.Module", before: str = "") -> str:
    """Return the source of a layer with a forward; ``before`` is what stands above its class."""
    return f"""
{before}

class Layer({head}):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
{body}
"""


ATTENDS = "F.scaled_dot_product_attention(x, x, x)"
CODES = {
    "names itself": layer(f"""
    @staticmethod
    def split(x):
        return x

    def forward(self, x):
        assert isinstance(self, Layer)
        return Layer.split(self.down(self.up({ATTENDS})))
"""),
    "two that name one another": layer(
        f"""
    def forward(self, x):
        return x if isinstance(x, Other) else {ATTENDS}
""",
        before=f"""
class Other(nn.Module):
    def forward(self, x):
        return x if isinstance(x, Layer) else {ATTENDS}
""",
    ),
    "keyword of subclasses": layer(
        head='Base, tag="layer"',
        before="""
class Base(nn.Module):
    def __init_subclass__(cls, *, tag):
        super().__init_subclass__()
""",
    ),
    "metaclass": layer(
        head='nn.Module, metaclass=Meta, tag="layer"',
        before="""
class Meta(type):
    def __new__(meta, name, bases, body, *, tag):
        return super().__new__(meta, name, bases, body)
    def __init__(cls, name, bases, body, *, tag):
        super().__init__(name, bases, body)
""",
    ),
    "method made by exec": layer(f"""
    exec("def forward(self, x): return {ATTENDS}", {{"F": F}}, locals())
"""),
    "relative import": layer(
        f"""
    def forward(self, x):
        from .layers import FACTOR
        return FACTOR * {ATTENDS}
""",
        before="FACTOR = 2.0",
    ),
    "forward that is no function": layer(
        "    forward = Forward()",
        before=f"""
class Forward:
    def __call__(self, x):
        return {ATTENDS}
""",
    ),
    "global without a hash": layer(
        """
    def forward(self, x):
        return self.down(F.silu(self.up(ODD(x))))
""",
        before="""
class Odd(list):
    __hash__ = None
    def __call__(self, x):
        return x

ODD = Odd()
""",
    ),
    "class that refuses attributes": layer(
        head="nn.Module, metaclass=Meta",
        before="""
class Meta(type):
    def __setattr__(cls, name, value):
        raise TypeError("frozen")
""",
    ),
    "not importable": layer() + 'Layer.__name__ = "Local"',
    "underscore": layer().replace("Layer", "_Layer") + "Layer = _Layer",
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
    "base": layer(
        head="Base",
        before="""
class Base(nn.Module):
    classes = []
    def __init_subclass__(cls):
        super().__init_subclass__()
        Base.classes.append(cls)
""",
    ),
    "metaclass": layer(
        head="nn.Module, metaclass=Base",
        before="""
class Base(type):
    classes = []
    def __init__(cls, name, bases, body):
        super().__init__(name, bases, body)
        Base.classes.append(cls)
""",
    ),
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
    module = written(monkeypatch, layer())
    for _ in range(2):
        report = fusedops.patch(nn.Sequential(module.Layer()))
        assert report["0"].reason == "its code could not be read: ZeroDivisionError: odd"
    assert len(caplog.records) == 1


def test_code_of_a_later_python_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_NEWEST_PYTHON", (3, 9))
    module = written(monkeypatch, layer())
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
