"""The published forms of the router's losses, and the loss of a batch that several ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import assert_close

from fusedops import moe_route, moe_router_loss

WORLD = 2


def test_uniform_routing_gives_one() -> None:
    """The source system's factor is 0.05: uniform top-1 routing gives exactly that."""
    logits = torch.zeros(64, 8)
    ids = torch.arange(64)[:, None] % 8
    assert moe_router_loss(logits, ids, form="squared").item() == 1.0
    assert moe_router_loss(logits, ids).item() == 1.0
    factor = torch.tensor(0.05)
    assert moe_router_loss(logits, ids, form="squared", balance=0.05) == factor


def test_squared_is_the_mean_over_experts_times_their_number_squared() -> None:
    torch.manual_seed(1)
    logits = torch.randn(60, 6)
    plan = moe_route(logits, 1, capacity_factor=0.5)  # before dropping
    hot = torch.nn.functional.one_hot(plan.expert_ids[:, 0].long(), 6).double()
    means = logits.double().softmax(-1).mean(0)
    want = 36 * (hot.mean(0) * means).mean()
    got = moe_router_loss(logits, plan, form="squared")
    assert_close(got, want, want.float(), "loss", 60)


@pytest.mark.parametrize("masked", [False, True])
def test_transformers_loss_is_the_squared_form(masked: bool) -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    torch.manual_seed(2)
    logits = torch.randn(4 * 10, 8, requires_grad=True)
    attention_mask = torch.ones(4, 10)
    if masked:
        attention_mask[1, 6:] = 0
        attention_mask[3, :5] = 0
    theirs = modeling.load_balancing_loss_func((logits,), 8, 2, attention_mask)
    plan = moe_route(logits, 2, normalize=True)
    mask = attention_mask.reshape(-1).bool() if masked else None
    ours = moe_router_loss(logits, plan, form="squared", mask=mask)
    wide = logits.detach().double().requires_grad_()
    exact = moe_router_loss(wide, plan, form="squared", mask=mask)
    assert_close(ours.detach(), exact.detach(), theirs.detach(), "loss", 40)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    (truth,) = torch.autograd.grad(exact, wide)
    assert_close(grads[0], truth, grads[1], "gradient", 40)


def _group_worker(rank: int) -> None:
    torch.manual_seed(3)
    logits = torch.randn(50, 6, dtype=torch.float64, requires_grad=True)
    plan = moe_route(logits, 2)
    whole = moe_router_loss(logits, plan, balance=0.7, z=0.1)
    (want,) = torch.autograd.grad(whole, logits)
    mine = slice(0, 20) if rank == 0 else slice(20, 50)  # ranks hold unequal parts
    part = logits.detach()[mine].requires_grad_()
    ids = plan.expert_ids[mine]
    for function in (moe_router_loss, torch.compile(moe_router_loss, backend="aot_eager")):
        loss = function(part, ids, balance=0.7, z=0.1, group=dist.group.WORLD)
        (grad,) = torch.autograd.grad(loss, part)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= WORLD
        assert_close(mean, whole.detach(), whole.detach(), "mean over ranks", 50)
        assert_close(grad / WORLD, want[mine], want[mine], "gradient", 50)
    alone = moe_router_loss(part, balance=0.0, z=0.1, group=dist.group.WORLD).detach()
    dist.all_reduce(alone)
    z_loss = moe_router_loss(logits, balance=0.0, z=0.1).detach()
    assert_close(alone / WORLD, z_loss, z_loss, "z-loss", 50)


@pytest.mark.distributed
def test_over_a_group_it_is_the_loss_of_the_whole_batch(on_new_world: Callable[..., Any]) -> None:
    on_new_world(_group_worker)


def _sharded_worker(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(4)
    logits = torch.randn(30, 6)
    rule = ("softmax", False, 1.0, 1, 1, "max", 0.0, -1, "position")
    weights, grad = torch.rand(1, 6), torch.randn(30, 2)
    plain = logits.clone().requires_grad_()
    probs, ids, _ = torch.ops.fusedops.moe_route(plain, None, None, None, None, 2, *rule)
    loss = torch.ops.fusedops.moe_router_loss(plain, weights, None, None, "softmax")
    want = torch.autograd.grad([probs, loss], plain, [grad, torch.ones(())])

    placed = distribute_tensor(logits, mesh, [Shard(0)]).requires_grad_()
    placed_weights = distribute_tensor(weights, mesh, [Replicate()])
    ones = distribute_tensor(torch.ones(()), mesh, [Replicate()])
    placed_grad = distribute_tensor(grad, mesh, [Shard(0)])
    with CommDebugMode() as communication:
        p, i, _ = torch.ops.fusedops.moe_route(placed, None, None, None, None, 2, *rule)
        value = torch.ops.fusedops.moe_router_loss(placed, placed_weights, None, None, "softmax")
        assert p.placements == i.placements == (Shard(0),) and value.placements == (Partial(),)
        (first,) = torch.autograd.grad(p, placed, placed_grad)
        (second,) = torch.autograd.grad(value, placed, ones)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    assert torch.equal(i.full_tensor(), ids) and torch.equal(p.full_tensor(), probs)
    assert_close(value.full_tensor().detach(), loss.detach().double(), loss.detach(), "loss", 30)
    got = (first + second).full_tensor()
    assert_close(got, want[0].double(), want[0], "gradient", 30)


@pytest.mark.distributed
def test_sharded_tokens_are_routed_where_they_are(on_new_world: Callable[..., Any]) -> None:
    on_new_world(_sharded_worker)
