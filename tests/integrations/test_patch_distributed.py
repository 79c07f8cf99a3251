"""A patched model under DistributedDataParallel and fully_shard gets the stock gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from patch_testing import assert_close, counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _ContextParallel
from torch.nn.parallel import DistributedDataParallel

import fusedops
from fusedops.integrations import describe

pytest.importorskip("transformers")

from causal_families import DENSE
from test_patch_gpt2 import IDS, gpt2, loss
from transformers.models.gpt2.modeling_gpt2 import GPT2Block


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _expected() -> dict[str, torch.Tensor]:
    stock = gpt2()
    loss(stock).backward()
    return {name: parameter.grad for name, parameter in stock.named_parameters()}


def _patched() -> nn.Module:
    model = gpt2()
    fusedops.patch(model)
    return model


@pytest.mark.usefixtures("one_process")
@pytest.mark.usefixtures("own_products")
def test_distributed_data_parallel() -> None:
    model = _patched()
    wrapped = DistributedDataParallel(model)
    with counted() as calls:
        wrapped(IDS, labels=IDS).loss.backward()
    assert calls["mlp_backward"] == 2 and calls["cross_entropy_backward"] == 1
    for name, expected in _expected().items():
        assert_close(model.get_parameter(name).grad, expected)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("inner", ["blocks", "mlps"])
@pytest.mark.usefixtures("own_products")
def test_fully_shard(inner: str) -> None:
    model = _patched()
    mesh = init_device_mesh("cpu", (1,))
    for block in model.transformer.h:
        assert isinstance(block, GPT2Block)
        fully_shard(block if inner == "blocks" else block.mlp.c_fc, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with counted() as calls:
        loss(model).backward()
    assert calls["mlp_backward"] == (2 if inner == "blocks" else 0)
    assert calls["cross_entropy_backward"] == 1
    for name, expected in _expected().items():
        assert_close(copy.copy(model.get_parameter(name).grad).full_tensor(), expected)


@pytest.mark.usefixtures("one_process")
def test_unpatch_under_fully_shard_says_what_to_do() -> None:
    model = _patched()
    fully_shard(model.transformer.h[0], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(fusedops.UnsupportedError, match=r"transformer\.h\.0 is a FSDPGPT2Block"):
        fusedops.unpatch(model)


@pytest.mark.usefixtures("one_process")
def test_context_parallelism_sees_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exchanges, which have no kernel on a CPU, are left out: that they are called counts."""
    seen = []

    def enter(module: None, args: tuple, kwargs: dict, mesh: object) -> tuple[tuple, dict]:
        seen.append(mesh)
        return args, kwargs

    monkeypatch.setattr(_ContextParallel, "sdpa_input_fn", staticmethod(enter))
    monkeypatch.setattr(
        _ContextParallel,
        "sdpa_output_fn",
        staticmethod(lambda *args: args[2]),
    )
    model = DENSE["Llama"].model(attn_implementation="sdpa")
    fusedops.patch(model)
    expected = model(IDS).logits
    mesh = init_device_mesh("cpu", (1,))
    with counted() as calls, context_parallel(mesh, buffers=[IDS.clone()], buffer_seq_dims=[1]):
        found = model(IDS).logits
        entry = describe(model)["model.layers.0.self_attn"]
    assert seen == [mesh, mesh] and "attention" not in calls
    assert "F.scaled_dot_product_attention was replaced by torch.distributed" in entry.reason
    assert_close(found, expected)
    with counted() as calls:
        model(IDS)
    assert calls["attention"] == 2
