"""Plans for models that are not ours: on gloo ranks they compute what one process computes."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fusedops
from fusedops import UnsupportedError
from fusedops.planner import load_device
from fusedops.planner.sharding.cost import MeshCosts
from fusedops.planner.sharding.evaluate import evaluator_for
from fusedops.planner.sharding.solver import solve, units_of
from fusedops.planner.sharding.trace import FakeModel
from fusedops.testing.processes import Processes

Made = tuple[nn.Module, dict[str, Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]
BATCH, SEQ, VOCAB = 4, 8, 64
_SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def ids() -> torch.Tensor:
    return torch.randint(1, VOCAB, (BATCH, SEQ))


def language_loss(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return output.loss, output.logits


def class_loss(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    target = torch.arange(logits.shape[0]) % logits.shape[1]
    return nn.functional.cross_entropy(logits, target), logits


def unequal_labels(tokens: torch.Tensor) -> torch.Tensor:
    """Labels of which ranks have different numbers."""
    labels = tokens.clone()
    labels[0, 3:] = -100
    return labels


def _language_model(model: str, config: str, **sizes: Any) -> Made:
    import transformers

    tokens = ids()
    inputs = {"input_ids": tokens, "labels": unequal_labels(tokens)}
    made = getattr(transformers, model)(getattr(transformers, config)(vocab_size=VOCAB, **sizes))
    return made.eval(), inputs, language_loss


def _bert() -> Made:
    model, inputs, loss_of = _language_model(
        "BertForMaskedLM", "BertConfig", **_SIZES, intermediate_size=64
    )
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 5:] = 0
    return model, inputs | {"attention_mask": mask}, loss_of


def _image_model(name: str, **sizes: Any) -> Made:
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes, num_labels=4)
    model = getattr(transformers, f"{name}ForImageClassification")(config).eval()
    return model, {"pixel_values": torch.randn(BATCH, 3, 16, 16)}, class_loss


def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32 * SEQ, 4))
    return model.eval(), {"input": torch.randn(BATCH, SEQ, 32)}, class_loss


def torchvision_resnet() -> Made:
    from coverage_libraries import import_torchvision

    import_torchvision()
    from torchvision.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4).eval()
    return model, {"x": torch.randn(BATCH, 3, 32, 32)}, class_loss


def timm_convnext() -> Made:
    from timm.models.convnext import ConvNeXt

    model = ConvNeXt(num_classes=4, depths=(1, 1, 1, 1), dims=(8, 16, 16, 16)).eval()
    return model, {"x": torch.randn(BATCH, 3, 64, 64)}, class_loss


_STAGES = {"hidden_sizes": [32, 64], "depths": [1, 1]}
_LLAMA = _SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 64}
_GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
_T5 |= {"decoder_start_token_id": 0}
MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": partial(_language_model, "GPT2LMHeadModel", "GPT2Config", **_GPT2, use_cache=False),
    "bert": _bert,
    "llama": partial(_language_model, "LlamaForCausalLM", "LlamaConfig", **_LLAMA, use_cache=False),
    "t5": partial(
        _language_model, "T5ForConditionalGeneration", "T5Config", **_T5, use_cache=False
    ),
    "vit": partial(
        _image_model, "ViT", **_SIZES, intermediate_size=64, image_size=16, patch_size=8
    ),
    "resnet": partial(_image_model, "ResNet", embedding_size=32, layer_type="basic", **_STAGES),
    "convnext": partial(_image_model, "ConvNext", num_stages=2, patch_size=4, **_STAGES),
    "encoder": encoder,
    "torchvision_resnet": torchvision_resnet,
    "timm_convnext": timm_convnext,
}
LIBRARIES = {"torchvision_resnet": "torchvision", "timm_convnext": "timm"}


Ranks = Callable[..., list[Any]]
# Bytes per rank that the models may take on 2 x 2 ranks in addition to 0.8 of their states.
ON_FOUR_RANKS = {"gpt2": 52_000.0, "llama": 68_000.0}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """``ranks(function, size, *args)`` calls ``function(rank, *args)`` on so many processes."""
    with Processes(4) as processes:
        yield processes.run


def _mesh(shape: Sequence[int], names: Sequence[str]) -> Any:
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))


def _made(name: str) -> Made:
    """Return a model, its inputs and its loss, in float64: other orders of sums change nothing."""
    torch.manual_seed(0)
    model, inputs, loss_of = MODELS[name]()
    wide = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    return model.double(), wide, loss_of


def _states(model: nn.Module) -> int:
    """Bytes of parameters, gradients and AdamW's states."""
    return 4 * sum(p.numel() * p.element_size() for p in model.parameters())


