"""Parameters, buffers and optimizer states as torch's distributed checkpoint takes them.

Names are those of the parameters, whatever wraps them, so that a state can be loaded by ranks that
hold other shares of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fusedops._core.checks import UnsupportedError
from fusedops.parallel.collective_errors import gather_objects

_SHOWN = 3
_STATE = "optimizer.state."  # begins the names of states, which end with their keys
_MASTER = "master"  # the key of the master of a parameter that fusedops.optim.AdamW steps
# What torch's wrappers put into the names of parameters.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_NAMES = ("params", "param_names")  # entries of a group that belong to the ranks that have it

# It is said at every save of a single process, which asked for exactly that.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


@dataclass(frozen=True)
class Loading:
    """A checkpoint that fits, and the tensors to load it into."""

    reader: dcp.FileSystemReader
    model: dict[str, Any]  # the tensors by name, to be overwritten
    states: dict[str, dict[str, Any]]  # states by the names of parameters, to be overwritten
    groups: list[list[dict[str, Any]]]  # options of the groups of all optimizers, as saved


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
        names = {parameter: name for name, parameter in self._parameters().items()}
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

    def prepare(self, folder: Path, names: set[str], groups: list[list[dict[str, Any]]]) -> Loading:
        """Return what ``load`` needs; nothing is changed.

        ``names`` are those of all ranks; ``groups`` are as they were when it was written.

        Raises:
            ValueError: it is of another model or optimizer.
        """
        reader = dcp.FileSystemReader(folder)
        stored = reader.read_metadata().state_dict_metadata
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
        known = self._parameters()
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
        return Loading(reader, model, states if self.optimizers else {}, groups)

    def load(self, loading: Loading, process_group: dist.ProcessGroup | None) -> None:
        """Load what was prepared; all ranks of the group do."""
        content = {"model": loading.model, "optimizer": {"state": loading.states}}
        _read(content, loading.reader, process_group)
        set_model_state_dict(self.model, loading.model)
        names = {parameter: name for name, parameter in self._parameters().items()}
        masters = {}
        for optimizer, options in zip(self.optimizers, loading.groups, strict=False):
            params = _params(optimizer)
            states = {
                index: loading.states[names[param]]
                for index, param in enumerate(params)
                if names[param] in loading.states
            }
            groups = optimizer.state_dict()["param_groups"]
            for group, values in zip(groups, options, strict=True):
                _update(group, values)
            optimizer.load_state_dict({"state": states, "param_groups": groups})
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
            _read({"model": masters}, loading.reader, process_group)

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters by the names that torch's checkpoint gives them."""
        parameters = {}
        for name, parameter in self.model.named_parameters():
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            unwrapped = isinstance(self.model, nn.parallel.DistributedDataParallel)
            parameters[name.removeprefix("module.") if unwrapped else name] = parameter
        return parameters


def write(content: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write what ``State.content`` gave, each rank its share, flushed to the disk."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    dcp.save(content, storage_writer=writer, process_group=group, no_dist=group is None)


def _read(
    content: dict[str, Any], reader: dcp.FileSystemReader, group: dist.ProcessGroup | None
) -> None:
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # what is missing is known
    no_dist = group is None
    dcp.load(content, storage_reader=reader, planner=planner, process_group=group, no_dist=no_dist)


def copied(value: Any) -> Any:
    """Return a copy in the host's memory; of sharded tensors, of this rank's share."""
    if isinstance(value, DTensor):
        # Not from_local, which moves the copy back to the device of the mesh.
        return DTensor(copied(value.to_local()), value._spec, requires_grad=False)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(element) for element in value)
    return value


def _update(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Give a group of parameters these options; tensors stay on the device that they were on."""
    for name, value in options.items():
        current = group.get(name)
        if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
            value = value.to(current.device)
        group[name] = value


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
