"""Megatron-Core: a patched GPT, and our modules in its specs, compute what the local spec does.

What Megatron's own modules want of a GPU gets a stand-in: the current device, its synchronisation,
and the generator that tensor-parallel ranks draw from. Dropout is off where results are compared.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import BATCH, LEARNING_RATE, Table, Trained, Trial, batches, weights
from patch_testing import assert_within_budget, counted
from patch_testing import gradients as results
from processes import run
from torch import nn

import fusedops

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention as Stock
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.moe import moe_utils

    from fusedops.integrations import megatron

LAYERS = 2
TOKENS = 12
SIZES = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4}
LLAMA = {
    "normalization": "RMSNorm",
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "ffn_hidden_size": 48,
}
EXPERTS = LLAMA | {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "allgather",  # the other one starts CUDA streams
    "moe_router_load_balancing_type": "none",
}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "gpt": ({}, {"layer_norm": 5, "mlp": 2}),
    "llama": (LLAMA, {"rms_norm": 5, "linear_glu": 2}),
    "qk_norm": (LLAMA | {"qk_layernorm": True}, {"rms_norm": 9}),
    "relu2": ({"activation_func": megatron.feed_forward.activations.squared_relu}, {"mlp": 2}),
    "gated_bias": (LLAMA | {"add_bias_linear": True}, {"swiglu": 2}),
    "off_by_one": (LLAMA | {"softmax_type": "off-by-one"}, {"attention": 2}),
    "sinks": (LLAMA | {"softmax_type": "learnable"}, {"attention": 2}),
    "layer_scaling": ({"apply_query_key_layer_scaling": True}, {"attention": 2}),
    "experts": (EXPERTS, {"linear_glu": 8}),
    "shared_expert": (EXPERTS | {"moe_shared_expert_intermediate_size": 16}, {"linear_glu": 10}),
    "own_activation": ({"activation_func": torch.tanh}, {"layer_norm": 5, "mlp": 0}),
}


def stand_in(replace: Callable[[Any, str, Any], None]) -> None:
    replace(torch.cuda, "current_device", lambda: "cpu")
    replace(torch.cuda, "synchronize", lambda: None)
    # 0.16.1 asks whether this is None, but only defines it with Transformer Engine.
    replace(moe_utils, "te_general_gemm", None)
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


@pytest.fixture(autouse=True)
def megatron_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stand_in(partial(monkeypatch.setattr, raising=False))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def config(**options: Any) -> TransformerConfig:
    always = {
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method": nn.init.normal_,
    }
    return TransformerConfig(**SIZES | always | options)


def gpt(
    configured: TransformerConfig, *, fused: bool, grouped: bool = False, parallel: bool = False
) -> nn.Module:
    configured = copy.copy(configured)
    configured.moe_grouped_gemm = grouped
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        configured, use_transformer_engine=False, normalization=configured.normalization
    )
    torch.manual_seed(0)
    return GPTModel(
        configured,
        megatron.fused_spec(spec) if fused else spec,
        vocab_size=98,
        max_sequence_length=32,
        parallel_output=parallel,
        position_embedding_type="rope" if configured.gated_linear_unit else "learned_absolute",
    )


def varied(model: nn.Module) -> nn.Module:
    """Give every parameter values of its own: zeros and ones hide what is where."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    return model


