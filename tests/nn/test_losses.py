"""The loss modules: torch's arguments and results; the head's loss under fully_shard."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import assert_close
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import fusedops
from fusedops.testing import threads

WORLD, DEPTH = 2, 37 * 8


def ops_run() -> set[str]:
    return {op for op, _ in fusedops.counters()}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(5, 7), (7,)])
def test_class_indices_run_the_fused_op(shape: tuple[int, ...], reduction: str) -> None:
    logits, target = torch.randn(shape), torch.randint(0, 7, shape[:-1])
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1, "ignore_index": 3}
    fusedops.reset_counters()
    ours = fusedops.nn.CrossEntropyLoss(**options)(logits, target)
    assert ops_run() == {"cross_entropy"}
    torch.testing.assert_close(ours, nn.CrossEntropyLoss(**options)(logits, target))


@pytest.mark.parametrize("case", ["weight", "probabilities", "three_dims"])
def test_what_the_op_does_not_offer_is_torchs_result(case: str) -> None:
    shape = (4, 7, 3) if case == "three_dims" else (4, 7)
    logits, target = torch.randn(shape), torch.randint(0, 7, (shape[0], *shape[2:]))
    options = {"weight": torch.rand(7)} if case == "weight" else {}
    if case == "probabilities":
        target = torch.rand(shape).softmax(-1)
    fusedops.reset_counters()
    ours = fusedops.nn.CrossEntropyLoss(**options)(logits, target)
    assert not ops_run()
    assert torch.equal(ours, nn.CrossEntropyLoss(**options)(logits, target))


def test_what_neither_offers_is_an_error() -> None:
    with pytest.raises(ValueError, match="CrossEntropyLoss: weight must be None with z_loss"):
        fusedops.nn.CrossEntropyLoss(torch.rand(7), z_loss=1e-4)
    loss = fusedops.nn.CrossEntropyLoss(softcap=5.0)
    with pytest.raises(ValueError, match="CrossEntropyLoss: input must be"):
        loss(torch.randn(2, 7, 3), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="reduction"):
        fusedops.nn.LinearCrossEntropyLoss(4, 8, reduction="average")


def test_deprecated_arguments_mean_what_torchs_mean() -> None:
    logits, target = torch.randn(5, 7), torch.randint(0, 7, (5,))
    with pytest.warns(UserWarning, match="size_average"):
        ours = fusedops.nn.CrossEntropyLoss(size_average=False)
    assert ours.reduction == "sum"
    torch.testing.assert_close(
        ours(logits, target), F.cross_entropy(logits, target, reduction="sum")
    )


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layers_checkpoint_fits_the_head(bias: bool) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(6, 11, bias=bias)
    torch.manual_seed(3)
    head = fusedops.nn.LinearCrossEntropyLoss(6, 11, bias=bias, softcap=2.0)
    for name, value in linear.state_dict().items():
        assert torch.equal(head.state_dict()[name], value)
    head.load_state_dict(linear.state_dict())
    hidden, target = torch.randn(2, 3, 6), torch.randint(0, 11, (2, 3))
    logits = head.logits(hidden)
    assert torch.equal(logits, 2.0 * torch.tanh(linear(hidden) / 2.0))
    torch.testing.assert_close(
        head(hidden, target), F.cross_entropy(logits.flatten(0, 1), target.flatten())
    )


def test_a_tied_weight_gets_both_gradients() -> None:
    embedding = nn.Embedding(11, 6)
    head = fusedops.nn.LinearCrossEntropyLoss(6, 11)
    head.weight = embedding.weight
    ids = torch.randint(0, 11, (4,))
    head(embedding(ids), ids).backward()
    got, embedding.weight.grad = embedding.weight.grad, None
    F.cross_entropy(F.linear(embedding(ids), embedding.weight), ids).backward()
    torch.testing.assert_close(got, embedding.weight.grad)


class Model(nn.Module):
    """An embedding, a layer, and the head with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 8)
        self.layer = nn.Linear(8, 8)
        self.head = fusedops.nn.LinearCrossEntropyLoss(
            8, 37, bias=True, chunk_size=16, label_smoothing=0.1, z_loss=1e-3
        )

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(ids))), target)


@pytest.mark.distributed
def test_the_heads_loss_under_fully_shard_equals_one_process() -> None:
    torch.manual_seed(0)
    single = Model()
    exact = copy.deepcopy(single).double()
    ids, target = torch.randint(0, 37, (WORLD, 6)), torch.randint(0, 37, (WORLD, 6))
    target[:, 2] = -100  # as many on each rank: the mean of the means is the mean
    hidden = torch.randn(3, 8)
    for each in (single, exact):
        each(ids, target).backward()

    def on_rank(rank: int) -> None:
        model, mesh = copy.deepcopy(single), init_device_mesh("cpu", (WORLD,))
        fully_shard(model.head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model.head, "logits")
        for _ in range(2):  # the second pass finds the weight resharded
            model.zero_grad()
            loss = model(ids[rank], target[rank])
            loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        assert_close(mean / WORLD, exact(ids, target), single(ids, target), depth=DEPTH)
        for name, parameter in model.named_parameters():
            stock, truth = single.get_parameter(name), exact.get_parameter(name)
            assert_close(parameter.grad.full_tensor(), truth.grad, stock.grad, name, DEPTH)
        logits = exact.head.logits(hidden.double()), single.head.logits(hidden)
        assert_close(model.head.logits(hidden), *logits, depth=DEPTH)

    threads.run(on_rank, WORLD)
