"""A small language model, its parallel forms (tensor, sequence, data), and bugs to plant in them.

Written by hand on torch.distributed and nothing of fusedops' own stack: what ``verify`` finds here
it finds in the code of others. Shapes: B sequences, S tokens, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedops.testing import Case, Parallel

VOCAB, HIDDEN, LAYERS = 32, 16, 2


class Layout(SimpleNamespace):
    """How this process' part lies in the whole; the model's modules share one."""


class Dropout(nn.Module):
    """Draws for the whole batch, and takes the part of this process."""

    def __init__(self, p: float, layout: Layout) -> None:
        super().__init__()
        self.p, self.layout = p, layout

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        if not self.p:
            return x_BSH
        B, S, H = x_BSH.shape
        rows, row, tokens, token = self.layout.dropout
        kept = torch.rand(rows * B, tokens * S, H) >= self.p
        return x_BSH * kept[row * B : (row + 1) * B, token * S : (token + 1) * S] / (1 - self.p)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(HIDDEN) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), local(self.weight), 1e-5)


class Layer(nn.Module):
    def __init__(self, layout: Layout, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = Norm(), Dropout(dropout, layout)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        return x_BSH + self.dropout(self.down(F.gelu(self.up(self.norm(x_BSH)))))


class LanguageModel(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.layout = Layout(
            dropout=(1, 0, 1, 0),
            enter=lambda x: x,
            leave=lambda x: x,
            recompute=None,
            total=torch.sum,
        )
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(self.layout, dropout) for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[Any, Any]:
        x_BSH = self.layout.enter(self.tokens(tokens))
        for layer in self.layers:
            if self.layout.recompute is None:
                x_BSH = layer(x_BSH)
            else:
                x_BSH = checkpoint(layer, x_BSH, use_reentrant=False, **self.layout.recompute)
        logits = self.head(self.layout.leave(self.norm(x_BSH))).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
        return self.layout.total(losses), (labels != -100).sum()


def plain() -> nn.Module:
    return LanguageModel()


def with_dropout() -> nn.Module:
    return LanguageModel(dropout=0.3)


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Communicate(torch.autograd.Function):
    """One communication forward, and another backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Any, backward: Any) -> torch.Tensor:
        ctx.backward_of = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.backward_of(grad.contiguous()), None, None


def communication(forward: Any, backward: Any) -> Any:
    return lambda x: Communicate.apply(x, forward, backward)


class Group:
    """The communications of one axis of a mesh, with one bug or none."""

    def __init__(self, mesh: DeviceMesh, bug: str) -> None:
        self.group, self.size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.early = bug == "read early"

    def same(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        sent = x.clone()
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        if self.early:
            sent = sent * 1
        work.wait()
        return sent

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, 1)

    def part(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        if x.shape[dim] % self.size:
            raise ValueError(f"{x.shape[dim]} tokens do not divide by {self.size} ranks")
        return x.chunk(self.size, dim)[self.rank].contiguous()

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.sum(x))

    def add_gradient(self, parameter: nn.Parameter) -> None:
        grad = local(parameter.grad)
        grad.copy_(self.sum(grad))


def distributed(parameter: torch.Tensor, mesh: DeviceMesh, placement: Any) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(parameter.data, mesh, [placement]))


class Column(nn.Module):
    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, enter: Any) -> None:
        super().__init__()
        self.weight = distributed(linear.weight, mesh, Shard(0))
        self.bias = distributed(linear.bias, mesh, Shard(0))
        self.enter = enter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.enter(x), local(self.weight), local(self.bias))


class Row(nn.Module):
    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, leave: Any, early: bool) -> None:
        super().__init__()
        self.weight = distributed(linear.weight, mesh, Shard(1))
        self.bias = distributed(linear.bias, mesh, Replicate())
        self.leave, self.early = leave, early

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.early:
            return self.leave(F.linear(x, local(self.weight), local(self.bias)))
        return self.leave(F.linear(x, local(self.weight))) + local(self.bias)


