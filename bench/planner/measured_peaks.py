"""Peaks of small models that are trained here, next to the estimates: docs/estimates.md's table.

    python bench/planner/measured_peaks.py      # two minutes

Measured is a whole step of training: forward, loss, backward and a fused AdamW, of models that
transformers builds from configurations, as they come and after ``fusedops.patch``. The allocator
counts (``runtime/peak.py``); weights and states, which are there before the step, are added. Memory
that a model or an optimizer of this package lets leave for the host is counted where it says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fusedops
from fusedops import memory
from fusedops.bench import model_zoo
from fusedops.memory.apply import policy_state_of
from fusedops.models import from_config
from fusedops.optim import OffloadedAdamW
from fusedops.planner import Estimate, Layout, estimate
from fusedops.runtime.peak import peak_bytes
from fusedops.terminal.progress import steps

FAMILIES = ("gpt2", "bert", "llama", "qwen3", "mixtral")
# hidden_size, layers, sequences, tokens, vocabulary: where activations are most, where the logits
# are, and where the weights are.
SIZES = ((256, 6, 4, 256, 1024), (128, 2, 4, 256, 8192), (256, 4, 1, 64, 1024))
PRECISIONS = {"float32": "float32", "bfloat16": "half", "autocast": "autocast"}
LAYERS = {"gpt2": "transformer.h.*", "bert": "bert.encoder.layer.*"}  # of others: model.layers.*
NORMS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")


@dataclass(frozen=True)
class MeasuredStep:
    """One small run."""

    family: str  # a name of ``FAMILIES``
    size: tuple[int, int, int, int, int]  # as in ``SIZES``
    kernels: str  # ``"stock"`` or ``"fused"``
    dtype: str  # of the weights, or ``"autocast"``: float32 under autocast to bfloat16
    recompute: str  # ``"none"``, ``"full"`` or ``"norm"``
    kept: int  # bytes that autograd saved, the loss's own included
    peak: int  # bytes at the peak of the step
    before: int  # bytes of weights and states
    host: int  # bytes that have been taken of the host's memory
    estimated: Estimate  # what the closed form says

    @property
    def error(self) -> float:
        """By how much of the measured peak the estimate is above it."""
        return self.estimated.peak / self.peak - 1

    @property
    def error_of_temporary(self) -> float:
        """The same of what comes to weights and states: gradients, activations, logits."""
        return (self.estimated.peak - self.before) / (self.peak - self.before) - 1


def cases() -> Iterator[tuple[Any, ...]]:
    """Yield what is measured: arguments of ``measure``."""
    for family in FAMILIES:
        for size in SIZES:
            for kernels in ("stock", "fused"):
                yield family, size, kernels, "float32", "none"
        for kernels in ("stock", "fused"):
            yield family, SIZES[0], kernels, "bfloat16", "none"
            yield family, SIZES[0], kernels, "float32", "full"


def measure(
    family: str,
    size: tuple[int, int, int, int, int],
    kernels: str,
    dtype: str,
    recompute: str,
    *,
    microbatches: int = 1,
    ours: bool = False,
    offload: tuple[str, ...] = (),
    recompute_layers: int | None = None,
) -> MeasuredStep:
    """Train a small model for a step and return what it took.

    Args:
        family: a name of ``FAMILIES``.
        size: as in ``SIZES``.
        kernels: ``"stock"`` or ``"fused"``.
        dtype: a name of ``PRECISIONS``.
        recompute: ``"none"``, ``"full"``, or with ``ours`` ``"norm"``.
        microbatches: of the step.
        ours: recompute by ``fusedops.memory``; else by transformers' gradient checkpointing.
        offload: as in ``Layout``: by ``fusedops.memory`` and ``OffloadedAdamW``.
        recompute_layers: with ``ours``, how many layers recompute; by default all.
    """
    hidden, layers, batch, seq_len, vocabulary = size
    model = build(family, hidden, layers, seq_len, vocabulary)
    layout = Layout.of(
        micro_batch=batch,
        microbatches=microbatches,
        kernels=kernels,
        precision=PRECISIONS[dtype],
        recompute=recompute,
        recompute_layers=recompute_layers,
        offload=offload,
    )
    estimated = estimate(from_config(model.config, sizes_only=True), layout)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast")
    model = model.to(torch.float32 if dtype == "autocast" else getattr(torch, dtype)).train()
    if recompute == "full" and not ours:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if kernels == "fused":
        fusedops.patch(model)
    pattern = LAYERS.get(family, "model.layers.*")
    _treat(model, pattern, recompute if ours else "none", recompute_layers, offload)
    optimizer: torch.optim.Optimizer
    if "optimizer" in offload:
        states = torch.bfloat16 if dtype == "bfloat16" else None
        optimizer = OffloadedAdamW(model.parameters(), state_dtype=states)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(2, vocabulary, (batch, seq_len))
    # transformers fills a KV cache by default; training does not need it.
    more = {} if family == "bert" else {"use_cache": False}

    def loss() -> torch.Tensor:
        with autocast:
            return model(input_ids=tokens, labels=tokens, **more).loss

    def step() -> None:
        for _ in range(microbatches):
            loss().backward()
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    before = sum(parameter.nbytes for parameter in model.parameters())
    if "optimizer" not in offload:
        before += sum(
            value.nbytes for state in optimizer.state.values() for value in state.values()
        )
    kept = _kept(model, loss)
    peak = before + peak_bytes(step, torch.device("cpu"))
    state = policy_state_of(model)
    offloaders = {} if state is None else state.offloaders
    host = sum(offloader.host_bytes for offloader in offloaders.values())
    if isinstance(optimizer, OffloadedAdamW):
        host += optimizer.host_bytes
        optimizer.close()
    return MeasuredStep(
        family=family,
        size=size,
        kernels=kernels,
        dtype=dtype,
        recompute=recompute,
        kept=kept,
        peak=peak,
        before=before,
        host=host,
        estimated=estimated,
    )


def _treat(
    model: nn.Module,
    layers: str,
    recompute: str,
    recompute_layers: int | None,
    offload: tuple[str, ...],
) -> None:
    """Give a model the policy that a layout asks for."""
    rules = []
    if recompute == "full":
        names = [layers.replace("*", str(index)) for index in range(recompute_layers or 0)]
        rules.append(memory.recompute(names or layers))
    elif recompute == "norm":
        rules.append(memory.recompute(ops=NORMS))
    if "activations" in offload:
        rules.append(memory.offload(layers))
    if rules:
        # What leaves is waited for: how much of it is under way is a matter of time, not of bytes.
        settings = memory.OffloadSettings(in_flight_bytes=0, least_bytes=1)
        memory.apply(model, memory.Policy(*rules), offload_settings=settings)


def _kept(model: nn.Module, run: Any) -> int:
    """Return the bytes of all storages that autograd saves in a call, parameters apart."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            seen[place] = tensor
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    nbytes = sum(saved.untyped_storage().nbytes() for saved in seen.values())
    seen.clear()  # the graph holds `pack`, and a result of its own would hold the graph
    del result
    return nbytes


