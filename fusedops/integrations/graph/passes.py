"""``compile_passes``: fused ops in what ``torch.compile`` captures, whoever wrote the model."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fusedops._core import checks
from fusedops.integrations.graph import functions, norms, products, rotary
from fusedops.integrations.graph.match import Match, apply
from fusedops.integrations.graph.reader import GraphReader, bodies, value_of
from fusedops.integrations.hf.rules import torch_modules

# In the order in which they are tried: larger parts first.
_REWRITES: dict[str, Callable[[GraphReader, fx.Node], Match | None]] = {
    "cross_entropy": functions.cross_entropy_match,
    "attention": functions.attention_match,
    "rotary_embedding": rotary.rotary_match,
    "add_norm": norms.add_norm_match,
    "norm": norms.norm_match,
    "linear_glu": products.linear_glu_match,
    "mlp": products.mlp_match,
    "linear_act": products.linear_act_match,
    "glu": products.glu_match,
    "gelu": products.gelu_match,
    "linear": products.linear_match,
}


# What the rewrites call; Inductor's caches take no graph that calls an unknown function.
_FUNCTIONS = [
    f"{function.__module__}.{function.__name__}"
    for function in (
        *(functions.attention, functions.cross_entropy_of_rows, functions.multi_head_attention),
        *(norms.add_layer_norm, norms.add_rms_norm, norms.layer_norm, norms.rms_norm),
        *(products.gated_product, products.gelu, products.linear_act, products.linear_glu),
        *(products.mlp, rotary.rotate_with_tables),
    )
]

# On a CPU the op mlp makes a step of a ViT 6 % slower than linear_act and a product.
_DEFAULTS = tuple(name for name in _REWRITES if name != "mlp")


class CompilePasses(dict[str, Any]):
    """Options for ``torch.compile``, and what they have replaced so far; ``print`` shows it.

    Attributes:
        rewrites: names of the rewrites that are tried.
        counts: op -> number of its calls in the graphs that were compiled with these options.
    """

    rewrites: tuple[str, ...]
    counts: Counter[str]
    _graph_pass: _GraphPass

    def __str__(self) -> str:
        if not self.counts and self._graph_pass.has_run:
            return (
                "CompilePasses: no call of a fused op; the captured graphs have no part that these "
                "passes replace"
            )
        if not self.counts:
            return (
                "CompilePasses: no call of a fused op yet; graphs are captured when the compiled "
                "model is called first"
            )
        calls = ", ".join(f"{op}: {count}" for op, count in sorted(self.counts.items()))
        return f"CompilePasses: {self.counts.total()} calls of fused ops ({calls})"


class _GraphPass(CustomGraphPass):
    def __init__(self, rewrites: tuple[str, ...], counts: Counter[str]) -> None:
        self._rewrites = rewrites
        self._counts = counts
        self.has_run = False

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph and those that it runs, as checkpointing does."""
        self.has_run = True
        for node in reversed(graph.nodes):
            if node.target is operator.getitem and not node.users:  # a result that nobody reads
                graph.erase_node(node)
        for node in list(graph.nodes):
            for body in bodies(node):
                self(body.graph)
                body.recompile()
        _write_as_linear(graph)
        for name in self._rewrites:
            self._rewrite(graph, _REWRITES[name])

    def _rewrite(
        self, graph: fx.Graph, find: Callable[[GraphReader, fx.Node], Match | None]
    ) -> None:
        reader = GraphReader(graph)
        for node in reversed(list(graph.nodes)):
            if node.graph is not graph or node._erased:
                continue
            match = find(reader, node)
            if match is not None and apply(reader, match):
                self._counts[match.rewrite] += 1

    def uuid(self) -> str:
        """Return what identifies these rewrites in Inductor's caches."""
        # Whether a product is rewritten is a matter of the processor.
        chosen = f"{','.join(self._rewrites)} {torch_modules._SERVED} {_sources()}"
        return hashlib.sha256(chosen.encode()).hexdigest()


