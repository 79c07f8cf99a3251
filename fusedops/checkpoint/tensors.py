"""Parameters, buffers and optimizer states as torch's distributed checkpoint takes them.

Names are those of the parameters, whatever wraps them, so that a state can be loaded by ranks that
hold other shares of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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

from fusedops.parallel.collective_errors import gather_objects

_SHOWN = 3
_MASTER = ".master"  # of the state of a parameter that fusedops.optim.AdamW steps in its place
# What torch's wrappers put into the names of parameters.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

# It is said at every save of a single process, which asked for exactly that.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


@dataclass(frozen=True)
class Loading:
    """A checkpoint that fits, and the tensors to load it into."""

    reader: dcp.FileSystemReader
    content: dict[str, Any]  # the tensors by name, to be overwritten
    stepped: list[torch.optim.Optimizer]  # the optimizers that have a state in it
    with_state: set[torch.nn.Parameter]  # the parameters that have
    groups: list[list[dict[str, Any]]]  # of all optimizers
    flat: bool  # as it was written
    # names of the parameters whose state in it has a master, and has none
    with_master: set[str]
    without_master: set[str]


class State:
    """A model and its optimizers."""

    def __init__(self, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        self.model, self.optimizers = model, optimizers

    def names(self) -> list[str]:
        """Return the names of the parameters and buffers of this rank."""
        return sorted(get_model_state_dict(self.model))

    def content(self, *, flat: bool) -> dict[str, Any]:
        """Return all tensors and numbers by name: not copies.

        ``flat`` gives each parameter its own entries of the optimizer's groups; needed where ranks
        have other parameters.
        """
        # torch makes the states of an optimizer that has none yet, and counts that as a step.
        return self._content(
            [optimizer for optimizer in self.optimizers if optimizer.state], flat=flat
        )

    def groups(self) -> list[list[dict[str, Any]]]:
        """Return the options of each optimizer's groups: all entries except the parameters."""
        return [
            [{key: value for key, value in group.items() if key != "params"} for group in groups]
            for groups in (optimizer.param_groups for optimizer in self.optimizers)
        ]

    def prepare(
        self, folder: Path, names: set[str], groups: list[list[dict[str, Any]]], *, flat: bool
    ) -> Loading:
        """Return what ``load`` needs; weights and states are not changed.

        ``names`` are those of all ranks; ``groups`` and ``flat`` are as they were when it was
        written.

        Raises:
            ValueError: it is of another model or optimizer.
        """
        reader = dcp.FileSystemReader(folder)
        there = reader.read_metadata().state_dict_metadata
        _check_fits(self._content([], flat=flat), names, there, folder)
        saved = [len(of_optimizer) for of_optimizer in groups]
        here = [len(optimizer.param_groups) for optimizer in self.optimizers]
        if here and saved != here:  # else weights alone are loaded
            mismatch = f"groups of its optimizers {saved} for {here}"
            raise ValueError(f"{folder} is of another model or optimizer: {mismatch}")
        known = self._parameters()
        with_state = {
            owner
            for name, owner in known.items()
            if any(entry.startswith(f"optimizer.state.{name}.") for entry in there)
        }
        stepped = [
            optimizer
            for optimizer in self.optimizers
            if any(with_state.intersection(group["params"]) for group in optimizer.param_groups)
        ]
        for optimizer in self.optimizers:
            # With gradients torch would not make empty states.
            optimizer.zero_grad(set_to_none=True)
        content = self._content(stepped, flat=flat)
        # Of a parameter that no step has reached there is nothing; what stands in is removed after.
        bare = {name for name, owner in known.items() if owner not in with_state}
        _check_fits(content, names, there, folder, bare)
        stored = {name for name in known.keys() - bare if f"model.{name}" in there}
        masters = {name for name in stored if f"optimizer.state.{name}{_MASTER}" in there}
        return Loading(
            reader, content, stepped, with_state, groups, flat, masters, stored - masters
        )

    def load(self, loading: Loading, process_group: dist.ProcessGroup | None) -> None:
        """Load what was prepared; all ranks of the group do."""
        content, stepped = loading.content, loading.stepped
        # Ranks may have other parameters now than when it was written: names are theirs.
        mine = [saved_group["params"] for saved_group in _groups_of(content)]
        names = [
            [param_group.get("param_names") for param_group in o.param_groups]
            for o in self.optimizers
        ]
        _read(content, loading.reader, process_group)
        for group, params in zip(_groups_of(content), mine, strict=True):
            group["params"] = params
        with self._prepared():
            set_state_dict(
                self.model,
                stepped,
                model_state_dict=content["model"],
                optim_state_dict=content.get("optimizer", {}),
                options=StateDictOptions(flatten_optimizer_state_dict=loading.flat),
            )
        for optimizer, saved, known_names in zip(
            self.optimizers, loading.groups, names, strict=False
        ):
            surplus = [param for param in optimizer.state if param not in loading.with_state]
            for parameter in surplus:
                del optimizer.state[parameter]
            if surplus:  # an optimizer that makes its states early makes the removed ones now
                optimizer.load_state_dict(optimizer.state_dict())
            if optimizer not in stepped:
                for group, values in zip(optimizer.param_groups, saved, strict=True):
                    group.update(values)
            for group, known in zip(optimizer.param_groups, known_names, strict=True):
                if known is not None:
                    group["param_names"] = known
        self._load_masters(loading, process_group)

    def _load_masters(self, loading: Loading, group: dist.ProcessGroup | None) -> None:
        """Load masters that the checkpoint lacks from its weights, or float32 weights from masters.

        A run with masters (``offload``, or weights in half precision) can thus continue from a
        checkpoint without them, and one whose weights are the masters (``zero``) from any other.
        """
        states = {param: state for o in self.optimizers for param, state in o.state.items()}
        known = self._parameters()
        masters = {
            name: states[known[name]]["master"]
            for name in loading.without_master
            if "master" in states.get(known[name], {})
        }
        weights = {
            name: {_MASTER[1:]: known[name].detach()}
            for name in loading.with_master
            if "master" not in states.get(known[name], {"master": None})
        }
        if any(gather_objects(bool(masters or weights), group)):
            content = {"model": masters, "optimizer": {"state": weights}}
            _read(content, loading.reader, group)

    def _content(self, optimizers: list[torch.optim.Optimizer], *, flat: bool) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        with self._prepared():
            model, optimizer = get_state_dict(self.model, optimizers, options=options)
        return {"model": model} | ({"optimizer": optimizer} if optimizers else {})

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Let all parameters need gradients: torch leaves out the states of those that do not.

        Torch also gives gradients of the parameters' dtypes to an optimizer without states.
        """
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        of_other_dtype = {p: p.grad_dtype for p in parameters if p.grad_dtype != p.dtype}
        for parameter in frozen:
            parameter.requires_grad_(True)
        for parameter in of_other_dtype:
            parameter.grad_dtype = None
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
            for parameter, dtype in of_other_dtype.items():
                parameter.grad_dtype = dtype

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


def _groups_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the optimizers' groups of what ``State.content`` gave; none where it is flat."""
    return content.get("optimizer", {}).get("param_groups", [])