def pair(options: dict[str, Any], **changes: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model with our modules, of other options if given, and one of the local spec."""
    stock = varied(gpt(config(**options), fused=False))
    fused = gpt(config(**options | changes), fused=True)
    fused.load_state_dict(stock.state_dict())
    return fused, stock


def future(tokens: int = TOKENS) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[None, None]


def loss(model: nn.Module, mask: torch.Tensor | None = None) -> torch.Tensor:
    ids = torch.arange(2 * (TOKENS + 1)).mul(7).remainder(98).view(2, -1)
    places = torch.arange(TOKENS).expand(2, -1)
    logits = model(ids[:, :-1], places, future() if mask is None else mask)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def assert_same_training(fused: nn.Module, stock: nn.Module, of_fused: Any, of_stock: Any) -> None:
    """Compare loss and gradients of one step; process groups cannot be copied with a model."""
    found, eager = results(fused, of_fused), results(stock, of_stock)
    assert_within_budget(found, eager, results(stock.double(), of_stock))
    stock.float()


def assert_close(found: torch.Tensor, stock: torch.Tensor, exact: torch.Tensor) -> None:
    assert_within_budget({"output": found}, {"output": stock}, {"output": exact})


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_local_spec(name: str) -> None:
    options, expected = CASES[name]
    fused, stock = pair(options)
    assert fused.state_dict().keys() == stock.state_dict().keys()
    with counted() as calls:
        loss(fused).backward()
    wanted = {"attention": LAYERS, "bias_dropout_add": 2 * LAYERS} | expected
    for op, count in wanted.items():
        assert calls[op] == calls[f"{op}_backward"] == count, op
    assert_same_training(fused, stock, loss, loss)


def test_a_window_is_a_mask_that_megatron_makes() -> None:
    fused, stock = pair(LLAMA, window_size=(4, 0))
    mask = future() | torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(-5)
    with counted() as calls:
        loss(fused).backward()
    assert calls["attention"] == calls["attention_backward"] == LAYERS
    assert_same_training(fused, stock, loss, partial(loss, mask=mask))
    assert not torch.equal(loss(stock, mask), loss(stock))


def test_a_mask_of_each_sequence_and_the_order_of_the_batch() -> None:
    """The batch counts as heads without such a mask, and not with one."""
    mask = future().repeat(2, 1, 1, 1)
    mask[1, :, 6:, 2:4] = True
    masked = partial(loss, mask=mask)
    assert_same_training(*pair(LLAMA), masked, masked)


def core(fused: bool, kind: AttnMaskType, **options: Any) -> nn.Module:
    module = megatron.DotProductAttention if fused else Stock
    return module(config(**LLAMA | options), 1, kind, "self")


def heads(tokens: int, keys: int, batch: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    shapes = ((tokens, batch, 4, 8), (keys, batch, 2, 8), (keys, batch, 2, 8))
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize(
    ("tokens", "keys", "kind"),
    [(1, 9, "causal"), (9, 9, "causal"), (5, 9, "no_mask"), (9, 9, "padding"), (5, 9, "padding")],
)
def test_core_attention_is_that_of_the_local_spec(tokens: int, keys: int, kind: str) -> None:
    """A causal type needs no mask, which the local spec does."""
    mask = None
    if kind == "padding":
        mask = torch.zeros(2, 1, 1, keys, dtype=torch.bool)
        mask[1, ..., keys // 2 :] = True
    given = heads(tokens, keys)
    with counted() as calls:
        output = core(True, AttnMaskType[kind])(*given, mask)
    assert calls["attention"] == 1
    if kind == "causal" and tokens > 1:
        mask = future(tokens)
    expected = core(False, AttnMaskType[kind])(*given, mask)
    assert output.shape == expected.shape and output.is_contiguous()
    exact = core(False, AttnMaskType[kind])(*(head.double() for head in given), mask)
    assert_close(output, expected, exact)
    assert_close(core(True, AttnMaskType[kind])(*given, mask), expected, exact)


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_a_chunk_after_a_cache_is_the_end_of_the_whole(window: tuple[int, int] | None) -> None:
    query, key, value = (head.detach() for head in heads(9, 9))
    module = core(True, AttnMaskType.causal, window_size=window)
    whole = module(query, key, value, None)
    chunk = module(query[5:], key, value, None)
    assert_close(chunk, whole[5:], whole[5:].double())


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_packed_sequences_are_each_alone(window: tuple[int, int] | None) -> None:
    module = core(True, AttnMaskType.padding_causal, window_size=window, softmax_type="off-by-one")
    query, key, value = (head.detach()[:, 0].contiguous() for head in heads(11, 11))
    ends = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    packing = PackedSeqParams("thd", ends, ends, max_seqlen_q=6, max_seqlen_kv=6)
    with counted() as calls:
        packed = module(query, key, value, None, packed_seq_params=packing)
    assert calls["attention_varlen"] == 1 and packed.shape == (11, 32)
    for begin, end in ((0, 4), (4, 5), (5, 11)):
        alone = module(*(each[begin:end, None] for each in (query, key, value)), None)[:, 0]
        assert_close(packed[begin:end], alone, alone.double())


def test_padding_between_packed_sequences_needs_causality() -> None:
    query, key, value = (head[:, 0] for head in heads(8, 8))
    ends, padded = (torch.tensor(each, dtype=torch.int32) for each in ([0, 3, 6], [0, 4, 8]))
    packing = PackedSeqParams("thd", ends, ends, padded, padded)
    causal = core(True, AttnMaskType.padding_causal)
    output = causal(query, key, value, None, packed_seq_params=packing)
    alone = causal(query[4:7, None], key[4:7, None], value[4:7, None], None)[:, 0]
    assert_close(output[4:7], alone, alone.double())
    with pytest.raises(fusedops.UnsupportedError, match="cu_seqlens_q_padded"):
        core(True, AttnMaskType.padding)(query, key, value, None, packed_seq_params=packing)


def test_a_bias_of_attention_is_refused() -> None:
    with pytest.raises(fusedops.UnsupportedError, match="attention_bias"):
        core(True, AttnMaskType.causal)(*heads(4, 4), None, attention_bias=torch.zeros(4, 4))


def test_dropout_draws_from_the_generator_of_the_ranks() -> None:
    """Forward and backward agree, another seed differs, and evaluation has none."""
    module = core(True, AttnMaskType.causal, attention_dropout=0.5)
    given = heads(6, 6)
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(module(*given, None))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert torch.equal(module.eval()(*given, None), module(*given, None))


def test_zero_centered_norms_are_the_norms_of_one_plus_the_weight() -> None:
    torch.manual_seed(0)
    input = torch.randn(3, 2, 32)
    for name, plain in (("LayerNorm", nn.LayerNorm), ("RMSNorm", nn.RMSNorm)):
        centered = config(normalization=name, layernorm_zero_centered_gamma=True)
        norm, reference = megatron.Norm(centered, 32, eps=1e-6), plain(32, eps=1e-6)
        assert torch.equal(norm.weight, torch.zeros(32))
        with torch.no_grad():
            norm.weight.normal_()
            reference.weight.copy_(norm.weight + 1)
        expected = reference(input)
        exact = reference.double()(input.double())
        assert_close(norm(input), expected, exact)
    with pytest.raises(fusedops.UnsupportedError, match="L2Norm"):
        megatron.Norm(config(normalization="L2Norm"), 32)


def as_grouped(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a model with ``SequentialMLP`` under the names of ``GroupedMLP``."""
    grouped = {key: value for key, value in state.items() if ".local_experts." not in key}
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}.mlp.experts."
        for number, name in ((1, "linear_fc1"), (2, "linear_fc2")):
            each = [state[f"{prefix}local_experts.{i}.{name}.weight"].t() for i in range(4)]
            weight = torch.stack(each)
            shape = (32, -1) if number == 1 else (-1, 32)
            grouped[f"{prefix}weight{number}"] = weight.reshape(shape)
    return grouped