_PACKAGE = Path(__file__).parents[2]


@functools.cache
def _sources() -> str:
    """Return what identifies the code of the package, which decides about rewrites."""
    digest = hashlib.sha256()
    for source in sorted(_PACKAGE.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _write_as_linear(graph: fx.Graph) -> None:
    """Write ``addmm`` of a matrix and a bias as the linear layer that torch makes it of."""
    for node in graph.find_nodes(op="call_function", target=torch.addmm):
        bias, input, weight = (value_of(argument) for argument in (*node.args[:3], None)[:3])
        if node.kwargs or bias is None or bias.dim() != 1 or input is None or weight is None:
            continue
        with graph.inserting_before(node):
            transposed = graph.call_method("t", (node.args[2],))
            transposed.meta["example_value"] = weight.t()
            linear = graph.call_function(F.linear, (node.args[1], transposed, node.args[0]))
        linear.meta = dict(node.meta)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)


def compile_passes(rewrites: Iterable[str] | None = None) -> CompilePasses:
    """Return options that make ``torch.compile`` call fused ops, whoever wrote the model.

    They work on what Dynamo captured: norms, residual sums with the norm behind them, feed-forward
    layers, gates, rotary embeddings, attention and cross-entropy, in the forward of any function.
    The backward is that of the fused ops. A patched model can be compiled with them, too:
    ``torch.compile(patched_model, options=compile_passes())``.

    Args:
        rewrites: names of those to try; ``None``: all but ``"mlp"``, which keeps less for the
            backward and takes more time than two products. ``"attention"``, ``"cross_entropy"``,
            ``"rotary_embedding"``, ``"add_norm"``, ``"norm"``, ``"linear_glu"``, ``"mlp"``,
            ``"linear_act"``, ``"glu"`` (gates behind other products), ``"gelu"``, and ``"linear"``
            (only where the own product is faster than torch's).

    Returns:
        A ``dict`` for the argument ``options`` of ``torch.compile``, with the counts of what was
        replaced. For a mode as well: ``torch._inductor.list_mode_options(mode) | passes``.

    Raises:
        TypeError: ``rewrites`` is no list.
        ValueError: a rewrite is not known.

    Note:
        A part is not replaced where a value in the middle of it is used elsewhere, where an
        operation writes to one of its tensors, where autocast or ``no_grad`` begins or ends inside,
        and where the result would have another shape, dtype or memory layout. Results are within
        the error budget of each op. The options have no effect in ``torch.export``.

    Example:
        >>> import torch, fusedops
        >>> passes = fusedops.compile_passes()
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
        >>> _ = torch.compile(model, options=passes)(torch.ones(2, 8, dtype=torch.float32))
        >>> passes.counts["layer_norm"]
        1
    """
    if isinstance(rewrites, str) or not isinstance(rewrites, Iterable | None):
        checks.fail_type("compile_passes", "rewrites", "a list of names", rewrites)
    names = _DEFAULTS if rewrites is None else tuple(rewrites)
    unknown = [name for name in names if name not in _REWRITES]
    if unknown:
        raise ValueError(
            f"compile_passes: rewrites must be among {', '.join(_REWRITES)}, got "
            f"{', '.join(map(repr, unknown))}"
        )
    ordered = tuple(name for name in _REWRITES if name in names)
    counts: Counter[str] = Counter()
    graph_pass = _GraphPass(ordered, counts)
    options = {
        "pre_grad_custom_pass": graph_pass,
        "unsafe_marked_cacheable_functions": dict.fromkeys(_FUNCTIONS, graph_pass.uuid()),
        "pre_grad_pass_timing": "early",  # before the cache, or a hit is not counted
    }
    known = {name: value for name, value in options.items() if hasattr(inductor_config, name)}
    passes = CompilePasses(known)
    passes.rewrites, passes.counts, passes._graph_pass = ordered, counts, graph_pass
    return passes
