"""The attention of transformers' families, through ``AttentionInterface``.

A patched class has the same code, for which the registry's global name stands for
``FusedInterface``: it answers with a fused function where the implementation is transformers' own,
and with what the registry holds otherwise. Each fused function reads the masks that the model makes
for the implementation in whose place it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import (
    create_position_bias_mask,
    sdpa_attention_forward,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from fusedops._core.checks import UnsupportedError
from fusedops.integrations.hf import known_code, original_code
from fusedops.integrations.hf.original_code import (
    WatchList,
    is_plain,
    name_of,
    names_in,
    replaced,
    with_inner,
    with_others,
)
from fusedops.integrations.hf.rules.rotary import fused_rotary
from fusedops.integrations.hf.rules.rule import (
    FusionPlan,
    PatchRule,
    Refusal,
    global_hooks,
    hooks_obstacle,
    runs_here,
    subclass,
)
from fusedops.ops.attention import attention

_REGISTRY, _EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the fused op, from the arguments of transformers' ``sdpa``.

    Query, key and value are ``[B, H, S, D]``; those two may have fewer heads, shared in groups. The
    mask is boolean or additive. Without one, ``is_causal`` or the module's attribute of that name
    says whether query ``i`` may see keys up to ``i`` only. ``position_bias`` (T5) is added to the
    scores, ``softcap`` (Gemma 2) is their bound, and ``s_aux`` are the sinks (GPT-OSS), ``[H]``.
    Further keywords are for other implementations.

    Returns:
        ``[B, Sq, H, Dv]``, and ``None`` for the weights.

    Raises:
        UnsupportedError: a keyword that only ``sdpa`` knows.
    """
    unknown = _unknown_keyword(_SDPA_ARGUMENTS, kwargs)
    if unknown is not None:
        raise UnsupportedError(
            f"fusedops attention: {unknown} is an argument of transformers' sdpa that the fused "
            "one does not know; choose another attn_implementation"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # A single query with a KV cache sees all keys. Equal lengths are compared first, which adds no
    # guard on symbolic sizes.
    is_prefill = query.shape[2] == key.shape[2] or query.shape[2] > 1
    causal = attention_mask is None and causal and is_prefill
    if causal and query.shape[2] != key.shape[2]:
        # No query sees the later keys of a cache: one that is allocated, or that a checkpointed
        # layer has filled once before its second forward, whose saved tensors must be the same.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
    if position_bias is not None:
        attention_mask = create_position_bias_mask(
            position_bias, attention_mask, causal, query, key
        )
        causal = False
    options: Any = {"is_causal": bool(causal), "scale": scaling, "softcap": softcap, "sinks": s_aux}
    grouped = bool(query.shape[1] != key.shape[1])
    output = attention(query, key, value, attention_mask, dropout, enable_gqa=grouped, **options)
    return output.transpose(1, 2).contiguous(), None


def _further_arguments(stock: Callable[..., Any], fused: Callable[..., Any]) -> dict[str, Any]:
    """Return name and default of the arguments that only the stock function names.

    A later transformers may have given it one, as 5.23 gave ``cache`` to ``sdpa``.
    """
    known = inspect.signature(fused).parameters
    parameters = inspect.signature(stock).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind in named and parameter.name not in known
    }


def _unknown_keyword(further: Mapping[str, Any], keywords: Mapping[str, Any]) -> str | None:
    """Return a keyword of a call that is none of ours and no default, or ``None``."""
    for name, default in further.items():
        if name in keywords and keywords[name] is not default:
            return name
    return None


def attend_as_sdpa(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    softcap: Any = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' ``sdpa`` does, which knows neither soft-cap nor sinks."""
    if (
        (softcap is not None and _SDPA_READS_SOFTCAP)  # it raises from 5.23 on
        or _unknown_keyword(_SDPA_ARGUMENTS, kwargs) is not None
        or not _serves(module, query, key, value, attention_mask)
    ):
        options = {} if softcap is None else {"softcap": softcap}
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, *args, **options, **kwargs
        )
    return attend(module, query, key, value, attention_mask, *args, **kwargs)


def _serves(module: Any, query: Any, key: Any, value: Any, mask: Any) -> bool:
    """Return whether the op takes these; sizes that do not fit are for transformers to refuse."""
    groups = getattr(module, "num_key_value_groups", None)
    return (
        runs_here(query)
        and is_plain(key)
        and is_plain(value)
        and (groups is None or groups * key.shape[1] == query.shape[1])
        and (mask is None or (is_plain(mask) and mask.shape[-1] == key.shape[2]))
    )


_SDPA_ARGUMENTS = _further_arguments(sdpa_attention_forward, attend)
_SDPA_READS_SOFTCAP = "softcap" in sdpa_attention_forward.__code__.co_consts
_SDPA = original_code.watched_function(sdpa_attention_forward.__module__, "sdpa_attention_forward")

# An implementation without a mask function gets no mask, and ignores padding without a word.
AttentionInterface.register("fusedops", attend)
AttentionMaskInterface.register("fusedops", sdpa_mask)


class FusedInterface:
    """What a patched class reads in the place of the registry of its file.

    Args:
        namespace: the globals of the file.
        eager: whether ``attend_as_eager`` computes what the file's eager function does.
    """

    def __init__(self, namespace: dict[str, Any], *, eager: bool) -> None:
        self.registry = namespace.get(_REGISTRY, ALL_ATTENTION_FUNCTIONS)
        self._namespace = namespace
        # Implementation -> its function, and what that reads.
        self._known: dict[str, tuple[Any, WatchList]] = {"sdpa": (sdpa_attention_forward, _SDPA)}
        if eager and _EAGER in namespace:
            watched = original_code.watched_function(namespace["__name__"], _EAGER)
            self._known["eager"] = (None, watched)
            self._eager_arguments = _further_arguments(namespace[_EAGER], self.attend_as_eager)
        self._names = " or ".join(map(repr, self._known))
        self._known["fusedops"] = (attend, WatchList())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.registry, name)

    def get_interface(self, name: str, default: Any) -> Any:
        """Return the fused function for an implementation, or what the registry returns."""
        stock = self.registry.get_interface(name, default)
        if self.obstacle(name) is not None:
            return stock
        return {"sdpa": attend_as_sdpa, "eager": self.attend_as_eager}.get(name, stock)

    def obstacle(self, configured: str) -> str | None:
        """Return why the function of a configured implementation must stay, or ``None``."""
        if configured not in self._known:
            known = f"attn_implementation={self._names} is known"
            return f"its attention is configured as {configured!r}: {known}"
        stock, watched = self._known[configured]
        function = self.registry.get(configured)
        if function is not stock:
            return f"the attention function {configured!r} was replaced by {name_of(function)}"
        return replaced(watched)

    def attend_as_eager(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention as the decoder families' ``eager_attention_forward``.

        Arguments and result are those of ``attend``, but the mask is always added and says all
        (causality and the window are in it), and ``dropout`` counts in training only.
        """
        if (
            not _serves(module, query, key, value, attention_mask)
            or _unknown_keyword(self._eager_arguments, kwargs) is not None
            or weights_obstacle(module) is not None
        ):
            known = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "s_aux": s_aux}
            given = {name: value for name, value in known.items() if value is not None}
            output: tuple[torch.Tensor, torch.Tensor | None] = self._namespace[_EAGER](
                module, query, key, value, attention_mask, **given, **kwargs
            )
            return output
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            attention_mask = attention_mask.to(query.dtype)
        dropout = dropout if module.training else 0.0
        options: Any = {"is_causal": False, "softcap": softcap, "s_aux": s_aux}
        return attend(module, query, key, value, attention_mask, dropout, scaling, **options)


def weights_obstacle(module: Any) -> str | None:
    """Return why the weights of the attention must be there, or ``None``."""
    hooks = hooks_obstacle("the module", module) or global_hooks()
    return None if hooks is None else f"it gives its attention weights away: {hooks}"


def _only_renames(function: Any) -> bool:
    """Return whether ``function`` is no wrapper, or one that only accepts arguments' old names."""
    while hasattr(function, "__wrapped__"):
        home = getattr(function, "__globals__", {}).get("__name__")
        if home != "transformers.utils.deprecation":
            return False
        function = function.__wrapped__
    return True


def attention_rule(original: type[nn.Module]) -> PatchRule | None:
    """Return the rule for a class that asks the registry for its function, or ``None``.

    Raises:
        UnsupportedError: the forward is no plain function, or other code wraps it.
    """
    function: Any = inspect.unwrap(original.forward)
    code = getattr(function, "__code__", None)
    if code is None or hasattr(original, "config"):
        return None
    asks = {_REGISTRY, "config", "_attn_implementation"} <= set(names_in(code))
    # One that compares the name with "sdpa" itself does something else for another name.
    if not asks or any("sdpa" in part.co_consts for part in with_inner(code)):
        return None
    interface = FusedInterface(function.__globals__, eager=_eager_is_known(original, function))
    others = {_REGISTRY: interface} | fused_rotary(function)
    forward = with_others(original.forward, others, __name__)
    if forward is None or not _only_renames(original.forward):
        raise UnsupportedError(f"{original.__name__}.forward cannot run with another registry")
    ops = ("attention", "rotary_embedding") if len(others) > 1 else ("attention",)

    def plan(module: Any) -> FusionPlan | Refusal:
        configured = module.config._attn_implementation
        reason, note = interface.obstacle(configured), None
        if configured == "eager":
            reason = reason or weights_obstacle(module)
            note = "eager, but gives its caller no weights until a hook asks for them"
        return FusionPlan(ops, note=note) if reason is None else Refusal(reason)

    patched = subclass(original, forward=forward, fused_interface=interface)
    return PatchRule(original, patched, "O2", plan, copies_code=True)


def _eager_is_known(cls: type[nn.Module], forward: Any) -> bool:
    """Return whether the ``eager`` of an attention is ``attend_as_eager``.

    Its caller must drop the weights: those that are asked for are then recorded by hooks. Sinks
    must be an argument, because the function of GPT-OSS reads them from the module.
    """
    eager = forward.__globals__.get(_EAGER)
    recorded = (
        getattr(value, "_can_record_outputs", None) or {}
        for value in vars(sys.modules[cls.__module__]).values()
        if isinstance(value, type)
    )
    if eager is None or not any(_records(outputs.get("attentions"), cls) for outputs in recorded):
        return False
    known = known_code.known_as(eager, "eager")
    keywords = (names for names in forward.__code__.co_consts if isinstance(names, tuple))
    sinks = any("s_aux" in names for names in keywords)
    return known is not None and (sinks or not known.startswith("gpt_oss."))


def _records(recorded: Any, cls: type[nn.Module]) -> bool:
    """Return whether what a model records as its attentions is the output of a class."""
    targets = recorded if isinstance(recorded, list | tuple) else [recorded]
    return any(getattr(target, "target_class", target) is cls for target in targets)
