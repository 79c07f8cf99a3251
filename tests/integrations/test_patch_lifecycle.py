"""What users do to a model beside training it: shapes on the meta device, quantisation."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from patch_testing import assert_close, counted
from torch import nn

import fusedops
from fusedops.integrations import describe

pytest.importorskip("transformers")

from causal_families import DENSE, IDS, SPARSE, Family, loss

FAMILIES = [*DENSE.values(), *SPARSE.values()]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
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


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_quantised_layers_are_called(family: Family) -> None:
    stock = quantised(family.model().eval())
    expected = loss(stock).detach()
    patched = copy.deepcopy(stock)
    report = fusedops.patch(patched)
    with counted() as calls:
        found = loss(patched).detach()
    assert "linear_act" not in calls and "mlp" not in calls and "linear_glu" not in calls
    assert abs(found - expected) <= 1e-3 * expected  # int8 steps
    kept = [entry for entry in report.kept if "Attention" in entry.cls]
    assert all("quantised" in entry.reason for entry in kept)
    assert kept or "attention" in calls  # norms or sinks of its own tell device and dtype


class _Packed(torch.Tensor):
    """A weight as quantisation libraries make them: it knows the linear function and not much."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.new_zeros, torch.Tensor.t):
            raise NotImplementedError(f"{func} of a packed weight")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func is torch.Tensor.detach else result


@pytest.mark.parametrize("order", ["patched first", "packed first"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_packed_weights_are_asked_and_reported(family: Family, order: str) -> None:
    stock = family.model().eval()
    expected = loss(stock).detach()
    if order == "patched first":
        fusedops.patch(stock)
    for module in stock.modules():
        if isinstance(module, nn.Linear):
            weight = nn.Parameter(module.weight.detach().as_subclass(_Packed), requires_grad=False)
            module.weight = weight
    report = fusedops.patch(stock) if order == "packed first" else describe(stock)
    with counted() as calls:
        found = loss(stock).detach()
    assert not {"linear_act", "mlp", "linear_glu"} & calls.keys()
    assert_close(found, expected)
    linears = [entry for entry in report.kept if entry.cls == "Linear"]
    assert linears and all("_Packed" in entry.reason for entry in linears)


def test_quantisation_after_patch_warns() -> None:
    """torch.ao.quantization looks for exact classes: nothing would be quantised, in silence."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    fusedops.patch(model)
    with pytest.warns(UserWarning, match=r"fusedops\.unpatch\(model\)"):
        found = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(found[0]) is type(model[0])
    fusedops.unpatch(found)
    assert type(quantised(found)[0]) is not nn.Linear