def _compared(name: str, mesh: Any, mode: str, activations: float = 0.0) -> tuple[int, float]:
    """Compare a planned model with the plain one.

    In mode "auto" the limit is ``activations`` and 0.8 of the bytes of replicated parameters,
    gradients and states.

    Returns:
        How many parameters are sharded, and the bytes per rank that are no such states.
    """
    model, inputs, loss_of = _made(name)
    plain = copy.deepcopy(model)
    limit = int(activations + 0.8 * _states(model)) if mode == "auto" else None
    plan = fusedops.auto_parallel(model, mesh, inputs, mode=mode, memory_limit=limit)
    assert limit is None or plan.memory <= limit
    others = plan.memory - _states(model)
    planned = plan.apply(model)
    loss, outputs = loss_of(planned(**inputs))
    expected_loss, expected_outputs = loss_of(plain(**inputs))
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(outputs, expected_outputs)
    loss.backward()
    expected_loss.backward()
    expected = dict(plain.named_parameters())
    for parameter_name, parameter in planned.named_parameters():
        gradient: Any = parameter.grad
        if expected[parameter_name].grad is None:
            assert gradient is None, parameter_name
            continue
        assert gradient.placements == plan[parameter_name], parameter_name
        torch.testing.assert_close(
            gradient.full_tensor(),
            expected[parameter_name].grad,
            msg=lambda text, name=parameter_name: f"{name}: {text}",
        )
    sharded = [any(isinstance(p, Shard) for p in places) for places in plan.placements.values()]
    return sum(sharded), others


def _on_two_ranks(rank: int, name: str) -> tuple[int, int]:
    data, half = _compared(name, _mesh([2], ["dp"]), "data")
    return data, _compared(name, _mesh([2], ["tp"]), "auto", 1.5 * half)[0]


def _on_four_ranks(rank: int, name: str) -> int:
    return _compared(name, _mesh([2, 2], ["dp", "tp"]), "auto", ON_FOUR_RANKS[name])[0]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "encoder" else pytest.mark.ci(every=5))
        for name in sorted(MODELS)
    ],
)
def test_models_compute_what_one_process_computes(name: str, ranks: Ranks) -> None:
    library = LIBRARIES.get(name, "transformers")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if name in ON_FOUR_RANKS:
        assert min(ranks(_on_four_ranks, 4, name)) > 0
    else:
        assert all(data == 0 and auto > 0 for data, auto in ranks(_on_two_ranks, 2, name))