def _check_fits(
    content: dict[str, Any],
    names: set[str],
    there: Mapping[str, Any],
    folder: Path,
    bare: Collection[str] = (),
) -> None:
    """Raise unless the checkpoint has every tensor of ``content``, in its shape, and no other.

    Parameters that are ``bare`` have no state in it.
    """
    needed, _ = flatten_state_dict(content)
    missing = sorted(
        name
        for name in needed.keys() - there.keys()
        if _parameter_of(name) not in bare
        # Masters are made of the weights.
        and not (name.endswith(_MASTER) and f"model.{_parameter_of(name)}" in there)
    )
    model = {name for name in there if name.startswith("model.")}
    surplus = sorted(model - {f"model.{name}" for name in names})
    other = []
    for name, tensor in needed.items():
        size = getattr(there.get(name), "size", None)
        if isinstance(tensor, torch.Tensor) and size is not None and size != tensor.shape:
            other.append(f"{name} {list(size)} for {list(tensor.shape)}")
    mismatches = [
        f"{what} {', '.join(names[:_SHOWN])}{' and more' if len(names) > _SHOWN else ''}"
        for what, names in (
            ("it lacks", missing),
            ("it also has", surplus),
            ("other shapes:", other),
        )
        if names
    ]
    if mismatches:
        raise ValueError(f"{folder} is of another model or optimizer: {'; '.join(mismatches)}")


def _parameter_of(name: str) -> str | None:
    """Return which parameter an entry of an optimizer's state belongs to."""
    prefix = "optimizer.state."
    return name.removeprefix(prefix).rpartition(".")[0] if name.startswith(prefix) else None
