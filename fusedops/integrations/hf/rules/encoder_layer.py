"""Layers of BERT's family in inference: one function calls the ops of all submodules.

The calls of a layer's 17 modules take 0.2 ms in Python (one Zen 4 core), a good part of the time
of a short query. So the layer's forward reads their parameters itself and calls the ops that their
fused forwards would call, which gives the same bits. It does so on the CPU, in evaluation, without
gradients, and only if nothing hangs on a submodule: ``values_of_block`` of the compiled host
module compares classes, hooks and watch lists of all of them. In all other cases the original's
forward runs and calls the submodules, each of which has its own rule.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops._core.tracing import is_traced
from fusedops.integrations.hf import known_code
from fusedops.integrations.hf.original_code import (
    KNOWN,
    WatchedAttribute,
    WatchList,
    is_plain,
    watch_list,
)
from fusedops.integrations.hf.rules import activations
from fusedops.integrations.hf.rules.rule import (
    NOT_APPLICABLE,
    FusionPlan,
    PatchRule,
    Refusal,
    global_hooks,
    rule_of,
    runs_here,
    subclass,
)
from fusedops.integrations.hf.rules.torch_modules import LayerNorm, Linear, own_product
from fusedops.runtime.host_module import load

_values_of_block: Any = getattr(load(), "values_of_block", None)  # none without compiled kernels
_linear_act = torch.ops.fusedops.linear_act.default
_attention = torch.ops.fusedops.attention.default
_add_layer_norm = torch.ops.fusedops.add_layer_norm.default

_PLAIN = (torch.Tensor, nn.Parameter)
_SECTION = "encoder"  # of known_code.toml: the classes between a layer and those with a rule
_ATTENTION, _SELF_ATTENTION = "bert.BertAttention", "bert.BertSelfAttention"
_LAYER = "bert.BertLayer"
# Submodules that their own rules replace -> the code and its section.
_REPLACED = {
    "attention.output": ("bert", "bert.BertSelfOutput"),
    "intermediate": (_SECTION, "bert.BertIntermediate"),
    "output": ("bert", "bert.BertSelfOutput"),
}
_Known = dict[str, tuple[type, WatchList]]  # class of this name in the layer's file, what it reads
_IMPLEMENTATIONS = ("sdpa", "fusedops")
_OPS = ("linear_act", "attention", "add_layer_norm")
_NOTE = "in inference on the CPU; otherwise it calls its submodules"
_DENSE = ("weight", "bias")
_NORM = ("normalized_shape", "weight", "bias", "eps")
# Path of a submodule -> the attributes and parameters that the forward reads, in the order in which
# ``_compute`` takes them.
_PARTS: dict[str, tuple[str, ...]] = {
    "": ("is_decoder", "chunk_size_feed_forward"),
    "attention": ("is_cross_attention",),
    "attention.self": ("config", "is_causal", "attention_head_size", "scaling"),
    "attention.self.query": _DENSE,
    "attention.self.key": _DENSE,
    "attention.self.value": _DENSE,
    "attention.self.dropout": (),
    "attention.output": (),
    "attention.output.dense": _DENSE,
    "attention.output.dropout": (),
    "attention.output.LayerNorm": _NORM,
    "intermediate": (),
    "intermediate.dense": _DENSE,
    "intermediate.intermediate_act_fn": (),
    "output": (),
    "output.dense": _DENSE,
    "output.dropout": (),
    "output.LayerNorm": _NORM,
}
_CLASSES: dict[str, type[nn.Module]] = {
    "query": Linear,
    "key": Linear,
    "value": Linear,
    "dense": Linear,
    "dropout": nn.Dropout,
    "LayerNorm": LayerNorm,
}


class _Block(NamedTuple):
    """What ``values_of_block`` compares for layers whose submodules have certain classes."""

    nodes: tuple[Any, ...]
    attributes: tuple[WatchedAttribute, ...]
    activation: str  # as in ``linear_act``
    interface: Any  # what the attention asks for its function, a ``FusedInterface``

    @property
    def classes(self) -> list[type]:
        return [node[2] for node in self.nodes]


def encoder_layer_rule(original: type[nn.Module]) -> PatchRule:
    """Return the rule for a layer with the code of ``BertLayer``."""
    known = _known_classes(original)
    blocks: list[_Block] = []  # that of the last layer whose classes were looked at

    def plan(layer: Any) -> FusionPlan | Refusal:
        return FusionPlan(_OPS, note=_NOTE) if known is not None else NOT_APPLICABLE

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_states, mask = _inputs(args, kwargs)
        if hidden_states is not None:
            values = _values(self, blocks, known)
            if values is not None:
                return _compute(hidden_states, mask, blocks[0].activation, *values)
        return original.forward(self, *args, **kwargs)

    # What the original's forward reads is compared by ``values_of_block`` (``_lists``).
    patched = subclass(original, forward=forward)
    return PatchRule(original, patched, "O2", plan, copies_code=True)


def _known_classes(original: type[nn.Module]) -> _Known | None:
    """Return a layer's class and those of its attention, with all that their code reads."""
    known = {}
    for name, cls in vars(sys.modules[original.__module__]).items():
        if isinstance(cls, type) and issubclass(cls, nn.Module) and name.endswith("Attention"):
            listed = known_code.known_as(cls, _SECTION)
            if listed is not None:
                known[listed] = (cls, watch_list(cls))
    known[_LAYER] = (original, watch_list(original))
    return known if len(known) == 3 else None


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return hidden states and mask of a call that is plain inference on the CPU, else ``None``."""
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or is_traced()
        or global_hooks() is not None
    ):
        return None, None
    hidden_states, mask, *others = args + (None,) * (2 - len(args))
    for name, value in kwargs.items():
        if name == "attention_mask":
            mask = value
        elif name == "hidden_states":
            hidden_states = value
        elif name != "position_ids" and value is not None and value is not False:
            return None, None
    plain = (
        type(hidden_states) is torch.Tensor
        and hidden_states.dim() == 3
        and runs_here(hidden_states)
        and own_product(hidden_states)
        and all(other is None for other in others)
        and (mask is None or (is_plain(mask) and _fits(mask, hidden_states)))
    )
    return (hidden_states, mask) if plain else (None, None)


def _fits(mask: torch.Tensor, hidden_states: torch.Tensor) -> bool:
    """Return whether the op takes a mask as it is: ``[B or 1, H or 1, S or 1, S]``."""
    batch, seq_len, _ = hidden_states.shape
    shape = mask.shape
    return (
        len(shape) == 4
        and shape[0] in (1, batch)
        and shape[1] == 1
        and shape[2] in (1, seq_len)
        and shape[3] == seq_len
        and mask.dtype in (torch.bool, hidden_states.dtype)
    )


def _values(layer: Any, blocks: list[_Block], known: Any) -> Any:
    """Return what ``_compute`` reads of a layer, ``None`` where submodules must be called."""
    if _values_of_block is None or known is None:
        return None
    values = _read(layer, blocks[0]) if blocks else None
    if values is None and not (blocks and _classes(layer) == blocks[0].classes):
        blocks[:] = filter(None, [_block_of(layer, known)])
        values = _read(layer, blocks[0]) if blocks else None
    if values is None:
        return None
    is_decoder, chunk_size, is_cross_attention, config, is_causal, *rest = values
    if is_decoder or chunk_size or is_cross_attention or is_causal:
        return None
    configured = config._attn_implementation
    known_attention = configured in _IMPLEMENTATIONS
    fused = known_attention and blocks[0].interface.obstacle(configured) is None
    return rest if fused else None


def _read(layer: Any, block: _Block) -> Any:
    return _values_of_block(layer, block.nodes, block.attributes, _PLAIN)


def _classes(layer: nn.Module) -> list[type]:
    modules = dict(layer.named_modules())
    return [type(modules.get(path)) for path in _PARTS]


def _block_of(layer: nn.Module, known: _Known) -> _Block | None:
    """Return what to compare for a layer, ``None`` if a submodule is of another class."""
    modules: dict[str, Any] = dict(layer.named_modules())
    nodes = []
    watched: dict[tuple[int, str], WatchedAttribute] = {}
    places = {path: place for place, path in enumerate(_PARTS)}
    for path, fields in _PARTS.items():
        lists = _lists(path, modules[path], known) if path in modules else None
        if lists is None:
            return None
        for listed in lists:
            watched |= {(id(entry.owner), entry.name): entry for entry in listed.attributes}
        parent, _, name = path.rpartition(".")
        methods = tuple(dict.fromkeys(method for listed in lists for method in listed.methods))
        place = places[parent] if path else -1
        nodes.append((place, name, type(modules[path]), methods, fields))
    activation = activations.activation_name(modules["intermediate.intermediate_act_fn"])
    interface = modules["attention.self"].fused_interface
    return _Block(tuple(nodes), tuple(watched.values()), str(activation), interface)


def _lists(path: str, module: Any, known: _Known) -> list[WatchList] | None:
    """Return the watch lists of a submodule, ``None`` if its class is another than is known."""
    cls, rule, name = type(module), rule_of(module), path.rpartition(".")[2]
    original = rule.original if rule is not None and rule.patched is cls else None
    if path == "attention":
        return [known[_ATTENTION][1]] if cls is known[_ATTENTION][0] else None
    lists = [KNOWN.get(cls)]
    if path in ("", "attention.self"):
        expected, listed = known[_SELF_ATTENTION if path else _LAYER]
        fits = original is expected
        lists.append(listed)
    elif name in _CLASSES:
        fits = cls is _CLASSES[name]
    elif name == "intermediate_act_fn":  # of a class that is one activation in every state
        fits = isinstance(activations.KNOWN.get(cls), str) and not module._modules
    else:
        section, code = _REPLACED[path]
        fits = original is not None and known_code.known_as(original, section) == code
    read = [listed for listed in lists if listed is not None]
    return read if fits and len(read) == len(lists) else None


def _compute(
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None,
    activation: str,
    head_dim: int,
    scale: float,
    *parameters: Any,
) -> torch.Tensor:
    """Return the output of a layer: attention, residual sum, norm, feed-forward layer, the same."""
    query, query_bias, key, key_bias, value, value_bias = parameters[:6]
    dense, dense_bias, shape, weight, bias, eps = parameters[6:12]
    up, up_bias, down, down_bias, last_shape, last_weight, last_bias, last_eps = parameters[12:]
    heads = (*hidden_states.shape[:2], -1, head_dim)
    q = _linear_act(hidden_states, query, query_bias, "identity", False)[0]
    k = _linear_act(hidden_states, key, key_bias, "identity", False)[0]
    v = _linear_act(hidden_states, value, value_bias, "identity", False)[0]
    q, k, v = q.view(heads), k.view(heads), v.view(heads)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    # No slopes, sinks and seed; no dropout, window and soft-cap; nothing is kept for a backward.
    attended = _attention(q, k, v, mask, None, None, None, 0.0, scale, -1, -1, 0.0, False)[0]
    attended = attended.transpose(1, 2).reshape(hidden_states.shape)
    branch = _linear_act(attended, dense, dense_bias, "identity", False)[0]
    dtype = hidden_states.dtype
    norm = (shape, weight, bias, None, eps, 0.0, dtype)
    hidden_states = _add_layer_norm(branch, hidden_states, *norm)[0]
    branch = _linear_act(hidden_states, up, up_bias, activation, False)[0]
    branch = _linear_act(branch, down, down_bias, "identity", False)[0]
    norm = (last_shape, last_weight, last_bias, None, last_eps, 0.0, dtype)
    return _add_layer_norm(branch, hidden_states, *norm)[0]