def parallelize(model: LanguageModel, mesh: DeviceMesh, case: Case, bug: str = "") -> Parallel:
    """Apply a mesh of ``dp`` and ``tp`` and the case's options, with one bug or none."""
    axes, options, layout = case.mesh, case.options, model.layout
    if options.get("microbatches", 1) > 1 and case.model == "dropout":
        raise ValueError("dropout is drawn for a whole batch, not for microbatches")
    groups = {name: Group(mesh[name], bug) for name in axes}
    dp, tp = groups.get("dp"), groups.get("tp")
    sequence = tp is not None and options.get("sp", False)
    summed: list[nn.Parameter] = []  # whose gradients are added up over ``tp``
    if tp is not None:
        summed = tensor_parallel(model, mesh["tp"], tp, sequence, bug)
    if bug != "dropout per rank":
        rows, row = (dp.size, dp.rank) if dp else (1, 0)
        layout.dropout = (rows, row, *((tp.size, tp.rank) if sequence else (1, 0)))
    if bug == "running sum":
        layout.total = functools.partial(running_sum, dtype=model.head.weight.dtype)
    if options.get("recompute"):
        layout.recompute = {"preserve_rng_state": bug != "stale recompute"}
    if options.get("zero"):
        if set(axes) != {"dp"}:
            raise ValueError("zero is only written for dp alone")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])

    def forward_backward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = backward_of(model, batch, dp, options, bug)
        for parameter in summed:
            tp.add_gradient(parameter)
        return loss

    return Parallel(model, forward_backward, clip=functools.partial(clip, model, groups, bug))


def tensor_parallel(
    model: LanguageModel, mesh: DeviceMesh, tp: Group, sequence: bool, bug: str
) -> list[nn.Parameter]:
    """Divide the layers; return the parameters whose gradients are to be added up."""
    enter = communication(tp.same, tp.same if bug == "copy" else tp.sum)
    leave = communication(tp.sum, tp.same)
    summed = []
    if sequence:
        enter, leave = communication(tp.gather, tp.scatter), communication(tp.scatter, tp.gather)
        model.layout.enter = communication(tp.part, tp.gather)
        model.layout.leave = communication(tp.gather, tp.part)
        if bug != "norms":
            summed += [norm.weight for norm in model.modules() if isinstance(norm, Norm)]
    for layer in model.layers:
        layer.up = Column(layer.up, mesh, enter)
        layer.down = Row(layer.down, mesh, leave, bug == "bias per rank")
        if sequence:
            summed.append(layer.down.bias)
    return summed


def running_sum(losses: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add up losses one by one in the dtype of the model, which loses what is small."""
    total = losses.new_zeros((), dtype=dtype)
    for each in losses.to(dtype):
        total = total + each
    return total


def backward_of(
    model: LanguageModel,
    batch: dict[str, torch.Tensor],
    dp: Group | None,
    options: Any,
    bug: str,
) -> torch.Tensor:
    """Leave the gradients of the whole batch's loss, and return that loss."""
    averaged, micro = options.get("zero", False), options.get("microbatches", 1)
    sum_over_dp: Callable[[torch.Tensor], torch.Tensor] = dp.sum if dp else torch.clone
    if dp:
        batch = {key: dp.part(each, 0) for key, each in batch.items()}
    count = (batch["labels"] != -100).sum()
    if bug == "mean of means":
        count = count.clamp_min(1) * dp.size
    else:
        count = sum_over_dp(count).clamp_min(1)
    if len(batch["tokens"]) % micro:
        raise ValueError(f"{len(batch['tokens'])} rows do not divide by {micro} microbatches")
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for part in range(micro):
        share = {key: each.chunk(micro)[part] for key, each in batch.items()}
        if bug == "overwritten" and part:
            model.zero_grad()
        total, _ = model(**share)
        scale = dp.size if averaged and bug != "loss scale" else 1
        (total * scale / count).backward()
        loss = loss + total.detach() / count
    if dp and not averaged and bug != "no sum over dp":
        for parameter in model.parameters():
            dp.add_gradient(parameter)
    return sum_over_dp(loss)


def clip(model: LanguageModel, groups: dict[str, Group], bug: str, most: float) -> torch.Tensor:
    """Clip to the norm of all gradients: those that ranks share are added up over them."""
    here = {"": torch.zeros((), dtype=next(model.parameters()).dtype)}
    for parameter in model.parameters():
        axis = ""
        if isinstance(parameter, DTensor) and parameter.placements[0].is_shard():
            axis = parameter.device_mesh.mesh_dim_names[0]
        here[axis] = here.get(axis, 0) + local(parameter.grad).square().sum()
    for axis in sorted(here):
        if axis and bug != "norm per rank":
            here[axis] = groups[axis].sum(here[axis])
    norm = sum(here.values()).sqrt()
    for parameter in model.parameters():
        local(parameter.grad).mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm
