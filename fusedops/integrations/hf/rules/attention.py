"""The attention of transformers' families, through ``AttentionInterface``.

An attention module asks its configuration for the implementation's name and calls the function that
is registered under it: ours is ``"fusedops"``. That of a patched model, which belongs to the whole
model and often to several, is not touched: the patched class shows its instance a view of it in
which the name is ours. Masks are still made by the model for the implementation that it was
configured with, and each that is known has a function here which reads them in the same way.

The view is shown only while the implementation is transformers' own: whoever put another function
in its place, or in that of ``F.scaled_dot_product_attention``, sees the call. A keyword that
transformers' function knows and ours does not (the paged ``cache`` of continuous batching) has
transformers' function run.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import (
    create_position_bias_mask,
    sdpa_attention_forward,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from fusedops._core.checks import UnsupportedError
from fusedops.integrations.hf import original_code
from fusedops.integrations.hf.original_code import Places, context_obstacle, name_of, replaced
from fusedops.integrations.hf.rules.rotary import forward_with_rotary
from fusedops.integrations.hf.rules.rule import (
    PatchRule,
    copyable,
    global_hooks,
    hooks_obstacle,
    on_known_device,
    subclass,
)
from fusedops.integrations.hf.sequence_parallel import fused_name
from fusedops.integrations.hf.signatures import (
    Known,
    foreign_keyword,
    known_arguments,
    read_keywords,
)
from fusedops.ops.attention import attention

# Configured implementation -> what a patched module asks for.
NAMES = {"sdpa": "fusedops_sdpa", "eager": "fusedops_eager", "fusedops": "fusedops"}


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
    """Compute attention with the fused op, from the masks of transformers' ``sdpa``.

    Args:
        module: the attention module; its ``is_causal`` counts where the argument is absent.
        query: ``[B, H, Sq, D]``.
        key: ``[B, Hkv, Sk, D]``; heads are shared in groups.
        value: ``[B, Hkv, Sk, Dv]``.
        attention_mask: boolean or additive, broadcastable to ``[B, H, Sq, Sk]``, or ``None``.
        dropout: probability, 0 in evaluation.
        scaling: factor of the scores.
        is_causal: whether query ``i`` may see keys up to ``i`` only, where there is no mask.
        position_bias: added to the scores (T5).
        softcap: bound of the scores (Gemma 2).
        s_aux: ``[H]``, the sinks (GPT-OSS).
        **kwargs: what other implementations take; as ``sdpa``, this one has the mask instead.

    Returns:
        ``[B, Sq, H, Dv]``, and ``None`` for the weights, which are never whole.

    Raises:
        UnsupportedError: a keyword that only ``sdpa`` knows, with one that only this one knows.
    """
    unknown = foreign_keyword(_SDPA_ARGUMENTS, kwargs)
    if unknown is not None:
        if softcap is not None or s_aux is not None:
            raise UnsupportedError(
                f"fusedops attention: {unknown} is an argument of transformers' sdpa, which has "
                "neither softcap nor sinks; choose another attn_implementation"
            )
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
            **kwargs,
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # A single query with a KV cache sees all keys. Equal lengths are compared first, which adds no
    # guard on symbolic sizes.
    is_prefill = query.shape[2] == key.shape[2] or query.shape[2] > 1
    causal = attention_mask is None and causal and is_prefill
    if position_bias is not None:
        attention_mask = create_position_bias_mask(
            position_bias, attention_mask, causal, query, key
        )
        causal = False
    options = {"is_causal": bool(causal), "scale": scaling, "softcap": softcap, "sinks": s_aux}
    return _fused(query, key, value, attention_mask, dropout, **options)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    grouped = bool(query.shape[1] != key.shape[1])
    output = attention(query, key, value, mask, dropout_p, enable_gqa=grouped, **options)
    return output.transpose(1, 2).contiguous(), None


def attend_as_sdpa(
    *args: Any, softcap: Any = None, s_aux: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' ``sdpa`` does, which knows neither soft-cap nor sinks."""
    if softcap is not None and _SDPA_READS_SOFTCAP:  # from 5.23 on it raises
        return sdpa_attention_forward(*args, softcap=softcap, **kwargs)
    return attend(*args, **kwargs)


def attend_as_eager(
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
    """Compute attention as the decoder families' ``eager_attention_forward``, with the fused op.

    Arguments and result are those of ``attend``, but the mask is always added and says all
    (causality and the window are in it), and ``dropout`` counts in training only.
    """
    implementations = getattr(module, "implementations", None)
    if implementations is not None and implementations.eager_knows(kwargs):
        known = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "s_aux": s_aux}
        given = {name: value for name, value in known.items() if value is not None}
        original = implementations.eager[0].known
        return original(module, query, key, value, attention_mask, **given, **kwargs)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = attention_mask.to(query.dtype)
    dropout_p = dropout if module.training else 0.0
    options = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    return _fused(query, key, value, attention_mask, dropout_p, **options)


_SDPA_ARGUMENTS = known_arguments(attend, sdpa_attention_forward)
_SDPA_READS_SOFTCAP = "softcap" in read_keywords(sdpa_attention_forward)

# An implementation without a mask function gets no mask, and ignores padding without a word.
for _name, _function, _mask in (
    ("fusedops", attend, sdpa_mask),
    (NAMES["sdpa"], attend_as_sdpa, sdpa_mask),
    (NAMES["eager"], attend_as_eager, eager_mask),
):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, _mask)


_SDPA = original_code.functions("scaled_dot_product_attention")


