"""Experts whose weights are in host memory and are copied to the device when a token needs them.

    store_experts(model, "cuda")      # once
    loss = model(...)                 # each layer fetches the experts that its tokens chose
    loss.backward()                   # again, before its backward; gradients go to the host

A stored parameter stays a parameter under its own name, with its gradient on the host: of all
experts, with zeros for those that no token chose, which take no memory until micro-batches are
added or gradients scaled. Optimizers and checkpoints are therefore unchanged. An expert is on the
device from routing until its layer's forward ends, and again during its backward. Under autocast it
is there only in the dtype of the products.

``runtime/copy_engine.py`` does the copies: on a GPU from pinned memory, overlapping computation.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fusedops._core import checks, dtypes
from fusedops._core.checks import UnsupportedError
from fusedops._core.device_tensors import device_tensor
from fusedops.memory.offloading.offloader import OffloadSettings, offload_settings_of
from fusedops.memory.offloading.pool import Pool
from fusedops.memory.saved_tensors import check_version, mark_lasting
from fusedops.nn import MoE
from fusedops.ops import RoutingPlan
from fusedops.ops._routing_reuse import recomputing
from fusedops.runtime.copy_engine import CopyEngine

_OP = "store_experts"
Compute = Callable[[RoutingPlan, list[torch.Tensor | None]], torch.Tensor]


@dataclass
class ExpertTraffic:
    """What the experts of a layer have moved since they were stored."""

    # The numbers, within this process's, of the experts that the last forward fetched
    chosen: tuple[int, ...] = ()
    fetched_bytes: int = 0  # of weights that came to the device, forward and backward
    returned_bytes: int = 0  # of gradients that went to the host


def store_experts(
    model: nn.Module,
    device: torch.device | str,
    *,
    settings: OffloadSettings | None = None,
) -> dict[str, ExpertTraffic]:
    """Keep the weights of all experts of a model in host memory.

    Args:
        model: with ``fusedops.nn.MoE`` layers, on ``device`` but for their experts, which may be
            anywhere; their parameters stay the same objects. Make optimizers afterwards.
        device: where tokens are, and experts compute; a CPU or a CUDA device.
        settings: of the copies: ``engine``, ``timeout``, ``host_bytes`` and ``check``.

    Returns:
        What each layer's experts move, by the name of the layer: it counts on.

    Raises:
        ValueError: there are no experts, or some are stored already, or ``device`` is no such
            device; nothing has changed then.
        TypeError: an argument has the wrong type.

    Note:
        The same bits as without it, but where ``expert_parallel`` cuts tokens into chunks in half
        precision: there each chunk's gradient is rounded. The host waits for the choices of each
        layer, and in the backward for the gradients of its experts. Differentiable once. Weights
        must not change between a forward and its backward, which raises then as autograd does.
        Such a model is saved by its ``state_dict``; it does not pickle. It is never part of a
        compiled graph.

    Reference:
        Ren et al.: PanGu-Sigma, arXiv:2303.10845 (expert computation and storage separation).

    Example:
        >>> import torch, fusedops
        >>> layer = fusedops.nn.MoE(8, 16, num_experts=4, top_k=1)
        >>> traffic = fusedops.memory.store_experts(layer, "cpu")
        >>> plan = fusedops.hash_route(torch.zeros(3, dtype=torch.int64), 4)
        >>> layer(torch.ones(3, 8), plan=plan).sum().backward()
        >>> [len(copies.chosen) for copies in traffic.values()]
        [1]
    """
    checks.module(_OP, model)
    settings = offload_settings_of(_OP, "settings", settings)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        checks.fail(_OP, "model", "one with fusedops.nn.MoE layers", "none")
    for name, layer in layers.items():
        if layer.experts.stored is not None:
            checks.fail(_OP, "model", "one whose experts are not stored already", f"layer {name!r}")
    place = _device(device)
    engine = settings.engine(place)
    pool = Pool(engine, check=settings.check, limit=settings.host_bytes)
    traffic = {}
    for name, layer in layers.items():
        layer.experts.to("cpu")
        for parameter in layer.experts.parameters():
            part: Any = getattr(parameter, "_local_tensor", parameter)
            dense = part.data.contiguous()
            part.data = dense.pin_memory() if place.type == "cuda" else dense
        layer.experts.stored = ExpertStore(place, engine, pool, settings.timeout)
        traffic[name] = layer.experts.stored.traffic
    return traffic


def _device(device: Any) -> torch.device:
    if not isinstance(device, (str, torch.device)):
        checks.fail_type(_OP, "device", "a torch.device or the name of one", device)
    try:
        place = torch.device(device)
    except RuntimeError:
        checks.fail(_OP, "device", "the name of a device", checks.shown(device))
    if place.type not in ("cpu", "cuda"):
        checks.fail(_OP, "device", "a CPU or a CUDA device", checks.shown(device))
    return place


class ExpertStore:
    """Brings the experts of one layer to the device and their gradients back."""

    def __init__(
        self, device: torch.device, engine: CopyEngine, pool: Pool, timeout: float
    ) -> None:
        self.traffic = ExpertTraffic()
        self._device, self._engine, self._pool, self._timeout = device, engine, pool, timeout

    def __deepcopy__(self, memo: Any) -> ExpertStore:
        """Return itself: a copy of the model moves its experts by the same engine."""
        return self

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            f"{_OP}: a model whose experts are stored does not pickle: save its state_dict"
        )

    @torch.compiler.disable(reason="which experts come is known on the host alone")
    def __call__(
        self, plan: RoutingPlan, stored: Sequence[torch.Tensor | None], compute: Compute
    ) -> torch.Tensor:
        """Return ``compute(plan, weights)`` of the experts that the plan names alone.

        ``stored`` are weights and biases on the host, ``[E, ...]``, or ``None``; ``compute`` gets
        those of the experts that came. One node of the graph, its last, reads them.
        """
        counts = plan.tokens_per_expert.tolist()  # the host waits for the choices here
        # At least one: products of no experts have no shape.
        chosen = tuple(e for e, count in enumerate(counts) if count) or (0,)
        self.traffic.chosen = chosen
        there = [host for host in stored if host is not None]
        if len(counts) != len(there[0]):
            checks.fail(
                "MoE", "plan", f"one over {len(there[0])} experts", f"{len(counts)} experts"
            )
        here = _Fetch.apply(self, chosen, *there)
        mark_lasting(here)
        brought = iter(here)
        weights = [None if host is None else next(brought) for host in stored]
        output = compute(_among(plan, chosen), weights)
        # The output of a forward that a backward recomputes is used at once, by nodes of another
        # graph. If that graph needs hooks, it has its own.
        if not output.requires_grad or recomputing():
            return output
        # The experts are on the device while the node that made the output runs, each time.
        hosts = [(host.detach(), host._version) for host in there]

        def fetch(grad: torch.Tensor) -> None:
            for host, version in hosts:
                check_version(host, version)
            for tensor in here:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            self.fetch(here, [host for host, _ in hosts], chosen)

        def end(*grads: Any) -> None:
            # The graph of a second derivative would read them too.
            if not torch.is_grad_enabled():
                _free(here)

        assert output.grad_fn is not None
        output.register_hook(fetch)
        output.grad_fn.register_hook(end)
        _free(here)  # the stream reads them before their memory is used again
        return output

    def fetch(
        self,
        here: Sequence[torch.Tensor],
        hosts: Sequence[torch.Tensor],
        chosen: Sequence[int],
    ) -> None:
        """Copy the chosen rows of the host's tensors, and let what is computed next wait.

        ``here`` may have another dtype; what counts its writes is passed by.
        """
        tickets, wide = [], []
        for target, host in zip(here, hosts, strict=True):
            to = _bytes_of(target)
            if target.dtype != host.dtype:
                arrived = torch.empty(target.shape, dtype=host.dtype, device=target.device)
                wide.append((to.view(target.dtype), arrived))
                to = _bytes_of(arrived)
            row = host[0].numel() * host.element_size()
            source = _bytes_of(host)
            for begin, first, count in _runs(chosen):
                rows = source[first * row : (first + count) * row]
                part = to[begin * row : (begin + count) * row]
                tickets.append(self._engine.copy(rows, part, to_host=False))
            self.traffic.fetched_bytes += len(chosen) * row
        for ticket in tickets:
            self._engine.wait(ticket, self._timeout)
        for narrow, arrived in wide:
            narrow.copy_(arrived.flatten())

    def give_back(self, grad: torch.Tensor, host: torch.Tensor, chosen: Sequence[int]) -> Any:
        """Return the gradient of a stored tensor: rows of the chosen experts, zeros else."""
        grad = grad.contiguous()
        buffer = self._pool.take(grad.nbytes)
        staged = buffer[: grad.nbytes]
        ticket = self._engine.copy(_bytes_of(grad), staged, to_host=True)
        full = _zeros_like(host)
        self._engine.finish(ticket, self._timeout)
        full[list(chosen)] = staged.view(grad.dtype).view(grad.shape).to(full.dtype)
        self._pool.give_back(buffer, ticket)
        self.traffic.returned_bytes += grad.nbytes
        return full


def _free(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


class _Fetch(torch.autograd.Function):
    """The chosen experts of stored tensors, on the device; under autocast in its dtype."""

    @staticmethod
    def forward(
        ctx: Any, store: ExpertStore, chosen: tuple[int, ...], *hosts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        lower, here = dtypes.autocast_dtype(store._device), []
        for host in hosts:
            keeps = lower is None or host.dtype == torch.float64
            dtype = host.dtype if keeps else lower
            shape = len(chosen), *host.shape[1:]
            here.append(torch.empty(shape, dtype=dtype, device=store._device))
        store.fetch(here, hosts, chosen)
        ctx.store, ctx.chosen, ctx.hosts = store, chosen, [host.detach() for host in hosts]
        return tuple(here)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        pairs = zip(grads, ctx.hosts, strict=True)
        return None, None, *(ctx.store.give_back(grad, host, ctx.chosen) for grad, host in pairs)


def _zeros_like(host: torch.Tensor) -> torch.Tensor:
    """Return zeros that take no memory where nobody writes: the system's page of them is read."""
    if host.numel() == 0:
        return torch.zeros_like(host)
    pages = mmap.mmap(-1, host.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=host.dtype).view(host.shape)


