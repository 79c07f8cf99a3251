"""The layers of a model: which modules a policy chooses among, and which ones a report names.

Layers are *blocks*: modules with children, of a class that repeats, wherever they are registered (a
``ModuleList``, a ``ModuleDict``, attributes, several stacks). Where no class repeats they are the
members of a container.
"""

from __future__ import annotations

from collections import defaultdict

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
Group = dict[str, nn.Module]


def lists_of(model: nn.Module) -> Group:
    """Return the layers of a model that a policy may treat one by one, by name, in their order."""
    named = {name: module for name, module in model.named_modules() if name}
    layers: Group = {}
    while group := _largest_class(named):
        layers |= group
        excluded = layers.keys() | {outer for name in layers for outer in outer_names(name)}
        named = {
            name: module
            for name, module in named.items()
            if name not in excluded and not any(outer in layers for outer in outer_names(name))
        }
    layers = layers or _largest_container(model)
    return {name: module for name, module in model.named_modules() if name in layers}


def _largest_class(named: Group) -> Group:
    """Return the blocks of the class with most parameters; empty where no class repeats.

    Blocks that form a list, members of a container or numbered attributes, are preferred: the two
    stacks of an encoder and a decoder may be of one class as well.
    """
    by_class: dict[type[nn.Module], Group] = defaultdict(dict)
    for name, module in named.items():
        group = by_class[type(module)]
        is_block = runs(module) and type(module) is not nn.Sequential and any(module.children())
        if is_block and not any(outer in group for outer in outer_names(name)):
            group[name] = module
    groups = [group for group in by_class.values() if len(group) > 1]
    most = max(map(_size, groups), default=0)
    lists = [group for group in groups if all(_is_listed(name, named) for name in group)]
    large = [group for group in lists if 2 * _size(group) >= most]
    return max(large or groups, key=_size, default={})


def _largest_container(model: nn.Module) -> Group:
    """Return the members of the container with most parameters; empty where there is none."""
    groups = []
    for name, module in model.named_modules():
        if isinstance(module, _CONTAINERS):
            prefix = f"{name}." if name else ""
            groups.append({f"{prefix}{child}": member for child, member in module.named_children()})
    return max(groups, key=_size, default={})


def _size(group: Group) -> int:
    parameters = {parameter for module in group.values() for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in parameters)


def _is_listed(name: str, named: Group) -> bool:
    return name[-1].isdigit() or isinstance(named.get(name.rpartition(".")[0]), _CONTAINERS)


def outer_names(name: str) -> list[str]:
    """Return the names of the modules that a module is inside of, but the model."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def names_of(model: nn.Module) -> dict[str, str]:
    """Return the layer that each module of a model belongs to, by the names of both.

    A module inside a layer belongs to it. A module that contains layers belongs to itself, and so
    does a sibling of layers. A container without a forward is no layer, but its children are.
    """
    holders = {outer for name in lists_of(model) for outer in outer_names(name)}
    names: dict[str, str] = {}

    def look(name: str, module: nn.Module, layer: str | None) -> None:
        if layer is None and name and name not in holders and runs(module):
            layer = name
        names[name] = name if layer is None else layer
        for child, submodule in module.named_children():
            look(f"{name}.{child}" if name else child, submodule, layer)

    look("", model, None)
    return names


def runs(module: nn.Module | None) -> bool:
    """Return whether a module has a forward: lists and dictionaries of modules have none."""
    forward = getattr(type(module), "forward", None)
    return forward is not nn.Module.forward