@dataclass(frozen=True)
class Implementations:
    """Where an attention class looks its implementation up, and what stands for it."""

    registry: Any  # the ``AttentionInterface`` of its file, which may override entries for itself
    # The places of its ``eager_attention_forward``, where ``attend_as_eager`` computes what that
    # does; else ``None``
    eager: Places | None
    eager_arguments: Known | None  # those of that function which ``attend_as_eager`` knows

    @staticmethod
    def of(original: type[nn.Module], *, eager: bool) -> Implementations:
        """Return those of a class."""
        code: Any = inspect.unwrap(original.forward)
        registry = code.__globals__.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        name = "eager_attention_forward"
        if not eager or name not in code.__globals__:
            return Implementations(registry, None, None)
        places = original_code.global_function(code.__globals__["__name__"], name)
        function = places[0].known
        known = None if function is None else known_arguments(attend_as_eager, function)
        return Implementations(registry, places, known)

    def eager_knows(self, keywords: dict[str, Any]) -> bool:
        """Return whether ``eager_attention_forward`` knows one that ``attend_as_eager`` lacks."""
        known = self.eager_arguments
        return known is not None and foreign_keyword(known, keywords) is not None

    def obstacle(self, module: Any, configured: str) -> str | None:
        """Return why the implementation that ``module`` is configured with must stay, or not."""
        function = self.registry.get(configured)
        if configured == "sdpa":
            known = function is sdpa_attention_forward or _shared(function) is not None
            reason = replaced(_SDPA) if known else _entry("sdpa", function)
        elif configured == "fusedops":
            reason = None if function is attend else _entry(configured, function)
        elif configured == "eager" and self.eager is not None:
            reason = replaced(self.eager) if function is None else _entry("eager", function)
            watched = hooks_obstacle("the module", module) or global_hooks()
            if reason is None and watched is not None:
                reason = f"it gives its attention weights away: {watched}"
        else:
            names = "'sdpa'" if self.eager is None else "'sdpa' or 'eager'"
            reason = (
                f"its attention is configured as {configured!r}: "
                f"attn_implementation={names} is known"
            )
        return reason

    def name(self, configured: str) -> str:
        """Return what a patched module asks for in the place of ``configured``."""
        if configured == "sdpa":
            return _shared(self.registry.get(configured)) or NAMES[configured]
        return NAMES[configured]


def _shared(function: Any) -> str | None:
    return None if function is sdpa_attention_forward else fused_name(function, attend_as_sdpa)


def _entry(name: str, function: Any) -> str:
    return f"the attention function {name!r} was replaced by {name_of(function)}"


class _View:
    """A configuration in which the attention's implementation is ours."""

    def __init__(self, config: Any, name: str) -> None:
        self._config = config
        self._attn_implementation = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Attention(nn.Module):
    """The configuration of every patched attention module."""

    implementations: Implementations

    @property
    def config(self) -> Any:
        """The model's configuration; a view of it while the fused op runs."""
        config = self.__dict__["config"]
        weight = _first_parameter(self)
        if weight is None or not on_known_device(weight):
            return config
        # Read once: transformers' configurations take a microsecond or two for an attribute.
        configured, known = config._attn_implementation, self.implementations
        if known.obstacle(self, configured) is not None or context_obstacle() is not None:
            return config
        return _View(config, known.name(configured))

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["config"] = config


def _first_parameter(module: nn.Module) -> torch.Tensor | None:
    """Return a parameter of a module; where its children have theirs, without a walk over all."""
    for child in module._modules.values():
        if child is not None:
            for parameter in child._parameters.values():
                if parameter is not None:
                    return parameter
    return next(module.parameters(), None)


def _obstacle(module: Any, implementations: Implementations) -> str | None:
    """Return why the module's configured attention must stay unchanged, or ``None``."""
    if _first_parameter(module) is None:
        return "it has no parameters: its projections are quantised"
    return implementations.obstacle(module, module.__dict__["config"]._attn_implementation)


@copyable
def attention_rule(
    original: type[nn.Module],
    module_name: str,
    absorbs: tuple[str, ...] = (),
    *,
    eager: bool = False,
    rotary: bool = False,
    half_tables: bool = False,
) -> PatchRule:
    """Return the rule for an attention class that asks ``self.config`` for its implementation.

    Args:
        original: the class.
        module_name: holds the patched class.
        absorbs: names of the children whose work the attention's function does.
        eager: whether the class's ``eager`` is ``attend_as_eager``, and its caller drops the
            weights.
        rotary: whether its ``apply_rotary_pos_emb`` is Llama's or GPT-NeoX's: pairs are halves.
        half_tables: as in ``forward_with_rotary``.
    """
    forward = forward_with_rotary(original, half_tables=half_tables) if rotary else None
    methods = {} if forward is None else {"forward": forward}
    known = Implementations.of(original, eager=eager)
    return PatchRule(
        original,
        subclass(original, _Attention, module_name, implementations=known, **methods),
        ("attention", "rotary_embedding") if methods else ("attention",),
        "O2",
        obstacle=partial(_obstacle, implementations=known),
        absorbs=absorbs,
        note=_note,
    )


def _note(module: Any) -> str | None:
    configured = module.__dict__["config"]._attn_implementation
    if module.implementations.name(configured) not in NAMES.values():
        return f"inside {name_of(module.implementations.registry.get(configured))}"
    if configured == "eager":
        return "eager, but gives its caller no weights until a hook asks for them"
    return None