@pytest.mark.parametrize("gated", [True, False])
def test_grouped_experts_are_the_sequential_ones(gated: bool) -> None:
    options = EXPERTS | {"gated_linear_unit": gated}
    stock = varied(gpt(config(**options), fused=False))
    fused = gpt(config(**options), fused=True, grouped=True)
    fused.load_state_dict(as_grouped(stock.state_dict()))
    with counted() as calls:
        found = results(fused, loss)
    assert calls["grouped_mm"] == calls["grouped_mm_backward"] == 2 * LAYERS
    eager, exact = results(stock, loss), results(stock.double(), loss)
    assert_within_budget(found, *(as_grouped(each) for each in (eager, exact)))


def test_experts_without_a_token() -> None:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    experts = megatron.GroupedMLP(4, config(**EXPERTS, moe_grouped_gemm=True), groups)
    output, bias = experts(torch.ones(0, 32), torch.zeros(4, dtype=torch.int64), torch.ones(0))
    output.sum().backward()
    assert bias is None and output.shape == (0, 32)
    assert experts.weight1.grad.count_nonzero() == 0


@pytest.mark.parametrize(
    ("name", "grouped"), [("gpt", False), ("experts", False), ("experts", True)]
)
def test_distributed_checkpoints_load_both_ways(name: str, grouped: bool, tmp_path: Path) -> None:
    options = CASES[name][0]
    stock = varied(gpt(config(**options), fused=False))
    fused = gpt(config(**options), fused=True, grouped=grouped)
    dist_checkpointing.save(stock.sharded_state_dict(), str(tmp_path))
    fused.load_state_dict(load(fused, tmp_path))
    with torch.no_grad():
        expected = loss(stock)
        assert_close(loss(fused), expected, loss(stock.double()))
    stock.float()
    back = tmp_path / "back"
    back.mkdir()
    dist_checkpointing.save(fused.sharded_state_dict(), str(back))
    state = load(stock, back)
    for key, value in stock.state_dict().items():
        assert value is None or torch.equal(state[key], value), key


def load(model: nn.Module, folder: Path) -> dict[str, Any]:
    return dist_checkpointing.load(model.sharded_state_dict(), str(folder))


