"""What no kernel serves runs the original: transforms, meta tensors, quantised layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import DENSE, IDS, SPARSE, Family, loss
from patch_testing import assert_close, counted, patched_pair
from torch import nn
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fusedops

Call = Callable[[torch.Tensor], torch.Tensor]

MODULES: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "GELU": nn.GELU,
    "Linear": lambda: nn.Linear(8, 8),
    "Sequential of two": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
    "Sequential of three": lambda: nn.Sequential(nn.Linear(8, 6), nn.SiLU(), nn.Linear(6, 8)),
}


def _dual(call: Call, rows: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        output = call(forward_ad.make_dual(rows, torch.ones_like(rows)))
        return forward_ad.unpack_dual(output).tangent


def _squares(call: Call) -> Call:
    return lambda rows: call(rows).square().sum()


def _nested(layout: torch.layout) -> Callable[[Call, torch.Tensor], torch.Tensor]:
    def call_nested(call: Call, rows: torch.Tensor) -> torch.Tensor:
        parts = [rows[:3].clone().requires_grad_(), rows[3:].clone().requires_grad_()]
        outputs = call(torch.nested.as_nested_tensor(parts, layout=layout)).unbind()
        torch.cat([*outputs]).square().sum().backward()
        return torch.cat([*outputs, *(part.grad for part in parts if part.grad is not None)])

    return call_nested


class Derived(torch.Tensor):
    """A plain subclass."""


# What runs the original.
ORIGINAL: dict[str, Callable[[Call, torch.Tensor], torch.Tensor]] = {
    "jvp": lambda call, rows: jvp(call, (rows,), (torch.ones_like(rows),))[1],
    "dual level": _dual,
    "jacfwd": lambda call, rows: jacfwd(call)(rows),
    "hessian": lambda call, rows: hessian(_squares(call))(rows),
    "vmap": lambda call, rows: vmap(call)(rows.unsqueeze(1)),
    "vmap of grad": lambda call, rows: vmap(grad(_squares(call)))(rows.unsqueeze(1)),
    "jagged": _nested(torch.jagged),
    "nested": _nested(torch.strided),
    "sparse": lambda call, rows: call(rows.to_sparse()),
    "mkldnn": lambda call, rows: call(rows.to_mkldnn()).to_dense(),
    "quantised": lambda call, rows: call(
        torch.quantize_per_tensor(rows, 0.1, 0, torch.quint8)
    ).dequantize(),
    "subclass": lambda call, rows: call(rows.as_subclass(Derived)).as_subclass(torch.Tensor),
}


# What the fused ops serve.
FUSED: dict[str, Callable[[Call, torch.Tensor], torch.Tensor]] = {
    "grad": lambda call, rows: grad(_squares(call))(rows),
    "functionalize": lambda call, rows: functionalize(call)(rows),
    "make_fx": lambda call, rows: make_fx(call)(rows)(rows),
}


@pytest.mark.filterwarnings("ignore")  # prototypes of torch, of which it warns
@pytest.mark.parametrize("kind", [*ORIGINAL, *FUSED])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.usefixtures("own_products")
def test_torch_modules_do_what_the_stock_ones_do(make: Callable[[], nn.Module], kind: str) -> None:
    torch.manual_seed(0)
    run, rows = (ORIGINAL | FUSED)[kind], torch.randn(4, 8)
    model, stock = patched_pair(make())
    try:
        expected = run(stock, rows)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        pytest.skip(f"torch's own does not either: {str(error)[:60]}")
    with counted() as calls:
        found = run(model, rows)
    assert_close(found, expected)
    assert found.dtype == expected.dtype
    if kind != "sparse":  # of which a product is dense: what follows it is fused
        assert bool(calls) == (kind in FUSED)


@pytest.mark.parametrize("make", [lambda: nn.RMSNorm(8, dtype=torch.complex64), nn.GELU])
def test_complex_numbers_run_the_original(make: Callable[[], nn.Module]) -> None:
    rows = torch.randn(4, 8, dtype=torch.complex64)
    model, stock = patched_pair(make())

    def outcome(module: nn.Module) -> Any:
        try:
            return module(rows)
        except RuntimeError as error:
            return str(error)

    found, expected = outcome(model), outcome(stock)
    assert found == expected if isinstance(expected, str) else torch.equal(found, expected)


@pytest.mark.parametrize("transform", ["jvp", "vmap", "grad"])
def test_compiled_transforms(transform: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
    rows = torch.randn(4, 8)
    run = (ORIGINAL | FUSED)[transform]
    expected = run(model, rows)
    fusedops.patch(model)
    compiled = torch.compile(lambda x: run(model, x), fullgraph=True, backend="eager")
    assert_close(compiled(rows), expected)


@pytest.mark.filterwarnings("ignore")  # of batching rules that torch lacks
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["vmap of grad", "vmap"])
def test_experts_run_the_original_per_sample(kind: str, experts: str) -> None:
    model, stock = (
        model.eval() for model in SPARSE["Mixtral"].pair(experts_implementation=experts)
    )
    rows = torch.randn(2, 5, 32)
    run = ORIGINAL[kind]

    def call(module: nn.Module) -> Call:
        return lambda embeds: module(inputs_embeds=embeds, use_cache=False).logits

    with counted() as calls:
        found = run(call(model), rows)
    assert_close(found, run(call(stock), rows))
    assert not calls


FAMILIES = [*DENSE.values(), *SPARSE.values()]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@each_family
def test_shapes_on_the_meta_device(family: Family) -> None:
    if family.name == "OPT":
        pytest.skip("stock OPT asks its mask for a number, which meta tensors do not have")
    patched, _ = family.pair()
    ids = IDS.to("meta")
    with counted() as calls:
        output = patched.to("meta")(ids, labels=ids)
    assert output.logits.shape == (*IDS.shape, 97) and output.logits.dtype == torch.float32
    assert output.loss.shape == () and output.loss.device.type == "meta"
    assert not calls


def quantised(model: nn.Module) -> nn.Module:
    """Return the model with every linear layer in int8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@each_family
def test_quantised_layers_are_called(family: Family) -> None:
    stock = quantised(family.model().eval())
    expected = loss(stock).detach()
    patched = copy.deepcopy(stock)
    report = fusedops.patch(patched)
    with counted() as calls:
        result = loss(patched).detach()
    assert "linear_act" not in calls and "mlp" not in calls and "linear_glu" not in calls
    assert abs(result - expected) <= 1e-3 * expected  # int8 steps
    kept = [entry for entry in report.kept if "Attention" in entry.cls]
    assert all("quantised" in entry.reason for entry in kept)
    assert kept or "attention" in calls  # norms or sinks of its own tell device and dtype


def test_quantisation_after_patch_warns() -> None:
    """torch.ao.quantization looks for exact classes: nothing would be quantised, in silence."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    fusedops.patch(model)
    with pytest.warns(UserWarning, match=r"fusedops\.unpatch\(model\)"):
        result = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(result[0]) is type(model[0])
    fusedops.unpatch(result)
    assert type(quantised(result)[0]) is not nn.Linear
