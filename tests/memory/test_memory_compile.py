"""Policies inside torch.compile: the same numbers, and the partitioner obeys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import encoder, encoder_loss, gpt2, language_loss, results
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fusedops import memory


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


def _compiled(model: nn.Module, loss: Any) -> tuple[Graphs, dict[str, Any]]:
    graphs = Graphs()
    run = torch.compile(model, backend=graphs.compile, fullgraph=True)
    return graphs, results(run, loss)


@pytest.mark.parametrize(
    ("rules", "attentions"),
    [
        ([memory.recompute("*")], 2),
        ([memory.recompute("*"), memory.save(ops="attention")], 0),
        ([memory.recompute("*"), memory.save("1")], 1),
        ([memory.recompute(ops="attention")], 2),
        ([memory.save("*")], 0),
        ([memory.offload("*")], 0),
    ],
    ids=str,
)
def test_compiled_layers_recompute_what_the_policy_says(rules: list[Any], attentions: int) -> None:
    model = encoder(layers=2, dropout=0.0)
    expected = results(model, encoder_loss)
    memory.apply(model, memory.Policy(*rules))
    graphs, found = _compiled(model, encoder_loss)
    assert graphs.calls(graphs.forward, "fusedops.attention.default") == 2
    assert graphs.calls(graphs.backward, "fusedops.attention.default") == attentions
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name if name == "loss" else f"_orig_mod.{name}"], wanted)


def test_a_compiled_patched_gpt2_recomputes_its_blocks() -> None:
    model = gpt2(layers=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    expected = results(model, language_loss)
    memory.apply(model, memory.Policy(memory.recompute("transformer.h.*")))
    graphs, found = _compiled(model, language_loss)
    assert graphs.calls(graphs.backward, "fusedops.mlp.default") == 2
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name if name == "loss" else f"_orig_mod.{name}"], wanted)