def test_layer_spec_is_the_local_layer_with_our_modules() -> None:
    options = {"normalization": "RMSNorm", "qk_layernorm": True}
    local = gpt_layer_specs.get_gpt_layer_local_spec(**options)
    assert megatron.layer_spec(**options) == megatron.fused_spec(local) != local
    assert local.submodules.self_attention.submodules.core_attention is Stock


def test_a_spec_without_local_modules_is_refused() -> None:
    with pytest.raises(fusedops.UnsupportedError, match="use_transformer_engine=False"):
        megatron.fused_spec(ModuleSpec(module=nn.Identity))


def test_a_watched_layer_is_called() -> None:
    """The op leaves a product to the linear layer as soon as somebody hooks it."""
    fused = varied(gpt(config(**LLAMA), fused=True))
    first = fused.decoder.layers[0].mlp.linear_fc1
    seen: list[int] = []
    expected = results(fused, loss)
    first.register_forward_hook(lambda *args: seen.append(1))
    with counted() as calls:
        found = results(fused, loss)
    assert seen == [1] and calls["linear_glu"] == calls["swiglu"] == 1
    assert_within_budget(found, expected, {name: each.double() for name, each in expected.items()})


# Of tensor-parallel ranks bias and activation are fused, the products communicate.
TENSOR = {"tensor_model_parallel_size": 2}
SPLIT: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "gpt": (TENSOR, {}, "bias_gelu"),
    "llama": (TENSOR, LLAMA, "swiglu"),
    "sequence_parallel": (TENSOR, LLAMA, "swiglu"),
    "experts": ({"expert_model_parallel_size": 2}, EXPERTS, "linear_glu"),
}


def split_steps() -> dict[str, Any]:
    """Return what a rank of two computes in each case: ours, theirs, the truth, and the calls."""
    warnings.simplefilter("ignore")
    stand_in(setattr)
    dist.init_process_group("gloo")
    steps = {}
    for name, (sizes, options, _) in SPLIT.items():
        parallel_state.initialize_model_parallel(**sizes)
        split = sizes | options
        stock = varied(gpt(config(**split), fused=False))
        with torch.no_grad():
            for parameter in stock.parameters():
                part = getattr(parameter, "tensor_model_parallel", False) and sizes is TENSOR
                if part or not getattr(parameter, "allreduce", True):
                    parameter *= 1 + dist.get_rank() / 2
        fused = gpt(config(**split, sequence_parallel=name == "sequence_parallel"), fused=True)
        fused.load_state_dict(stock.state_dict())
        with counted() as calls:
            ours = results(fused, loss)
        for key, parameter in fused.named_parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(ours[key])
        eager = results(stock, loss)
        steps[name] = (ours, eager, results(stock.double(), loss), calls)
        parallel_state.destroy_model_parallel()
    return steps


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run(split_steps, processes=2)


@pytest.mark.distributed
@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_have_the_gradients_of_the_local_spec(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    op = SPLIT[name][2]
    for rank in ranks:
        found, eager, exact, calls = rank[name]
        assert calls[f"{op}_backward"] >= LAYERS and calls["attention_backward"] == LAYERS
        assert_within_budget(found, eager, exact)
    assert torch.equal(ranks[0][name][0]["loss"], ranks[1][name][0]["loss"])


def build(**options: Any) -> nn.Module:
    """Return a GPT of the local spec, split over the processes; its losses are Megatron's."""
    stand_in(setattr)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if not dist.is_initialized():
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if ranks == 1 else {}
        dist.init_process_group("gloo", **alone)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    split = {"tensor_model_parallel_size": ranks, "pipeline_dtype": torch.float32}
    weight = partial(nn.init.normal_, std=0.1)
    return gpt(config(**LLAMA | split | {"init_method": weight}), fused=False, parallel=True)


def train(model: Any) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    positions = torch.arange(16).expand(BATCH, -1)
    losses = []
    for ids in batches():
        value = model(ids, positions, future(16), labels=ids.roll(-1, 1)).mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return Trained(losses, weights(model))


# Two norms in each of two layers, and one at the end.
OPS = {"rms_norm": 5, "attention": 2, "linear_glu": 2}
TRIAL = Trial(train, family="GPT of Megatron", build=build, ops=OPS)


def test_a_patched_model_in_one_process(table: Table) -> None:
    table.compare(TRIAL, "megatron-core", "GPTModel, local spec")


@pytest.mark.distributed
def test_a_patched_model_of_tensor_parallel_ranks(table: Table) -> None:
    # The linear layers communicate and are called.
    trial = replace(TRIAL, ops=OPS | {"linear_glu": 0, "swiglu": 2})
    table.compare(trial, "megatron-core", "GPTModel, tensor parallel", processes=2)
