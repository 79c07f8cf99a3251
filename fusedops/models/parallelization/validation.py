"""What ``parallelize`` checks before it changes anything, with errors that say what would fit."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch import nn

from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.models.parallelization.config import (
    ParallelConfig,
    check_split,
    check_stages,
    check_stored,
)
from fusedops.models.transformer import Transformer
from fusedops.parallel.mesh import Mesh, make_mesh

_OP = "parallelize"


def device_type(model: nn.Module) -> str:
    """Return the type of the device of a model; ``"cpu"`` for one on ``meta``."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return "cpu" if device == "meta" else device


def validated(model: Any, config: Any, mesh: Any) -> tuple[ParallelConfig, Mesh | None]:
    """Return the configuration for the processes of the job, and their mesh; raise if unfit.

    Without torch.distributed there is one process and no mesh. Raises are those of ``parallelize``.
    """
    if not isinstance(model, nn.Module):
        checks.fail_type(_OP, "model", "a torch.nn.Module", model)
    if not isinstance(config, ParallelConfig):
        checks.fail_type(_OP, "config", "a ParallelConfig", config)
    if not isinstance(model, Transformer) and config.mode != "manual":
        expected = "a fusedops.models.Transformer, or any module with mode 'manual'"
        checks.fail_type(_OP, "model", expected, model)
    if dist.is_available() and dist.is_initialized():
        config = config.for_ranks(dist.get_world_size())
    elif config.sizes.ranks > 1 or config.mode == "data" or mesh is not None:
        raise RuntimeError(
            f"{_OP}: torch.distributed is not initialised: start with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if isinstance(model, Transformer):
        _check_model(model.config, config)
    if config.shard_ranks is not None and config.sizes.data % config.shard_ranks:
        expected = f"a divisor of dp x cp = {config.sizes.data}"
        checks.fail(_OP, "shard_ranks", expected, config.shard_ranks)
    if mesh is not None and mesh.sizes != config.sizes:
        checks.fail(_OP, "mesh", f"one of {config.sizes}", mesh.sizes)
    if mesh is None and dist.is_available() and dist.is_initialized():
        mesh = make_mesh(config.sizes, device_type=device_type(model))
    if isinstance(model, Transformer):
        device = device_type(model) if mesh is None else mesh.dense.device_type
        check_stored(_OP, model.config, config, device)
    return config, mesh


def _check_model(model: TransformerConfig, config: ParallelConfig) -> None:
    check_split(_OP, model, tp=config.tp, ep=config.ep, data=config.sizes.data)
    if config.context == "all_to_all" and config.cp > 1:
        heads = model.num_heads // config.tp
        if heads % config.cp:
            expected = f"a divisor of the {heads} heads of a tp rank, with context 'all_to_all'"
            checks.fail(_OP, "cp", expected, config.cp)
    check_stages(_OP, model, config)
    starts = config.bucket_layers or ()
    if any(layer >= model.num_layers for layer in starts):
        checks.fail(_OP, "bucket_layers", f"below the {model.num_layers} layers", starts)
