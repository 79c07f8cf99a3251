"""MoE is the sparse layer of Hugging Face's families: values, gradients, and checkpoints."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from comparing import assert_all_close, assert_close, assert_same_bits
from torch import nn

import fusedops

transformers = pytest.importorskip("transformers")

HIDDEN, SIZE, EXPERTS = 32, 20, 6
SIZES = (HIDDEN, SIZE, EXPERTS, 2)
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": SIZE,
    "moe_intermediate_size": SIZE,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "experts_implementation": "eager",
}
DEEPSEEK = {
    "score": "sigmoid",
    "num_groups": 3,
    "topk_groups": 2,
    "group_score": "top2_sum",
    "scaling": 2.5,
    "correction_bias": True,
    "router_dtype": torch.float32,
    "shared_intermediate_size": SIZE,
}
GPT_OSS = {
    "activation": "swiglu_oai",
    "interleaved": True,
    "bias": True,
    "router_bias": True,
    "transposed": True,
    "normalize": False,
    "softmax_after": True,
}
# Family -> name of the layer's class, options of its configuration, our arguments.
BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Mixtral": ("SparseMoeBlock", {"num_local_experts": EXPERTS}, {}),
    "Qwen2Moe": (
        "SparseMoeBlock",
        {"num_experts": EXPERTS, "shared_expert_intermediate_size": 28},
        {"normalize": False, "shared_intermediate_size": 28, "shared_gate": True},
    ),
    "Qwen3Moe": ("SparseMoeBlock", {"num_experts": EXPERTS, "norm_topk_prob": True}, {}),
    "Olmoe": ("SparseMoeBlock", {"num_experts": EXPERTS}, {"normalize": False}),
    "DeepseekV3": ("MoE", {"n_routed_experts": EXPERTS, "n_group": 3, "topk_group": 2}, DEEPSEEK),
    "GptOss": ("MLP", {"num_local_experts": EXPERTS}, GPT_OSS),
}
of_each_family = pytest.mark.parametrize("family", BLOCKS)


def _stock(family: str) -> nn.Module:
    suffix, options, _ = BLOCKS[family]
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**COMMON, **options)
    config._experts_implementation_internal = "eager"
    modeling = __import__(
        config_class.__module__.replace("configuration", "modeling"), fromlist=["_"]
    )
    torch.manual_seed(3)
    block = getattr(modeling, f"{family}{suffix}")(config)
    with torch.no_grad():
        for parameter in [*block.parameters(), *block.buffers()]:
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return block


def _ours(family: str, dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(4)
    return fusedops.nn.MoE(*SIZES, **BLOCKS[family][2], dtype=dtype)


def _results(module: nn.Module, input: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output and the gradients of input and parameters, by the parameters' shapes."""
    module.zero_grad()
    leaf = input.detach().clone().requires_grad_()
    output = module(leaf)
    output = output[0] if isinstance(output, tuple) else output
    output.square().sum().backward()
    names = {"router.": "gate.", "shared_expert.": "shared_experts."}
    results = {"output": output.detach(), "input": leaf.grad}
    for name, parameter in module.named_parameters():
        for theirs, ours in names.items():
            name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        results[name] = parameter.grad
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@of_each_family
def test_values_and_gradients_are_the_familys(family: str, dtype: torch.dtype) -> None:
    stock, module = _stock(family).to(dtype), _ours(family, dtype)
    if dtype == torch.bfloat16 and family == "DeepseekV3":
        stock.gate.e_score_correction_bias.data = stock.gate.e_score_correction_bias.float()
    module.load_state_dict(stock.state_dict())
    twin = _ours(family, dtype)
    twin.load_state_dict(module.state_dict())
    assert_same_bits(twin.state_dict(), module.state_dict())
    if family not in ("Qwen2Moe", "GptOss"):  # the others need no renaming
        stock.load_state_dict(module.state_dict())
    input = torch.randn(2, 7, HIDDEN).to(dtype)
    got, eager = _results(module, input), _results(stock, input)
    exact = _results(copy.deepcopy(stock).double(), input.double())
    assert_all_close(got, exact, eager, depth=256)


def test_a_plan_made_before_is_used() -> None:
    module = fusedops.nn.MoE(*SIZES)
    input, other = torch.randn(2, 5, HIDDEN), torch.randn(2, 5, HIDDEN)
    plan = module.route(other)
    assert plan.expert_ids.shape == (10, 2)
    assert torch.equal(module(input, plan=module.route(input)), module(input))
    assert not torch.equal(module(input, plan=plan), module(input))
    assert torch.equal(module.gate(other)[1].expert_ids, plan.expert_ids)


def test_capacity_drops_what_comes_too_late() -> None:
    module = fusedops.nn.MoE(HIDDEN, SIZE, 2, 1, capacity_factor=1.0)
    with torch.no_grad():
        module.gate.weight.copy_(torch.stack((torch.ones(HIDDEN), -torch.ones(HIDDEN))))
    output = module(torch.ones(8, HIDDEN))
    assert (output[:4] != 0).any(-1).all()
    assert (output[4:] == 0).all()


def test_jitter_is_for_training() -> None:
    module = fusedops.nn.MoE(*SIZES, jitter=0.5)
    input = torch.randn(4, HIDDEN)
    assert not torch.equal(module(input), module(input))
    module.eval()
    assert torch.equal(module(input), module(input))


def test_experts_without_a_gate() -> None:
    module = fusedops.nn.MoE(*SIZES, gated=False, activation="gelu", bias=True)
    input, experts = torch.randn(5, HIDDEN), module.experts
    assert experts.up_proj.shape == (EXPERTS, SIZE, HIDDEN)
    plan = module.route(input)
    want = torch.zeros(5, HIDDEN, dtype=torch.float64)
    for token, slot in itertools.product(range(5), range(2)):
        e = int(plan.expert_ids[token, slot])
        row = experts.up_proj[e].double() @ input[token].double() + experts.up_proj_bias[e]
        row = experts.down_proj[e].double() @ nn.functional.gelu(row) + experts.down_proj_bias[e]
        want[token] += plan.probs[token, slot] * row
    assert_close(module(input), want, want.float(), depth=256)


def test_compiles_into_one_graph() -> None:
    module = _ours("DeepseekV3")
    input = torch.randn(6, HIDDEN)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(input), module(input))


def test_the_bias_of_the_choices_stays_float32() -> None:
    module = fusedops.nn.MoE(*SIZES, **DEEPSEEK, device="meta", dtype=torch.bfloat16)
    assert module.gate.e_score_correction_bias.dtype == torch.float32
    assert f"intermediate_size={SIZE}" in repr(module)
    assert f"num_experts={EXPERTS}" in repr(module)


def test_impossible_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="MoE: top_k"):
        fusedops.nn.MoE(HIDDEN, SIZE, 4, 5)
    with pytest.raises(ValueError, match="MoE: shared_gate"):
        fusedops.nn.MoE(*SIZES, shared_gate=True)
    module = fusedops.nn.MoE(*SIZES)
    plan = module.route(torch.ones(2, HIDDEN))
    # 2 rows of twice the width are 4 rows to a reshape.
    for call in (module, module.route, lambda x: module(x, plan=plan)):
        with pytest.raises(ValueError, match=rf"input must be of {HIDDEN} features, .* got \[2, "):
            call(torch.ones(2, 2 * HIDDEN))
    with pytest.raises(TypeError, match="MoE: plan must be a RoutingPlan, got Tensor"):
        module(torch.ones(2, HIDDEN), plan=plan.expert_ids)
