"""``apply`` and ``remove``: a policy onto a model, and off it again.

Nothing of the model changes but the ``forward`` of the instances that a rule names (``wrap.py``):
parameters, names, hooks and ``state_dict`` stay.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops._core.checks import UnsupportedError
from fusedops.memory import compiled, wrap
from fusedops.memory.buffers import Buffers
from fusedops.memory.offloading.offloader import OffloadSettings, offload_settings_of
from fusedops.memory.policy import RECOMPUTE, TILE, MemoryRule, Policy, winning_rule
from fusedops.memory.policy_state import PolicyState


class WrappedLayer:
    """What runs around a module that a rule names."""

    def __init__(
        self, state: PolicyState, name: str, module: nn.Module, rules: list[MemoryRule]
    ) -> None:
        self.state = state
        self.name = name
        self._module = module
        self._rules = frozenset(rules)
        self.region = winning_rule([rule for rule in rules if not rule.of_tensors], RECOMPUTE)
        self._buffers = Buffers(module)
        self._tiles_only = all(rule.treatment == TILE for rule in state.policy.rules)
        self._set_tile_tokens([rule for rule in rules if rule.treatment == TILE])
        self._make_contexts()

    def _set_tile_tokens(self, rules: list[MemoryRule]) -> None:
        module = self._module
        self.tiles, self._before = bool(rules), vars(module).get("tile_tokens")
        if not rules:
            return
        if not hasattr(type(module), "tile_tokens"):
            raise UnsupportedError(
                f"apply: {rules[-1]} names {self.name or 'the model'}, a {type(module).__name__}: "
                "tiles are for fusedops.nn.MLP and GatedMLP, and for feed-forward layers that "
                "patch has replaced"
            )
        vars(module)["tile_tokens"] = rules[-1].tile_tokens
        rule = getattr(type(module), "fused_rule", None)
        plan = rule.current_plan(module) if rule is not None else None
        if rule is not None and "mlp_tiled" not in getattr(plan, "ops", ()):
            self.forget_tiles()
            reason = getattr(plan, "note", None) or getattr(plan, "reason", "it has one product")
            name = self.name or "the model"
            raise UnsupportedError(f"apply: {name} cannot run in tiles: {reason}")

    def forget_tiles(self) -> None:
        """Give the module the tiles that it had before the policy."""
        if self.tiles:
            vars(self._module)["tile_tokens"] = self._before

    def _make_contexts(self) -> None:
        rules = self.state.policy.rules
        here = tuple(rule for rule in rules if not rule.modules or rule in self._rules)
        self.contexts = compiled.contexts_for(self.name, here, self.region)
        self.warning = compiled.left_out(here)

    def __getstate__(self) -> dict[str, Any]:
        """Return what can be pickled: not the function inside of a function."""
        return {name: value for name, value in self.__dict__.items() if name != "contexts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_contexts()

    def __call__(
        self, call: wrap.ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the module."""
        if self._tiles_only or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if torch.compiler.is_compiling():
            return compiled.run(call, self.contexts, self.warning, args, kwargs)
        with self.state.running(self.name, self._module, self._rules):
            if self.state.in_region:
                return call(*args, **kwargs)
            if self.region is not None:
                again = self.region.communication.parallel_optimizer_comm_recompute
                reshard = getattr(self._module, "set_reshard_after_forward", None)
                if again is not None and reshard is not None:  # of FSDP2
                    reshard(again)
                return self.state.run_region(call, self.region, self._buffers, args, kwargs)
            with self.state.packing():
                return call(*args, **kwargs)


def apply(
    model: nn.Module, policy: Policy, *, offload_settings: OffloadSettings | None = None
) -> None:
    """Save, recompute or offload what the forward of a model saves, as a policy says.

    Loss and gradients keep their bits; ``tile`` rounds the gradients of weights in other places. A
    policy that was applied before is taken off first.

    Args:
        model: any module; a patched one must be patched before. Wrap it in DDP afterwards;
            ``fully_shard`` may come before or after.
        policy: what to do.
        offload_settings: how tensors are copied to host memory and back.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a rule names no module of the model.
        UnsupportedError: a rule names a module whose work a fused parent does, or ``tile`` one that
            has no tiles; the model is left as it was.

    Note:
        Works in eager mode and under ``torch.compile``; forward passes without gradients run as
        they did. A module that is recomputed receives no cache of keys and values.

    Example:
        >>> import torch, fusedops
        >>> from fusedops import memory
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> memory.apply(model, memory.Policy(memory.recompute("1")))
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> memory.remove(model)
    """
    checks.module("apply", model)
    if not isinstance(policy, Policy):
        checks.fail_type("apply", "policy", "a Policy", policy)
    settings = offload_settings_of("apply", "offload_settings", offload_settings)
    remove(model)
    named = dict(model.named_modules())
    _check_patterns(policy, named)
    aside = {module for module in named.values() if wrap.unsupported_reason(module) is not None}
    state = PolicyState(model, policy, settings)
    try:
        for name, module in named.items():
            rules = [rule for rule in policy.rules if rule.names_module(name, module)]
            if rules or (module is model and any(not rule.modules for rule in policy.rules)):
                wrap.wrap(module, WrappedLayer(state, name, module, rules))
    except UnsupportedError:
        remove(model)
        raise
    for name, module in named.items():
        reason = wrap.unsupported_reason(module)
        if reason is not None and module not in aside:
            remove(model)
            raise UnsupportedError(
                f"apply: {name or 'the model'} does the work of some of its children in fused ops, "
                f"and would have to stop that ({reason}): name the parent instead"
            )


def remove(model: nn.Module) -> None:
    """Remove a policy from a model; a model without a policy is unchanged.

    Args:
        model: what ``apply`` was given.

    Raises:
        TypeError: ``model`` is no module.
        UnsupportedError: something else has put its own ``forward`` on top; nothing is changed.

    Example:
        >>> import torch, fusedops
        >>> fusedops.memory.remove(torch.nn.Linear(2, 2))
    """
    checks.module("remove", model)
    layers = [(module, _layer_of(module)) for module in model.modules()]
    for name, module in model.named_modules():
        if _covered(module):
            raise UnsupportedError(
                f"remove: something has replaced the forward of {name or 'the model'} since the "
                "policy was applied: remove that first"
            )
    for module, layer in layers:
        if layer is not None:
            layer.forget_tiles()
            wrap.unwrap(module)


def policy_state_of(model: nn.Module) -> PolicyState | None:
    """Return what stands behind a model's policy, or ``None``."""
    layers = (_layer_of(module) for module in model.modules())
    return next((layer.state for layer in layers if layer is not None), None)


def _layer_of(module: nn.Module) -> WrappedLayer | None:
    """Return our layer on a module, if it is the outermost thing there."""
    around = getattr(module.__dict__.get("forward"), "around", None)
    return around if isinstance(around, WrappedLayer) else None


def _covered(module: nn.Module) -> bool:
    """Return whether our wrapper lies under another's."""
    forward = module.__dict__.get("forward")
    while forward is not None and not isinstance(forward, wrap.Wrapped):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None and forward is not module.__dict__["forward"]


def _check_patterns(policy: Policy, named: dict[str, nn.Module]) -> None:
    for rule in policy.rules:
        if rule.modules and not any(rule.names_module(*item) for item in named.items()):
            words = [module for module in rule.modules if isinstance(module, str)]
            near = difflib.get_close_matches(words[0] if words else "", named, n=3, cutoff=0.4)
            hint = f"; the nearest names are {', '.join(map(repr, near))}" if near else ""
            raise ValueError(f"apply: {rule} names no module of the model{hint}")
