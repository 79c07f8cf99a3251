"""Policies inside torch.compile: the same numbers, and the partitioner obeys."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import encoder, encoder_loss, gpt2, language_loss, results, tokens
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fusedops import memory
from fusedops.models import Transformer, preset


class Graphs:
    """A backend that keeps the graphs of the forward and the backward, and runs them in eager."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self.compile = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def _keep(graphs: list[torch.fx.GraphModule]) -> Any:
        def compile(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        return compile

    def calls(self, graphs: list[torch.fx.GraphModule], name: str) -> int:
        return sum(name in str(node.target) for graph in graphs for node in graph.graph.nodes)


def _assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the results of a compiled model with those of the model."""
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name if name == "loss" else f"_orig_mod.{name}"], wanted)


@pytest.mark.ci(every=2)
@pytest.mark.parametrize(
    ("rules", "attentions"),
    [
        ([memory.recompute("*")], 2),
        ([memory.recompute("*"), memory.save(ops="attention")], 0),
        ([memory.recompute("*"), memory.save("1")], 1),
        ([memory.recompute(ops="attention")], 2),
        ([memory.save("*")], 0),
        ([memory.offload("*")], 0),
        ([memory.recompute("transformer.h.*")], 2),
    ],
    ids=str,
)
def test_compiled_layers_recompute_what_the_policy_says(rules: list[Any], attentions: int) -> None:
    model, loss = encoder(layers=2, dropout=0.0), encoder_loss
    if rules[0].modules == ("transformer.h.*",):
        model = gpt2(layers=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        loss = language_loss
    expected = results(model, loss)
    memory.apply(model, memory.Policy(*rules))
    graphs = Graphs()
    found = results(torch.compile(model, backend=graphs.compile, fullgraph=True), loss)
    assert graphs.calls(graphs.forward, "fusedops.attention.default") == 2
    assert graphs.calls(graphs.backward, "fusedops.attention.default") == attentions
    _assert_close(found, expected)


def _saved_bytes(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> int:
    saved: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with hooks:
        loss(model)
    memory_of = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in saved}
    for parameter in model.parameters():
        memory_of.pop(parameter.untyped_storage()._cdata, None)
    return sum(memory_of.values())


@pytest.mark.slow
@pytest.mark.parametrize("applied_first", [True, False], ids=["applied first", "compiled first"])
def test_policies_of_compiled_models_keep_gradients_and_save_less(applied_first: bool) -> None:
    ids = tokens(2, 32)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Transformer(preset("tiny-llama"))

    def loss(model: nn.Module) -> torch.Tensor:
        return model(ids, ids).total

    model = make()
    expected = results(model, loss)
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    plain = _saved_bytes(compiled, loss)
    whole = memory.recompute("layers.*")
    for rules, share in (
        ([whole], 0.4),
        ([memory.recompute("")], 0.4),
        ([whole, memory.save(ops="attention")], 0.5),
        ([whole, memory.offload("layers.*")], 0.4),
        ([memory.recompute("layers.*", mp_comm_recompute=False)], 0.4),
        ([memory.recompute(ops=["linear_glu", "rms_norm"])], 1.1),
    ):
        torch._dynamo.reset()  # past its limit of recompilations a model runs in eager mode
        if applied_first:
            model = make()
            memory.apply(model, memory.Policy(*rules))
            compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        else:
            memory.apply(model, memory.Policy(*rules))
        found = results(compiled, loss)
        assert _saved_bytes(compiled, loss) <= share * plain, rules
        _assert_close(found, expected)


def test_a_rule_that_compiled_code_does_not_follow_is_told() -> None:
    rule = memory.offload("*")
    model = encoder(layers=2, dropout=0.0)
    memory.apply(model, memory.Policy(rule))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match=f"{re.escape(str(rule))} does nothing in compiled code"):
        encoder_loss(run).backward()
