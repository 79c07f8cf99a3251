"""Parameters, buffers and optimizer states as torch's distributed checkpoint takes them.

Names are those of the parameters, whatever wraps them, so that a state can be loaded by ranks that
hold other shares of it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

_SHOWN = 3

# It is said at every save of a single process, which asked for exactly that.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


class State:
    """A model and its optimizers."""

    def __init__(self, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        self.model, self.optimizers = model, optimizers

    def names(self) -> list[str]:
        """Return the names of the parameters and buffers of this rank."""
        return sorted(get_model_state_dict(self.model))

    def content(self, *, flat: bool) -> dict[str, Any]:
        """Return all tensors and numbers by name: not copies.

        Args:
            flat: give each parameter its own entries of the optimizer's groups; needed where ranks
                have other parameters.
        """
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optimizer = get_state_dict(self.model, self.optimizers, options=options)
        found: dict[str, Any] = {"model": model}
        if self.optimizers:
            found["optimizer"] = optimizer
        return found

    def load(
        self, folder: Path, group: dist.ProcessGroup | None, names: set[str], *, flat: bool
    ) -> None:
        """Load what ``write`` wrote.

        Args:
            folder: of the checkpoint.
            group: the ranks that load.
            names: ``names`` of all of them.
            flat: as it was written.

        Raises:
            ValueError: it is of another model or optimizer; nothing was changed then.
        """
        for each in self.optimizers:
            each.zero_grad(set_to_none=True)  # with gradients torch would not make empty states
        content = self.content(flat=flat)
        reader = dcp.FileSystemReader(folder)
        _check_fits(content, names, reader, folder)
        dcp.load(content, storage_reader=reader, process_group=group, no_dist=group is None)
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=content["model"],
            optim_state_dict=content.get("optimizer", {}),
            options=StateDictOptions(flatten_optimizer_state_dict=flat),
        )


def write(content: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write what ``State.content`` gave, each rank its share, flushed to the disk."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    dcp.save(content, storage_writer=writer, process_group=group, no_dist=group is None)


def copied(value: Any) -> Any:
    """Return a copy in the host's memory; of sharded tensors, of this rank's share."""
    if isinstance(value, DTensor):
        local = value.to_local().detach().to("cpu", copy=True)
        return DTensor.from_local(
            local,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(each) for each in value)
    return value


def _check_fits(
    content: dict[str, Any], names: set[str], reader: dcp.FileSystemReader, folder: Path
) -> None:
    """Raise unless the checkpoint has every tensor that is wanted, in its shape, and no other."""
    there = reader.read_metadata().state_dict_metadata
    wanted, _ = flatten_state_dict(content)
    missing = sorted(wanted.keys() - there.keys())
    model = {name for name in there if name.startswith("model.")}
    surplus = sorted(model - {f"model.{name}" for name in names})
    other = []
    for name, each in wanted.items():
        size = getattr(there.get(name), "size", None)
        if isinstance(each, torch.Tensor) and size is not None and size != each.shape:
            other.append(f"{name} {list(size)} for {list(each.shape)}")
    told = [
        f"{what} {', '.join(names[:_SHOWN])}{' and more' if len(names) > _SHOWN else ''}"
        for what, names in (
            ("it lacks", missing),
            ("it also has", surplus),
            ("other shapes:", other),
        )
        if names
    ]
    if told:
        raise ValueError(f"{folder} is of another model or optimizer: {'; '.join(told)}")