def _among(plan: RoutingPlan, chosen: Sequence[int]) -> RoutingPlan:
    """Return the plan over the chosen experts alone; rows stay where they are."""
    if len(chosen) == plan.num_experts:
        return plan
    device = plan.expert_ids.device
    kept = device_tensor(chosen, torch.int64, device)
    number = torch.full((plan.num_experts + 1,), len(chosen), dtype=torch.int32, device=device)
    number[kept] = torch.arange(len(chosen), dtype=torch.int32, device=device)
    return replace(
        plan,
        expert_ids=number[plan.expert_ids.long()],
        tokens_per_expert=plan.tokens_per_expert[kept],
        offsets=plan.offsets[kept],
        num_experts=len(chosen),
    )


def _runs(chosen: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return runs of neighbours: place among the chosen, first expert, how many."""
    runs: list[tuple[int, int, int]] = []
    for place, expert in enumerate(chosen):
        if runs and sum(runs[-1][1:]) == expert:
            begin, first, count = runs.pop()
            runs.append((begin, first, count + 1))
        else:
            runs.append((place, expert, 1))
    return runs


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as bytes, apart from its count of writes."""
    assert tensor.is_contiguous()
    begin = tensor.storage_offset() * tensor.element_size()
    size = tensor.numel() * tensor.element_size()
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), begin, (size,), (1,))