def _trained(rank: int) -> None:
    """Take steps with clipped gradients and a tied parameter."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    model.append(nn.Linear(8, 16, bias=False))
    model[4].weight = model[0].weight
    plain = copy.deepcopy(model)
    tokens = torch.randint(0, 16, (4, 6))
    marked = {"1.weight": Shard(0), "0.weight": (Shard(0),)}
    mesh = _mesh([2], ["tp"])
    plan = fusedops.auto_parallel(model, mesh, (tokens,), mode="semi-auto", marked=marked)
    assert plan["3.weight"] == (Shard(1),) and plan["3.bias"] == (Replicate(),)
    planned = plan.apply(model)
    assert planned[4].weight is planned[0].weight
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (planned, plain)]
    for _ in range(3):
        losses = []
        for run, optimizer in zip((planned, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(run.parameters(), 0.1)
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
    other = planned(tokens[:2, :3])  # another shape is traced when it comes
    torch.testing.assert_close(other, plain(tokens[:2, :3]))


class _BranchOnData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) > 0:
            x = x + 1
        return self.fc(x)


def _batch_norm(rank: int) -> None:
    """The statistics of a batch norm are those of all rows."""
    torch.manual_seed(2)
    image = torch.randn(4, 3, 6, 6)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    plain = copy.deepcopy(model)
    plan = fusedops.auto_parallel(model, _mesh([2], ["data"]), (image,), mode="data")
    torch.testing.assert_close(plan.apply(model)(image), plain(image))
    torch.testing.assert_close(model[1].running_var, plain[1].running_var)
    assert model[1].num_batches_tracked == 1


def _fused(rank: int) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.up = nn.Linear(8, 16)
            self.down = nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = fusedops.layer_norm(x, (8,), self.norm.weight, self.norm.bias)
            h = fusedops.linear_act(h, self.up.weight, self.up.bias)
            with torch.no_grad():
                scale = h.abs().mean()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scale = scale + self.up(x).mean().float()
            h = h * scale + torch.cdist(h, h)  # has no rule
            h = torch.logcumsumexp(h, -1)  # has a wrong rule in torch 2.13
            return self.down(fusedops.gelu(h))

    torch.manual_seed(3)
    mesh = _mesh([2], ["tp"])
    model, x = Fused(), torch.randn(4, 16, 8)
    plain = copy.deepcopy(model)
    marked = {"up": Shard(0), "down.weight": Shard(1)}
    plan = fusedops.auto_parallel(model, mesh, (x,), mode="hybrid", marked=marked)
    assert plan["up.bias"] == (Shard(0),)
    assert plan["norm.weight"] == (Replicate(),)
    assert "1 x cdist" in str(plan)
    planned = plan.apply(model)
    torch.testing.assert_close(planned(x), plain(x))
    planned(x).square().mean().backward()
    plain(x).square().mean().backward()
    for name, parameter in plain.named_parameters():
        gradient: Any = planned.get_parameter(name).grad
        torch.testing.assert_close(gradient.full_tensor(), parameter.grad)


@pytest.mark.distributed
@pytest.mark.parametrize("function", [_trained, _batch_norm, _fused])
def test_two_ranks_compute_what_one_process_computes(
    function: Callable[..., None], ranks: Ranks
) -> None:
    ranks(function, 2)


def _with_dropout(rank: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(4 + rank)  # the first rank's weights and seed count
    mesh = _mesh([2], ["tp"])
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    x = torch.ones(2, 8)
    plan = fusedops.auto_parallel(model, mesh, (x,), memory_limit=9400)
    planned = plan.apply(model)
    first, second = planned(x), planned(x)
    planned.eval()
    assert torch.equal(planned(x), planned(x))
    return first.flatten().tolist(), second.flatten().tolist()


@pytest.mark.distributed
def test_ranks_agree_on_dropout(ranks: Ranks) -> None:
    first, second = ranks(_with_dropout, 2)
    assert first == second
    assert first[0] != first[1]


@pytest.fixture
def fake_mesh() -> Iterator[Callable[..., Any]]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield _mesh
    dist.destroy_process_group()


def _mlp(depth: int = 2, hidden: int = 64) -> nn.Module:
    layers = [
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, hidden), nn.GELU(), nn.Linear(hidden, 16))
        for _ in range(depth)
    ]
    return nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 8))


def test_collectives_between_nodes_use_all_network_cards(fake_mesh: Callable[..., Any]) -> None:
    device = load_device("h100")
    small_nodes = replace(device, links=replace(device.links, devices_per_node=2))
    rate = device.links.network * device.efficiency.ring
    for shape, names, cards in (([4], ["tp"], 2), ([2, 2], ["dp", "tp"], 1)):
        costs = MeshCosts(fake_mesh(shape, names), small_nodes)
        free = costs.collective("all-gather", 0.0, 0).seconds
        step = costs.collective("all-gather", 1e9, 0)
        assert step.seconds - free == pytest.approx(sum(step.sent) / (cards * rate))
        of_ring = 1e9 * (shape[0] - 1) / shape[0]
        assert sum(step.sent) == of_ring
        assert sum(costs.collective("all-reduce", 1e9, 0).sent) == 2 * of_ring


@pytest.mark.parametrize("limit", [None, 60_000, 36_000])
@pytest.mark.parametrize("names", [("tp",), ("dp", "tp")])
@pytest.mark.parametrize("depth", [2, pytest.param(5, marks=pytest.mark.ci(every=3))])
def test_search_is_as_good_as_all_combinations(
    fake_mesh: Callable[..., Any], depth: int, names: tuple[str, ...], limit: int | None
) -> None:

    limit = limit and limit * depth // 2
    mesh = fake_mesh([2] * len(names), names)
    inputs = (torch.randn(64, 8),)
    evaluator = evaluator_for(FakeModel(_mlp(depth), "cpu"), mesh, load_device("h100"), inputs, {})
    units = units_of(evaluator, {}, limit is not None)
    names_of = evaluator.graph.parameters
    measured = []
    for options in itertools.product(*units):
        stored = {names_of[n]: places for option in options for n, places in option.items()}
        cost, memory, _ = evaluator.total_of(stored)
        measured.append((cost.seconds, memory))
    fitting = [seconds for seconds, memory in measured if limit is None or memory <= limit]
    result = solve(evaluator, units, "seconds", limit)
    assert len(measured) > 20
    if not fitting:
        assert result is None
        return
    assert result is not None
    assert result.exact
    assert evaluator.total_of(result.placements)[0].seconds == pytest.approx(min(fitting))
    least = solve(evaluator, units, "memory")
    assert least is not None
    assert evaluator.total_of(least.placements)[1] <= min(memory for _, memory in measured)


@pytest.mark.parametrize("layer", [1, 6])
def test_layers_of_a_deep_model_share_decisions(fake_mesh: Callable[..., Any], layer: int) -> None:
    mesh = fake_mesh([2, 2], ["dp", "tp"])
    marked = {f"{layer}.1.weight": (Replicate(), Shard(0))}
    options: dict[str, Any] = {"mode": "semi-auto", "marked": marked}
    plan = fusedops.auto_parallel(_mlp(depth=12), mesh, (torch.randn(64, 8),), **options)
    assert plan[f"{layer}.1.weight"] == (Replicate(), Shard(0))
    assert plan[f"{layer}.3.weight"] == (Replicate(), Shard(1))
    others = {other for other in range(1, 13) if other != layer}
    assert len({plan[f"{other}.1.weight"] for other in others}) == 1


def test_bytes_are_those_that_autograd_saves(fake_mesh: Callable[..., Any]) -> None:
    model, inputs, _ = _made("encoder")
    saved: dict[int, torch.Tensor] = {}
    kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs)
    nbytes = sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in kept)
    plan = fusedops.auto_parallel(model, fake_mesh([1], ["dp"]), inputs, mode="data")
    assert plan.memory - _states(model) == pytest.approx(nbytes, rel=0.25)


def test_both_mesh_dimensions_may_shard_parameters(fake_mesh: Callable[..., Any]) -> None:
    mesh, inputs = fake_mesh([2, 2], ["a", "b"]), (torch.randn(64, 8),)
    least = fusedops.auto_parallel(_mlp(), mesh, inputs).memory
    plan = fusedops.auto_parallel(_mlp(), mesh, inputs, memory_limit=int(0.6 * least))
    placements = plan.placements.values()
    assert any(all(isinstance(place, Shard) for place in places) for places in placements)


def test_plan_can_be_printed_and_edited(fake_mesh: Callable[..., Any]) -> None:
    mesh = fake_mesh([2, 2], ["dp", "tp"])
    plan = fusedops.auto_parallel(_mlp(), mesh, (torch.randn(64, 8),), mode="data")
    before = plan.memory
    plan["*.1.weight"] = (Replicate(), Shard(0))
    assert plan.memory < before
    text = str(plan)
    assert "*.*.weight  2      64 x 16  R, S(0)" in text
    assert "R, S(0)" in text
    assert "sent per step and rank: all-reduce" in text
    with pytest.raises(KeyError, match=r"did you mean"):
        plan["*.1.wieght"] = (Replicate(), Shard(0))
    with pytest.raises(ValueError, match="one placement for each of the mesh dimensions dp, tp"):
        plan["*.1.weight"] = (Shard(0),)
    with pytest.raises(ValueError, match="no dim 2 to shard"):
        plan["1.1.weight"] = (Replicate(), Shard(2))
    with pytest.raises(TypeError, match="needs placements such as"):
        plan["1.1.weight"] = "tp"
    with pytest.raises(ValueError, match="differ in weight: \\(3, 3\\) and no such parameter"):
        plan.apply(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="differ in 1.1.weight: \\(32, 16\\) and \\(64, 16\\)"):
        plan.apply(_mlp(hidden=32))


def test_wrong_requests_are_one_sentence(fake_mesh: Callable[..., Any]) -> None:
    mesh, model, inputs = fake_mesh([2, 2], ["dp", "tp"]), _mlp(), (torch.randn(64, 8),)

    def of(*args: Any, **options: Any) -> Callable[[], Any]:
        return lambda: fusedops.auto_parallel(*args, **options)

    sharded = {"1.1.wieght": (Replicate(), Shard(0))}
    one, two = {"1.1.weight": (Shard(0),)}, {"weight": (Shard(0), Shard(0))}
    own = (model, mesh, inputs)
    without_data, unnamed = fake_mesh([4], ["tp"]), init_device_mesh("cpu", (4,))
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (of(*own, mode="atuo"), ValueError, "did you mean 'auto'"),
        (of(*own, mode="hybrid"), ValueError, "needs marked placements"),
        (of(*own, marked={"0.weight": Shard(0)}), ValueError, "ignores marked"),
        (of(*own, memory_limit=1000), ValueError, "the least that mode 'auto' needs per rank is"),
        (of(*own, memory_limit=1000, mode="data"), ValueError, 'mode "auto", which shards'),
        (of(*own, mode="hybrid", marked=sharded), KeyError, "did you mean"),
        (of(*own, mode="hybrid", marked=one), ValueError, "one placement for each of the mesh dim"),
        (of(model, mesh, (torch.randn(63, 8),)), ValueError, "63 cannot be divided by the 2 ranks"),
        (of(nn.Linear(8, 6), mesh, inputs, mode="hybrid", marked=two), ValueError, "dim 0"),
        (of(model, without_data, inputs, mode="data"), ValueError, "named dp or data"),
        (of(model, unnamed, inputs), ValueError, "mesh must be of one or two named dimensions"),
        (of(model, None, inputs), TypeError, "mesh must be a DeviceMesh"),
        (of(torch.relu, mesh, inputs), TypeError, r"model must be a torch\.nn\.Module"),
        (of(model, mesh, ()), ValueError, "no tensor with the batch in dim 0"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message) as caught:
            call()
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UnsupportedError, match=r"trace .*_BranchOnData.*DistributedData") as e:
        fusedops.auto_parallel(_BranchOnData(), mesh, inputs, mode="data")
    assert len(str(e.value).splitlines()) == 1
    assert "test_auto_parallel.py" in str(e.value)
