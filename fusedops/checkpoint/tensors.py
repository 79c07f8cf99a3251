"""Parameters, buffers and optimizer states as torch's distributed checkpoint takes them.

Names are those of the parameters, whatever wraps them, so that a state can be loaded by ranks that
hold other shares of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    _get_fqns,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fusedops._core.checks import UnsupportedError
from fusedops.parallel.collective_errors import gather_objects

_SHOWN = 3
_STATE = "optimizer.state."  # begins the names of states, which end with their keys
_MASTER = "master"  # the key of the master of a parameter that fusedops.optim.AdamW steps
_NAMES = ("params", "param_names")  # entries of a group that belong to the ranks that have it

# It is said at every save of a single process, which asked for exactly that.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


class State:
    """A model and its optimizers."""

    def __init__(self, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise UnsupportedError(
                "Checkpointer: model must not be sharded by FullyShardedDataParallel, whose "
                "parameters have no names of their own: use fully_shard (FSDP2)"
            )
        self.model, self.optimizers = model, optimizers

    def names(self) -> list[str]:
        """Return the names of the parameters and buffers of this rank."""
        return sorted(get_model_state_dict(self.model))

    def content(self) -> dict[str, Any]:
        """Return all tensors by name: not copies."""
        names = self._names()
        states = {
            names[params[index]]: state
            for optimizer in self.optimizers
            for params in [_params(optimizer)]
            for index, state in optimizer.state_dict()["state"].items()
        }
        return {"model": get_model_state_dict(self.model), "optimizer": {"state": states}}

    def groups(self) -> list[list[dict[str, Any]]]:
        """Return the options of each optimizer's groups, without the parameters and their names."""
        return [
            [{key: value for key, value in group.items() if key not in _NAMES} for group in groups]
            for groups in (optimizer.param_groups for optimizer in self.optimizers)
        ]

    def prepare(
        self, folder: Path, names: set[str], groups: list[list[dict[str, Any]]]
    ) -> dict[str, Any]:
        """Return tensors to load a checkpoint into, as ``content`` does; nothing is changed.

        ``names`` are those of all ranks; ``groups`` are as they were when it was written.

        Raises:
            ValueError: it is of another model or optimizer.
        """
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        model = get_model_state_dict(self.model)
        mismatches = _model_mismatches(model, names, stored)
        saved = [len(of_optimizer) for of_optimizer in groups]
        own = [len(optimizer.param_groups) for optimizer in self.optimizers]
        if own and saved != own:  # else weights alone are loaded
            mismatches.append(f"groups of its optimizers {saved} for {own}")
        flat = (chain.from_iterable(of_optimizers) for of_optimizers in (self.groups(), groups))
        pairs = zip(*flat, strict=False)
        lacking = sorted({key for group, values in pairs for key in group.keys() - values.keys()})
        if lacking:
            mismatches.append(f"groups of its optimizers lack {', '.join(lacking)}")
        states: dict[str, dict[str, Any]] = {}
        known = {name: parameter for parameter, name in self._names().items()}
        stepped = {param: state for o in self.optimizers for param, state in o.state.items()}
        # In the order of torch's states, whatever that of the ranks' files is.
        for entry in sorted(stored, key=lambda entry: (not entry.endswith(".step"), entry)):
            name, _, key = entry.removeprefix(_STATE).rpartition(".")
            if entry.startswith(_STATE) and name in known:
                current = stepped.get(known[name], {}).get(key)
                target = _target(current, known[name], key, stored[entry])
                states.setdefault(name, {})[key] = target
        if mismatches:
            raise ValueError(f"{folder} is of another model or optimizer: {'; '.join(mismatches)}")
        return {"model": model, "optimizer": {"state": states if self.optimizers else {}}}

    def load(
        self,
        folder: Path,
        content: dict[str, Any],
        groups: list[list[dict[str, Any]]],
        process_group: dist.ProcessGroup | None,
    ) -> None:
        """Load a checkpoint into what ``prepare`` returned; all ranks of the group do."""
        _read(content, folder, process_group)
        set_model_state_dict(self.model, content["model"])
        names, loaded, masters = self._names(), content["optimizer"]["state"], {}
        for optimizer, saved_groups in zip(self.optimizers, groups, strict=False):
            params = _params(optimizer)
            states = {
                index: loaded[names[param]]
                for index, param in enumerate(params)
                if names[param] in loaded
            }
            own_groups = optimizer.state_dict()["param_groups"]
            for group, options in zip(own_groups, saved_groups, strict=True):
                for name, value in options.items():
                    current = group.get(name)
                    if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
                        value = value.to(current.device)
                    group[name] = value
            optimizer.load_state_dict({"state": states, "param_groups": own_groups})
            # A run with masters can continue from a checkpoint without them, whose weights they
            # are read from, and one whose weights are the masters from a checkpoint with masters.
            for index, saved in states.items():
                param = params[index]
                master = optimizer.state[param].get(_MASTER)
                if master is None and _MASTER in saved:
                    with torch.no_grad():
                        param.copy_(saved[_MASTER])
                elif master is not None and _MASTER not in saved:
                    masters[names[param]] = master
        if any(gather_objects(bool(masters), process_group)):
            _read({"model": masters}, folder, process_group)

    def _names(self) -> dict[nn.Parameter, str]:
        """Return the names that torch's checkpoint gives the parameters, whatever wraps them."""
        return {
            parameter: next(iter(_get_fqns(self.model, name)))
            for name, parameter in self.model.named_parameters()
        }


def write(content: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write what ``State.content`` gave, each rank its share, flushed to the disk."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    dcp.save(content, storage_writer=writer, process_group=group, no_dist=group is None)


def _read(content: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    reader = dcp.FileSystemReader(folder)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # what is missing is known
    no_dist = group is None
    dcp.load(content, storage_reader=reader, planner=planner, process_group=group, no_dist=no_dist)


def copied(content: dict[str, Any]) -> dict[str, Any]:
    """Return copies in the host's memory; of sharded tensors, of this rank's share."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            # Not from_local, which moves the copy back to the device of the mesh.
            return DTensor(copy(tensor.to_local()), tensor._spec, requires_grad=False)
        return tensor.detach().to("cpu", copy=True)

    return tree_map_only(torch.Tensor, copy, content)


def _params(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _target(current: Any, param: torch.Tensor, key: str, metadata: Any) -> Any:
    """Return what an entry of a parameter's state is loaded into: the current one if it fits."""
    if not isinstance(metadata, TensorStorageMetadata):
        return None
    shape, dtype = metadata.size, metadata.properties.dtype
    if isinstance(current, torch.Tensor) and (current.shape, current.dtype) == (shape, dtype):
        return current
    if shape == param.shape and key != "step":
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype)


def _model_mismatches(
    model: dict[str, Any], names: set[str], stored: Mapping[str, Any]
) -> list[str]:
    """Return in what a checkpoint differs from a model of which ranks have tensors of ``names``."""
    needed, _ = flatten_state_dict({"model": model})
    saved = {name for name in stored if name.startswith("model.")}
    other = []
    for name, tensor in needed.items():
        size = getattr(stored.get(name), "size", None)
        if isinstance(tensor, torch.Tensor) and size is not None and size != tensor.shape:
            other.append(f"{name} {list(size)} for {list(tensor.shape)}")
    return [
        f"{what} {', '.join(listed[:_SHOWN])}{' and more' if len(listed) > _SHOWN else ''}"
        for what, listed in (
            ("it lacks", sorted(needed.keys() - saved)),
            ("it also has", sorted(saved - {f"model.{name}" for name in names})),
            ("other shapes:", other),
        )
        if listed
    ]
