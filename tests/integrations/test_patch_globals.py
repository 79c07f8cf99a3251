"""What a patched module's code reads may change after ``patch``, and the module follows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from patch_testing import assert_close, counted
from torch import nn
from written_modules import written

import fusedops


class Case(NamedTuple):
    """A module, and a change of what it reads."""

    source: str
    change: Callable[[Any], object]


def assigned(name: str, value: Any) -> Callable[[Any], object]:
    return lambda module: setattr(module, name, value)


NORM = """
def normed(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
"""
CHAIN = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
"""
LOSS = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 16)
"""
ATTENTION = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
    def heads(self, x):
        return self.qkv(x).chunk(3, -1)
"""

CASES = {
    "number": Case(
        f"""
EPS = 1e-6
{NORM}
    def forward(self, x):
        return self.weight * normed(x.float(), EPS).to(x.dtype)
""",
        assigned("EPS", 1.0),
    ),
    "number of a helper": Case(
        f"""
{NORM}
    def _norm(self, x):
        return shared(x)
    def forward(self, x):
        return self.weight * self._norm(x.float()).to(x.dtype)

EPS = 1e-6
def shared(x):
    return normed(x, EPS)
""",
        assigned("EPS", 1.0),
    ),
    "helper of a helper": Case(
        f"""
{NORM}
    def forward(self, x):
        return self.weight * shared(x.float()).to(x.dtype)

def shared(x):
    return normed(x, 1e-6)
""",
        assigned("normed", lambda x, eps: 2 * x),
    ),
    "method": Case(
        f"""
{NORM}
    def _norm(self, x):
        return normed(x, 1e-6)
    def forward(self, x):
        return self.weight * self._norm(x.float()).to(x.dtype)
""",
        lambda module: setattr(module.Layer, "_norm", lambda self, x: 2 * x),
    ),
    "default": Case(
        f"""
{NORM}
    def _norm(self, x, eps=1e-6):
        return normed(x, eps)
    def forward(self, x):
        return self.weight * self._norm(x.float()).to(x.dtype)
""",
        lambda module: setattr(module.Layer._norm, "__defaults__", (1.0,)),
    ),
    "code": Case(
        f"""
{NORM}
    def forward(self, x):
        return self.weight * normed(x.float(), 1e-6).to(x.dtype)
""",
        lambda module: setattr(module.Layer.forward, "__code__", (lambda self, x: 2 * x).__code__),
    ),
    "flag": Case(
        f"""
DOUBLED = False
{CHAIN}
    def forward(self, x):
        if DOUBLED:
            x = x * x
        return self.down(F.silu(self.up(x)))
""",
        assigned("DOUBLED", True),
    ),
    "word": Case(
        f"""
APPROXIMATE = "none"
{CHAIN}
    def forward(self, x):
        return self.down(F.gelu(self.up(4 * x), approximate=APPROXIMATE))
""",
        assigned("APPROXIMATE", "tanh"),
    ),
    "torch's functions": Case(
        f"""
del F
import torch.nn.functional as nnf
{CHAIN}
    def forward(self, x):
        return self.down(nnf.silu(self.up(x)))
""",
        lambda module: setattr(module.nnf, "silu", torch.relu),
    ),
    "label smoothing": Case(
        f"""
SMOOTHING = 0.0
{LOSS}
    def forward(self, x):
        labels = torch.arange(x.size(0))
        return F.cross_entropy(self.head(x[:, 0]), labels, label_smoothing=SMOOTHING)
""",
        assigned("SMOOTHING", 0.5),
    ),
    "factor of a loss": Case(
        f"""
SCALE = 1.0
{LOSS}
    def forward(self, x):
        return SCALE * nn.CrossEntropyLoss()(self.head(x[:, 0]), torch.arange(x.size(0)))
""",
        assigned("SCALE", 3.0),
    ),
    "causal": Case(
        f"""
CAUSAL = True
{ATTENTION}
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.heads(x), is_causal=CAUSAL)
""",
        assigned("CAUSAL", False),
    ),
    "table": Case(
        f"""
TABLE = torch.ones(8)
{ATTENTION}
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.heads(x * TABLE))
""",
        assigned("TABLE", torch.linspace(0, 1, 8)),
    ),
    "default of attention": Case(
        f"""
{ATTENTION}
    def forward(self, x, causal=False):
        return F.scaled_dot_product_attention(*self.heads(x), is_causal=causal)
""",
        lambda module: setattr(module.Layer.forward, "__defaults__", (True,)),
    ),
    "counter": Case(
        f"""
STEP = 0
{ATTENTION}
    def forward(self, x):
        global STEP
        STEP += 1
        return F.scaled_dot_product_attention(*self.heads(x * STEP))
""",
        assigned("STEP", 7),
    ),
    "counter of a helper": Case(
        f"""
STEP = 0
def advance():
    global STEP
    STEP += 1
{ATTENTION}
    def forward(self, x):
        advance()
        return F.scaled_dot_product_attention(*self.heads(x * STEP))
""",
        assigned("STEP", 7),
    ),
    "file": Case(
        f"""
{ATTENTION}
    def forward(self, x):
        return len(__file__) * F.scaled_dot_product_attention(*self.heads(x))
""",
        assigned("__file__", "another"),
    ),
    "import": Case(
        f"""
FACTOR = 1.0
{ATTENTION}
    def forward(self, x):
        from .layers import FACTOR
        return F.scaled_dot_product_attention(*self.heads(FACTOR * x))
""",
        assigned("FACTOR", 2.0),
    ),
    "written out": Case(
        f"""
SCALE = 1.0
{ATTENTION}
    def forward(self, x):
        query, key, value = self.heads(x)
        scores = torch.matmul(query, key.transpose(-1, -2)) * SCALE
        return torch.matmul(torch.softmax(scores, -1), value)
""",
        assigned("SCALE", 3.0),
    ),
    "softmax of torch": Case(
        f"""
{ATTENTION}
    def forward(self, x):
        query, key, value = self.heads(x)
        scores = torch.matmul(query, key.transpose(-1, -2))
        return torch.matmul(torch.softmax(scores, -1), value)
""",
        lambda module: setattr(torch, "softmax", lambda scores, dim: scores / 8),
    ),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("own_products")
def test_a_patched_module_follows_what_it_reads(
    monkeypatch: pytest.MonkeyPatch, name: str, level: str
) -> None:
    for owner, attribute in ((nn.functional, "silu"), (torch, "softmax")):
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # put back at last
    runs = []
    torch.manual_seed(0)
    rows = torch.randn(2, 4, 8)
    for patches in (False, True):
        torch.manual_seed(1)
        with monkeypatch.context() as context:
            context.setattr(nn.functional, "silu", nn.functional.silu)
            context.setattr(torch, "softmax", torch.softmax)
            module = written(context, CASES[name].source)
            layer = module.Layer()
            later = copy.deepcopy(layer)
            if patches:
                fusedops.patch(layer, level=level)
            with counted() as calls:
                results = [layer(rows), layer(rows)]
            assert not patches or level != "O3" or calls
            CASES[name].change(module)
            results += [layer(rows), layer(rows)]
            if patches:
                fusedops.patch(later, level=level)
            runs.append([*results, later(rows)])
    for patched, stock in zip(*reversed(runs), strict=True):
        assert_close(patched, stock)
    assert not torch.equal(runs[0][1], runs[0][2])
