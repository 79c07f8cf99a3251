"""What layers recompute or offload, by the configuration of a layout."""

from __future__ import annotations

from typing import Any

from fusedops import memory
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.models.transformer import Transformer
from fusedops.nn import MLP, MoE
from fusedops.parallel.mesh import Mesh
from fusedops.parallel.tensor.layers import ParallelMLP

_NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")


def apply_memory_policy(model: Transformer, config: ParallelConfig, mesh: Mesh | None) -> None:
    """Let the layers of a model, or of a stage, save less for their backward."""
    rules = []
    names = list(model.layers)[: config.recompute_layers]
    layers = [f"layers.{name}" for name in names] if config.recompute_layers else ["layers.*"]
    head: Any = model.head  # of the last stage
    if head is not None and ("activations" in config.offload or "layer" in config.recomputed):
        # Logits would be the largest saved tensor.
        head.recompute = True
    if "activations" in config.offload:
        rules.append(memory.offload("layers.*"))
    if "layer" in config.recomputed:
        slices = config.recompute_slice_activation and config.tp > 1
        rules.append(
            memory.recompute(
                layers,
                mp_comm_recompute=config.mp_comm_recompute,
                recompute_slice_activation=slices,
                group=mesh.group("tp") if slices and mesh is not None else None,
            )
        )
    if "norm" in config.recomputed:
        # FSDP2 gathers a layer's weights after the backward of what reads a last norm's output.
        inside = model.config.post_norm and config.zero == 3
        some = layers if config.recompute_layers else ()
        modules = [f"{layer}.attention_norm" for layer in layers] if inside else some
        rules.append(memory.recompute(modules, ops=_NORMS))
    if "activation" in config.recomputed:
        rules.append(memory.recompute(layers if config.recompute_layers else (), ops="linear_glu"))
        for name in names:
            part: Any = model.layers[name].feed_forward
            if isinstance(part, (MLP, ParallelMLP)):
                part.recompute = True
            elif isinstance(part, MoE):
                part.experts.recompute = True
    if rules:
        memory.apply(model, memory.Policy(*rules))
