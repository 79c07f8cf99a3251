"""Models of every kind: the loss is that of their logits, training lowers it; their experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_same_bits

from fusedops import memory
from fusedops._core import dtypes
from fusedops.models import (
    PRESETS,
    TINY,
    Loss,
    ParallelConfig,
    RopeScaling,
    Transformer,
    TransformerConfig,
    initialize,
    parallelize,
    preset,
)
from fusedops.models.attention_core import alibi_slopes
from fusedops.nn import MoE


def _tokens(config: TransformerConfig, *shape: int) -> torch.Tensor:
    return torch.randint(config.vocab_size, shape)


@pytest.mark.parametrize("name", TINY)
def test_the_loss_is_the_cross_entropy_of_the_logits(name: str) -> None:
    torch.manual_seed(0)
    model = Transformer(TINY[name])
    tokens, labels = _tokens(model.config, 2, 17), _tokens(model.config, 2, 17)
    labels[0, 3:9] = -100
    loss = model(tokens, labels)
    assert isinstance(loss, Loss) and int(loss.num_tokens) == 28
    wanted = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.total, wanted)
    sparse = bool(model.config.num_experts)
    assert (loss.auxiliary.item() > 0) is sparse
    (loss.total + loss.auxiliary).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", TINY)
def test_the_gradient_is_that_of_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = Transformer(TINY[name], dtype=torch.float64)
    tokens, labels = _tokens(model.config, 2, 9), _tokens(model.config, 2, 9)
    parameters = list(model.parameters())
    with torch.no_grad():  # far from the start, where biases are 0 and branches small
        for each in parameters:
            each.add_(torch.randn_like(each), alpha=0.1)

    def loss() -> torch.Tensor:
        found = model(tokens, labels)
        return found.total / found.num_tokens + found.auxiliary

    grads = torch.autograd.grad(loss(), parameters)
    directions = [torch.randn_like(each) for each in parameters]
    slope = sum((grad * direction).sum() for grad, direction in zip(grads, directions, strict=True))
    eps = torch.finfo(torch.float64).eps ** (1 / 3)  # where truncation and rounding are alike
    with torch.no_grad():
        values = []
        for step in (eps, -2 * eps):
            for parameter, each in zip(parameters, directions, strict=True):
                parameter.add_(each, alpha=step)
            values.append(loss())
    found = (values[0] - values[1]) / (2 * eps)
    torch.testing.assert_close(found, slope.detach(), rtol=eps, atol=eps)


def test_half_precision_sums_the_loss_in_float32() -> None:
    torch.manual_seed(0)
    model = Transformer(TINY["tiny-llama"], dtype=torch.bfloat16)
    tokens = _tokens(model.config, 4, 64)
    loss = model(tokens, tokens)
    wanted = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    budget = dtypes.error_budget(wanted, wanted.double(), torch.bfloat16)  # of the logits
    assert loss.total.dtype == torch.float32 and loss.total != loss.total.bfloat16()
    assert (loss.total / 256 - wanted).abs() <= budget


@pytest.mark.parametrize(
    "name", ["tiny-llama", "tiny-bert", "tiny-alibi", "tiny-pangu", "tiny-deepseek"]
)
def test_packed_documents_are_as_if_each_were_alone(name: str) -> None:
    torch.manual_seed(0)
    model = Transformer(TINY[name]).eval()
    tokens = _tokens(model.config, 2, 20)
    lengths = ((7, 1, 12), (20,))
    ids = [torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in lengths]
    places = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    with torch.no_grad():
        packed = model(tokens, document_ids=torch.stack(ids), positions=torch.stack(places))
        for index, row in enumerate(lengths):
            parts = zip(tokens[index].split(row), packed[index].split(row), strict=True)
            for part, logits in parts:
                torch.testing.assert_close(logits, model(part[None])[0])
        assert (packed - model(tokens)).abs().max() > packed.std() / 10


def test_slopes_are_the_published_ones() -> None:
    halves = [2.0**-index for index in range(1, 9)]
    assert alibi_slopes(8, torch.device("cpu")).tolist() == halves
    between = torch.exp2(-torch.arange(0.5, 4.0))
    twelve = torch.cat((torch.tensor(halves), between))
    torch.testing.assert_close(alibi_slopes(12, torch.device("cpu")), twelve)


def test_the_query_layer_asks_with_positions() -> None:
    torch.manual_seed(0)
    config = replace(TINY["tiny-pangu"], num_layers=1)
    model = Transformer(config, dtype=torch.float64).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = _tokens(config, 2, 9)
    table, layer = model.embedding, model.layers["0"]

    def norm(x: torch.Tensor, of: Any) -> torch.Tensor:
        return F.layer_norm(x, (64,), of.weight, of.bias)

    def heads(x: torch.Tensor, of: Any) -> torch.Tensor:
        return F.linear(x, of.weight, of.bias).unflatten(-1, (4, 16)).transpose(1, 2)

    x = norm(table.tokens.weight[tokens] + table.positions.weight[:9], model.norm)
    normed, part = norm(x, layer.attention_norm), layer.attention
    asking = model.query_positions.weight[:9].expand(2, -1, -1)
    query, key, value = (
        heads(x, getattr(part, name))
        for name, x in (("query", asking), ("key", normed), ("value", normed))
    )
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + F.linear(found.transpose(1, 2).flatten(2), part.output.weight, part.output.bias)
    mlp = layer.feed_forward
    inner = F.linear(norm(x, layer.feed_forward_norm), mlp.w1, mlp.b1)
    x = x + F.linear(inner * torch.sigmoid(1.702 * inner), mlp.w2, mlp.b2)
    torch.testing.assert_close(model(tokens), F.linear(x, table.tokens.weight))


def test_creation_on_meta_is_creation_with_the_same_seed() -> None:
    torch.manual_seed(3)
    whole = Transformer(TINY["tiny-mixtral"])
    later = Transformer(TINY["tiny-mixtral"], device="meta")
    with torch.device("meta"):
        assert all(each.is_meta for each in Transformer(TINY["tiny-bert"]).parameters())
    assert all(parameter.is_meta for parameter in later.parameters())
    later.to_empty(device="cpu")
    torch.manual_seed(3)
    initialize(later)
    tokens = _tokens(whole.config, 2, 8)
    assert torch.equal(whole(tokens), later(tokens))


@pytest.mark.parametrize("name", PRESETS | TINY)
def test_a_preset_builds_with_as_many_parameters_as_it_says(name: str) -> None:
    # The counts of whole models are held to the published ones by the planner's tests.
    config = replace(preset(name), num_layers=2)
    model = Transformer(config, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters().total


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda model, x: model(x[0]), r"tokens must be of shape \[B, S\], got \[8\]"),
        (lambda model, x: model(x + 250), "tokens must be from 0 to 255.*got 257"),
        (lambda model, x: model(x - 1), "tokens must be from 0 to 255.*got -1"),
        (lambda model, x: model(x, x[:, 1:]), r"labels must be of shape \[1, 8\]"),
        (lambda model, x: model(x, positions=x[0, 1:]), "positions must be of shape"),
        (lambda model, x: model(x, positions=x[0] + 57), "positions must be from 0 to 63.*got 64"),
        (lambda model, x: model(x, positions=x[0] - 1), "positions must be from 0 to 63.*got -1"),
        (lambda model, x: model(x.repeat(1, 9)), "at most 64 tokens a sequence.*got 72"),
    ],
    ids=["dims", "word", "negative", "labels", "positions", "past", "before", "length"],
)
def test_wrong_inputs_are_refused(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(Transformer(TINY["tiny-gpt2"]), torch.arange(8)[None])


HASH: dict[str, Any] = {"router": "hash", "balance_loss": 0.0}
LONG = RopeScaling(kind="longrope", short_factors=(1.0,), long_factors=(2.0,))
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("tiny-llama", {"rotary": True, "alibi": True}, "alibi must be False with rotary"),
    ("tiny-llama", {"query_layer": True}, "position_tables must be 2 with query_layer"),
    ("tiny-llama", {"sliding_window": 4, "causal": False}, "sliding_window must be None unless"),
    ("tiny-llama", {"dropout": 1.5}, r"dropout must be a probability in \[0, 1\]"),
    ("tiny-llama", {"rotary": True, "head_dim": 7}, "head_dim must be even"),
    ("tiny-llama", {"num_heads": 3}, "num_heads must be a divisor of hidden_size 64"),
    ("tiny-llama", {"num_kv_heads": 3}, "num_kv_heads must be a divisor of num_heads 4, got 3"),
    ("tiny-llama", {"activation": "gelo"}, "did you mean 'gelu'"),
    ("tiny-llama", {"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
    ("tiny-llama", {"router_score": "softmin"}, "did you mean 'softmax'"),
    ("tiny-llama", {"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
    ("tiny-mixtral", {"top_k": 5}, "top_k must be at most num_experts 4, got 5"),
    ("tiny-mixtral", {"moe_layers": 9}, "moe_layers must be at most 2, the layers, got 9"),
    ("tiny-mixtral", {"shared_gate": True}, "shared_gate must be False without shared_size"),
    ("tiny-mixtral", {"num_experts": 0, "shared_size": 8}, "shared_size must be 0 without num_exp"),
    ("tiny-mixtral", {"router": "hashed"}, "did you mean 'hash'"),
    ("tiny-mixtral", {"router": "hash"}, "balance_loss must be 0.0 with router 'hash'"),
    ("tiny-mixtral", {"domain_experts": (2, 2)}, "router must be 'hash' with domain_experts"),
    ("tiny-mixtral", HASH | {"domain_experts": (2, 3)}, "numbers that add up to 4, the experts"),
    ("tiny-mixtral", HASH | {"domain_experts": (1, 3)}, "domain_experts must be at least top_k, 2"),
    ("tiny-mixtral", {"num_groups": 3, "topk_groups": 1}, "num_groups must be"),
    ("tiny-mixtral", {"drop_policy": "positions"}, "did you mean 'position'"),
    ("tiny-mixtral", {"balance_rate": -1.0}, "balance_rate must be at least 0"),
    ("tiny-mixtral", {"dense_layers": 2}, "dense_layers must be 0 without num_experts, and less"),
    ("tiny-mixtral", {"dense_layers": 1, "moe_layers": 2}, "moe_layers must be None or 1 with"),
    ("tiny-llama", {"expert_size": 8}, "expert_size must be None without num_experts, got 8"),
    ("tiny-llama", {"q_lora_rank": 8}, "q_lora_rank must be None without kv_lora_rank, got 8"),
    ("tiny-llama", {"v_head_dim": 8}, "v_head_dim must be None without kv_lora_rank, got 8"),
    ("tiny-llama", {"kv_lora_rank": 8}, "qk_nope_head_dim must be a size with kv_lora_rank"),
    ("tiny-deepseek", {"kv_lora_rank": 0}, "kv_lora_rank must be at least 1, got 0"),
    ("tiny-deepseek", {"v_head_dim": None}, "v_head_dim must be a size with kv_lora_rank"),
    ("tiny-deepseek", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
    ("tiny-deepseek", {"num_kv_heads": 2}, "num_kv_heads must be None or 4, the heads of queries"),
    ("tiny-deepseek", {"head_dim": 8}, "head_dim must be None or 20, qk_nope_head_dim and"),
    ("tiny-deepseek", {"rotary": False}, "rotary must be True with kv_lora_rank"),
    ("tiny-deepseek", {"qk_norm": True}, "qk_norm must be False with kv_lora_rank"),
    ("tiny-llama", {"rope_scaling": LONG}, "rope_scaling must be of 8 short and 8 long factors"),
]


@pytest.mark.parametrize(("name", "change", "says"), WRONG, ids=[says[:24] for *_, says in WRONG])
def test_choices_that_exclude_each_other_are_refused(
    name: str, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        replace(TINY[name], **change)


def test_logits_are_kept_where_they_are_small() -> None:
    assert not Transformer(preset("gpt2"), device="meta").head.recompute
    wide = replace(TINY["tiny-llama"], vocab_size=2048)
    assert Transformer(wide, device="meta").head.recompute


def test_a_whole_model_compiles_to_one_graph() -> None:
    torch.manual_seed(0)
    model = Transformer(replace(TINY["tiny-mixtral"], num_layers=1))
    tokens = _tokens(model.config, 2, 16)
    results = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        loss = call(tokens, tokens)
        total = loss.total + loss.auxiliary
        results.append((total, *torch.autograd.grad(total, list(model.parameters()))))
    assert_same_bits(*results)


KINDS: dict[str, TransformerConfig] = {
    "gated shared": replace(preset("tiny-mixtral"), shared_size=48, shared_gate=True),
    "plain shared with biases": replace(preset("tiny-pangu-moe"), shared_size=32),
    "bias": replace(preset("tiny-mixtral"), balance_rate=0.1, balance_loss=0.0),
    "hash": replace(preset("tiny-pangu-moe"), **HASH, capacity_factor=None),
    "capacity": replace(preset("tiny-mixtral"), capacity_factor=1.0, drop_policy="probability"),
    "rounds": replace(preset("tiny-pangu-moe"), top_k=2, drop_policy="rounds"),
    "groups": replace(preset("tiny-mixtral"), num_groups=2, topk_groups=1, group_score="top2_sum"),
}


def _run(model: Transformer) -> tuple[Any, Any, torch.Tensor]:
    """Return the engine of a model on one process, a batch, and how many tokens count."""
    run = parallelize(model, ParallelConfig())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, (4, 1), generator=generator) + torch.arange(24) % 5
    shard = run.shard_batch(tokens[:, :-1], tokens[:, 1:])
    return run, shard, run.count(shard.labels)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_experts_has_its_parameters_and_trains(kind: str) -> None:
    torch.manual_seed(0)
    model = Transformer(KINDS[kind])
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert numbers == model.config.parameters().total
    run, shard, count = _run(model)
    optimizer = run.optimizer(lr=3e-3)
    losses = []
    for _ in range(8):
        losses.append(float(run.mean_loss(run.step([shard], count), count)))
        optimizer.step()
        run.balance()
        assert all(each.grad is not None for each in model.parameters())
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


def test_a_layer_without_a_router_wants_a_plan() -> None:
    moe = MoE(8, 16, 4, 1, router=False)
    assert "gate.weight" not in moe.state_dict()
    with pytest.raises(ValueError, match="plan must be given to a layer that has no router"):
        moe(torch.ones(2, 8))


def _layers(model: Transformer) -> list[Any]:
    return list(model.layers.values())


@pytest.mark.parametrize("recomputed", [False, True])
def test_biases_move_by_the_choices_of_the_step_alone(recomputed: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(KINDS["bias"])
    run, shard, count = _run(model)
    layers = _layers(model)
    gates = [layer.feed_forward.gate for layer in layers]
    seen: dict[Any, torch.Tensor] = {}

    def note(module: Any, args: Any, output: Any) -> None:
        seen[module] = output[1].tokens_per_expert

    hooks = [gate.register_forward_hook(note) for gate in gates]
    if recomputed:
        memory.apply(model, memory.Policy(memory.recompute("layers.*")))
    run.forward([shard])  # counts nothing
    seen.clear()
    run.step([shard], count)
    for hook in hooks:
        hook.remove()
    for layer, gate in zip(layers, gates, strict=True):
        assert torch.equal(layer.balancing.tokens_per_expert, seen[gate])
        assert int(seen[gate].sum()) == 2 * shard.tokens.numel()
    run.balance()
    for layer, gate in zip(layers, gates, strict=True):
        moved = 0.1 * torch.sign(seen[gate].double().mean() - seen[gate]).float()
        torch.testing.assert_close(gate.e_score_correction_bias, moved)
        assert moved.any() and not layer.balancing.tokens_per_expert.any()
    before = [gate.e_score_correction_bias.clone() for gate in gates]
    run.step([shard], count)
    run.balance(stepped=False)  # the optimizer made no step
    run.balance()
    assert all(map(torch.equal, (gate.e_score_correction_bias for gate in gates), before))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_biases_stay_float32_in_half_precision(device: str) -> None:
    model = Transformer(KINDS["bias"], device=device, dtype=torch.bfloat16)
    if device == "meta":
        model.to_empty(device="cpu")
    gate = _layers(model)[0].feed_forward.gate
    assert gate.weight.dtype == torch.bfloat16
    assert gate.e_score_correction_bias.dtype == torch.float32


def test_hashed_experts_follow_from_token_domain_and_layer() -> None:
    torch.manual_seed(0)
    config = replace(preset("tiny-mixtral"), **HASH, top_k=1, domain_experts=(1, 3))
    model = Transformer(config)
    tokens = torch.arange(64).reshape(2, 32)
    domains = torch.zeros_like(tokens)
    domains[1] = 1
    chosen: list[torch.Tensor] = []
    for layer in _layers(model):
        layer.feed_forward.register_forward_pre_hook(
            lambda module, args, kwargs: chosen.append(kwargs["plan"].expert_ids[:, 0]),
            with_kwargs=True,
        )
    model(tokens, domains=domains)
    first, second = chosen
    assert not first[:32].any() and set(first[32:].tolist()) == {1, 2, 3}
    assert not torch.equal(first, second)
    chosen.clear()
    model(tokens.flip(1), domains=domains)
    assert torch.equal(chosen[0], first.reshape(2, 32).flip(1).flatten())


def test_domains_are_asked_for_where_they_decide_and_only_there() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="domains must be None without domain_experts"):
        Transformer(preset("tiny-mixtral"))(tokens, domains=tokens)
    config = replace(preset("tiny-mixtral"), **HASH, top_k=1, domain_experts=(1, 3))
    model = Transformer(config)
    with pytest.raises(ValueError, match="domains must be given with domain_experts, got None"):
        model(tokens)
    with pytest.raises(ValueError, match=r"domains must be from 0 to 1, of .* got 2"):
        model(tokens, domains=tokens + 2)