def build(family: str, hidden: int, layers: int, seq_len: int, vocabulary: int) -> Any:
    """Return a small model of a family, weights random, without dropout."""
    heads = hidden // 32
    changes: dict[str, Any] = {
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": seq_len,
    }
    if family not in ("gpt2", "bert"):
        changes["intermediate_size"] = 11 * hidden // 4
        changes["num_key_value_heads"] = heads // 2
        changes["head_dim"] = 32
    if family == "mixtral":
        changes["num_local_experts"] = 4
        changes["head_dim"] = None  # its configuration's default: the width by the heads
    return model_zoo.FAMILIES[family].draw(model_zoo.ModelSize(hidden, layers), **changes)


def main() -> None:
    """Measure the cases, and print the table."""
    work = list(cases())
    rows = []
    with steps(len(work)) as progress:
        for case in work:
            progress.describe(" ".join(str(word) for word in case))
            rows.append(measure(*case))
            progress.advance()
    print(
        "| model | width x layers, tokens, words | dtype | recompute | kernels | measured MiB "
        "| estimate | without weights and states |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        hidden, layers, batch, seq_len, vocabulary = row.size
        print(
            f"| {row.family} | {hidden} x {layers}, {batch} x {seq_len}, {vocabulary} "
            f"| {row.dtype} | {row.recompute} | {row.kernels} | {row.peak / 2**20:.1f} "
            f"| {row.error:+.1%} | {row.error_of_temporary:+.1%} |"
        )
    print(f"\nThe largest difference of a peak is {max(abs(row.error) for row in rows):.1%}.")


if __name__ == "__main__":
    main()
