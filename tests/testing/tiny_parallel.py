"""A small decoder, its parallel forms (tensor, sequence, context, data), and bugs to plant in them.

Written by hand on torch.distributed and nothing of fusedops' own stack: what ``verify`` finds here
it finds in the code of others. Shapes: B sequences, S tokens, H hidden, D of a head.
"""

from __future__ import annotations

import functools
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

VOCAB, HIDDEN, HEADS, LAYERS = 32, 16, 4, 2


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
        self.layout = layout
        self.attention_norm, self.norm = Norm(), Norm()
        self.query, self.output = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.key, self.value = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = Dropout(dropout, layout)

    def attend(self, x_BSH: torch.Tensor) -> torch.Tensor:
        head = HIDDEN // HEADS
        query, key, value = (
            f(x_BSH).unflatten(-1, (-1, head)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        key, value = self.layout.whole_sequence(key), self.layout.whole_sequence(value)
        first = self.layout.first_token(query.shape[2])
        rows = torch.arange(first, first + query.shape[2])
        mask = torch.arange(key.shape[2]) <= rows[:, None]
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        x_BSH = x_BSH + self.dropout(self.attend(self.attention_norm(x_BSH)))
        return x_BSH + self.dropout(self.down(F.gelu(self.up(self.norm(x_BSH)))))


class Decoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.layout = Layout(
            dropout=(1, 0, 1, 0),
            whole_sequence=lambda x: x,
            first_token=lambda tokens: 0,
            enter=lambda x: x,
            leave=lambda x: x,
            recompute=None,
            total=torch.sum,
        )
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.positions = nn.Parameter(torch.randn(64, HIDDEN) / 10)
        self.layers = nn.ModuleList(Layer(self.layout, dropout) for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[Any, Any]:
        first = self.layout.first_token(tokens.shape[1])
        x_BSH = self.tokens(tokens) + local(self.positions)[first : first + tokens.shape[1]]
        x_BSH = self.layout.enter(x_BSH)
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
    return Decoder()


def with_dropout() -> nn.Module:
    return Decoder(dropout=0.3)


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

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if x.shape[dim] % self.size:
            raise ValueError(f"{x.shape[dim]} tokens do not divide by {self.size} ranks")
        return x.chunk(self.size, dim)[self.rank].contiguous()

    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self.part(self.sum(x), dim)


class Column(nn.Module):
    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, enter: Any) -> None:
        super().__init__()
        self.weight, self.enter = split(linear, mesh, Shard(0)), enter
        self.bias = nn.Parameter(distribute_tensor(linear.bias.data, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.enter(x), local(self.weight), local(self.bias))


class Row(nn.Module):
    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, leave: Any, early: bool) -> None:
        super().__init__()
        self.weight, self.leave = split(linear, mesh, Shard(1)), leave
        self.bias = nn.Parameter(distribute_tensor(linear.bias.data, mesh, [Replicate()]))
        self.early = early

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.early:
            return self.leave(F.linear(x, local(self.weight), local(self.bias)))
        return self.leave(F.linear(x, local(self.weight))) + local(self.bias)


def split(linear: nn.Linear, mesh: DeviceMesh, placement: Any) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(linear.weight.data, mesh, [placement]))


def parallelize(model: Decoder, mesh: DeviceMesh, case: Case, bug: str = "") -> Parallel:
    """Apply a mesh of ``dp``, ``cp`` and ``tp`` and the case's options, with one bug or none."""
    axes, options, layout = case.mesh, case.options, model.layout
    if options.get("microbatches", 1) > 1 and case.model == "dropout":
        raise ValueError("dropout is drawn for a whole batch, not for microbatches")
    sequence = options.get("sp", False) and axes.get("tp", 1) > 1
    summed: list[tuple[nn.Parameter, Group]] = []  # gradients to add up after the backward
    groups = {name: Group(mesh[name], bug) for name in axes}
    if axes.get("tp", 1) > 1:
        if sequence and axes.get("cp", 1) > 1:
            raise ValueError("sp and cp at once are not written")
        summed += tensor_parallel(model, mesh["tp"], groups["tp"], sequence, bug)
    dp, cp, tp = (groups.get(name) for name in ("dp", "cp", "tp"))
    rows, row = (dp.size, dp.rank) if dp else (1, 0)
    along = cp or (tp if sequence else None)
    layout.dropout = (rows, row, *((along.size, along.rank) if along else (1, 0)))
    if bug == "running sum":
        layout.total = functools.partial(running_sum, dtype=model.head.weight.dtype)
    if bug == "dropout per rank":
        layout.dropout = (1, 0, 1, 0)
    if cp:
        backward = cp.part if bug == "keys not reduced" else cp.scatter
        layout.whole_sequence = communication(
            functools.partial(cp.gather, dim=2), functools.partial(backward, dim=2)
        )
        layout.first_token = lambda tokens: 0 if bug == "positions" else cp.rank * tokens
    if options.get("recompute"):
        layout.recompute = {"preserve_rng_state": bug != "stale recompute"}
    if options.get("zero"):
        if set(axes) != {"dp"}:
            raise ValueError("zero is only written for dp alone")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return Parallel(
        model,
        training_step(model, groups, summed, options, bug),
        clip=functools.partial(clip, model, groups, bug),
    )


def running_sum(losses: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add up losses one by one in the dtype of the model, which loses what is small."""
    total = losses.new_zeros((), dtype=dtype)
    for each in losses.to(dtype):
        total = total + each
    return total


def clip(model: Decoder, groups: dict[str, Group], bug: str, most: float) -> torch.Tensor:
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


def tensor_parallel(
    model: Decoder, mesh: DeviceMesh, tp: Group, sequence: bool, bug: str
) -> list[tuple[nn.Parameter, Group]]:
    gather, scatter = functools.partial(tp.gather, dim=1), functools.partial(tp.scatter, dim=1)
    part = functools.partial(tp.part, dim=1)
    enter = communication(tp.same, tp.same if bug == "copy" else tp.sum)
    leave = communication(tp.sum, tp.same)
    summed = []
    if sequence:
        enter, leave = communication(gather, scatter), communication(scatter, gather)
        model.layout.enter = communication(part, gather)
        model.layout.leave = communication(gather, part)
        if bug != "norms":
            summed += [(norm.weight, tp) for norm in model.modules() if isinstance(norm, Norm)]
    for layer in model.layers:
        layer.query = Column(layer.query, mesh, enter)
        layer.key = Column(layer.key, mesh, enter)
        layer.value = Column(layer.value, mesh, enter)
        layer.output = Row(layer.output, mesh, leave, bug == "bias per rank")
        layer.up = Column(layer.up, mesh, enter)
        layer.down = Row(layer.down, mesh, leave, bug == "bias per rank")
        if sequence:
            summed += [(each.bias, tp) for each in (layer.output, layer.down)]
    return summed


def training_step(
    model: Decoder, groups: dict[str, Group], summed: Any, options: Any, bug: str
) -> Any:
    averaged = options.get("zero", False)
    shares = [groups[name] for name in ("dp", "cp") if name in groups]
    micro = options.get("microbatches", 1)

    def forward_backward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for dim, name in enumerate(("dp", "cp")):
            if name in groups:
                batch = {key: groups[name].part(each, dim) for key, each in batch.items()}
        count = (batch["labels"] != -100).sum()
        for group in shares:
            if bug != "mean of means":
                count = group.sum(count)
        count = count.clamp_min(1)
        if bug == "mean of means":
            for group in shares:
                count = count * group.size
        if len(batch["tokens"]) % micro:
            raise ValueError(f"{len(batch['tokens'])} rows do not divide by {micro} microbatches")
        whole = torch.zeros((), dtype=next(model.parameters()).dtype)
        for part in range(micro):
            share = {key: each.chunk(micro)[part] for key, each in batch.items()}
            if bug == "overwritten" and part:
                model.zero_grad()
            total, _ = model(**share)
            scale = groups["dp"].size if averaged and bug != "loss scale" else 1
            (total * scale / count).backward()
            whole = whole + total.detach() / count
        for parameter, group in summed:
            add(parameter, group)
        for group in shares:
            whole = group.sum(whole)
            if not averaged and bug != f"no sum over {'dp' if group is groups.get('dp') else 'cp'}":
                for parameter in model.parameters():
                    add(parameter, group)
        return whole

    return forward_backward


def add(parameter: nn.Parameter, group: Group) -> None:
    grad = local(parameter.grad)
    grad.copy_(group.sum(grad))
