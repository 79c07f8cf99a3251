"""Layers, embeddings and losses split over ranks equal the plain ones; what they communicate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from comparing import assert_all_close
from one_process import full_tensor
from run_ranks import on_threads
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fusedops._core import dtypes
from fusedops.nn import (
    MLP,
    AddLayerNorm,
    AddRMSNorm,
    GatedMLP,
    LayerNorm,
    LinearAct,
    LinearCrossEntropyLoss,
    RMSNorm,
)
from fusedops.ops import linear_token_logprobs
from fusedops.parallel.comm import collectives
from fusedops.parallel.tensor.layers import (
    ColumnLinear,
    ParallelGatedMLP,
    ParallelMLP,
    RowLinear,
    distribute,
    local,
    reduce_in_place,
    to_tensor_parallel,
)
from fusedops.parallel.tensor.replicated import allreduce_gradients
from fusedops.parallel.tensor.vocabulary import (
    VocabParallelProjection,
    VocabularyEmbedding,
    vocab_parallel_cross_entropy,
    vocab_parallel_token_logprobs,
)
from fusedops.testing import threads

Events = list[tuple[str, str]]
B, S, H, F, V = 2, 12, 20, 24, 23


def tp_mesh() -> DeviceMesh:
    """Return the world as a mesh of tensor-parallel ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def part_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's part of a tensor that all ranks have."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def parts_of(results: dict[str, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return results with this rank's part of the sequence, of those of the names."""
    return {name: part_of(each, 1) if name in names else each for name, each in results.items()}


def run(
    module: nn.Module, input: torch.Tensor, grad: torch.Tensor | float, *more: Any
) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of the input and of each parameter by name."""
    input = input.detach().clone().requires_grad_()
    module.zero_grad()
    output = module(input, *more)
    output.backward(grad if isinstance(grad, torch.Tensor) else torch.full_like(output, grad))
    grads = {name: full_tensor(parameter.grad) for name, parameter in module.named_parameters()}
    return {"output": output.detach(), "input": input.grad, **grads}


def one_process(
    make: Callable[[torch.dtype], nn.Module],
    input: torch.Tensor,
    grad: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what the plain module gives in ``dtype`` and in float64."""
    given = (make(dtype), input.to(dtype), grad.to(dtype))
    wide = torch.float64
    exact = make(dtype).to(wide), input.to(dtype).to(wide), grad.to(dtype).to(wide)
    return run(*given), run(*exact)


class _Pair(nn.Module):
    """A column-parallel layer and a row-parallel one behind it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = LinearAct(H, F, dtype=dtype, activation="gelu")
        self.second = nn.Linear(F, H, dtype=dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(input))


def _split_pair(module: Any, mesh: Any, **options: bool) -> nn.Module:
    module.first = ColumnLinear.of(module.first, mesh, **options)
    module.second = RowLinear.of(module.second, mesh, **options)
    return module


LAYERS: dict[str, tuple[Callable[[torch.dtype], nn.Module], Callable[..., nn.Module]]] = {
    "pair": (_Pair, _split_pair),
    "mlp": (lambda dtype: MLP(H, F, dtype=dtype), ParallelMLP.of),
    "recomputed": (lambda dtype: MLP(H, F, dtype=dtype, recompute=True), ParallelMLP.of),
    "kept": (lambda dtype: MLP(H, F, dtype=dtype, keep_hidden=True), ParallelMLP.of),
    "gated": (lambda dtype: GatedMLP(H, F, dtype=dtype), ParallelGatedMLP.of),
    "tiles": (lambda dtype: MLP(H, F, dtype=dtype, tile_tokens=3), ParallelMLP.of),
    "gated_tiles": (lambda dtype: GatedMLP(H, F, dtype=dtype, tile_tokens=3), ParallelGatedMLP.of),
    "gated_bias": (lambda dtype: GatedMLP(H, F, bias=True, dtype=dtype), ParallelGatedMLP.of),
}


def _seeded(make: Callable[[torch.dtype], nn.Module]) -> Callable[[torch.dtype], nn.Module]:
    def made(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(1)
        return make(dtype)

    return made


def _layers(rank: int, dtype: torch.dtype) -> None:
    mesh = tp_mesh()
    input, grad = torch.randn(2, B, S, H).to(dtype)
    for name, (make, split) in LAYERS.items():
        make = _seeded(make)
        eager, truth = one_process(make, input, grad, dtype)
        keys = list(make(dtype).state_dict())
        for options in ({}, {"sequence": True}, {"sequence": True, "overlap": True}):
            if "overlap" in options and name in (
                "recomputed",
                "gated_bias",
                "tiles",
                "gated_tiles",
            ):
                continue  # refused
            layer = split(make(dtype), mesh, **{"sequence": False, **options})
            assert list(layer.state_dict()) == keys, name
            if not options:
                assert_all_close(run(layer, input, grad), truth, eager, F)
                continue
            here = [parts_of(each, ("output", "input")) for each in (truth, eager)]
            assert_all_close(run(layer, part_of(input, 1), part_of(grad, 1)), *here, F)


each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["f64", "bf16"])


@each_dtype
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_split_layers_equal_the_plain_ones(ranks: int, dtype: torch.dtype) -> None:
    threads.run(_layers, ranks, dtype)


@pytest.mark.distributed
def test_split_layers_on_processes_equal_the_plain_ones(on_processes: Callable[..., Any]) -> None:
    on_processes(_layers, 2, torch.bfloat16)


def _in_place(rank: int) -> None:
    """A product is reduced where it is; leaves and views, which may be others, elsewhere."""
    group = dist.group.WORLD
    x = torch.full((2, 4), 1.0 + rank, requires_grad=True)
    product = x * 3.0
    memory = product.data_ptr()
    output = reduce_in_place(product, group)
    assert output.data_ptr() == memory and torch.equal(output, torch.full((2, 4), 9.0))
    output.backward(torch.full((2, 4), 2.0))
    assert torch.equal(x.grad, torch.full((2, 4), 6.0))
    # The product is an input of another operation, which reads it before the reduction.
    squared = (product := x * 3.0).square()
    assert torch.equal(reduce_in_place(product, group), torch.full((2, 4), 9.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    for mine in (x, x.detach(), (x * 3.0)[:, :2]):
        before = mine.clone()
        total = reduce_in_place(mine, group)
        assert torch.equal(mine, before) and not torch.equal(total, before)


@pytest.mark.distributed
def test_a_reduction_in_place_corrupts_nothing_that_is_needed(
    on_processes: Callable[..., Any],
) -> None:
    on_processes(_in_place, 2)


BLOCKS: dict[str, tuple[Any, Callable[..., Any], int, int]] = {
    "column": (lambda: LinearAct(H, F, activation="gelu"), ColumnLinear.of, H, F),
    "column_linear": (lambda: LinearAct(H, F, False, activation="identity"), ColumnLinear.of, H, F),
    "row": (lambda: LinearAct(F, H, activation="identity"), RowLinear.of, F, H),
    "mlp": (lambda: MLP(H, F), ParallelMLP.of, H, H),
    "gated": (lambda: GatedMLP(H, F), ParallelGatedMLP.of, H, H),
}


def _block_results(rank: int, ranks: int, dtype: torch.dtype) -> dict[str, Events]:
    """Return what overlaps in each layer."""
    mesh, found = tp_mesh(), {}
    for name, (make, split, inputs, outputs) in BLOCKS.items():
        module = make().to(dtype)
        x, grad = torch.randn(B, S, inputs).to(dtype), torch.randn(B, S, outputs).to(dtype)
        # Of a column the input is a part of the sequence, of a row the output; features the rest.
        mine = part_of(x, 2 if name == "row" else 1)
        incoming = part_of(grad, 2 if name.startswith("column") else 1)
        plain, cut = (split(module, mesh, sequence=True, overlap=each) for each in (False, True))
        with collectives.recorded() as log:
            expected = run(plain, mine, incoming)
        with collectives.recorded() as blocks:
            results = run(cut, mine, incoming)
        assert results.keys() == expected.keys()
        for key, value in results.items():
            # A whole MLP, fusedops.mlp, rounds and adds up in other places.
            same = name == "mlp" or torch.equal(value, expected[key])
            assert same, f"{name}: {key} has other bits"
        again = (ranks - 1) * mine.numel() * mine.element_size() if name != "row" else 0
        assert blocks.bytes() == log.bytes() + again, name
        found[name] = blocks.overlapped()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("ranks", [2, 4])
def test_blocks_give_the_same_bits_beside_communication(ranks: int, dtype: torch.dtype) -> None:
    """The input is gathered once more in the backward, where a whole product keeps it."""
    for rank, answer in enumerate(threads.run(_block_results, ranks, ranks, dtype)):
        ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks
        for name in ("column", "column_linear", "mlp", "gated"):
            assert (f"block {behind} comes", f"block {rank}") in answer[name]
            after = f"gradient of block {(ahead + 1) % ranks}"
            assert (f"block {ahead} leaves", after) in answer[name]
            assert ("input comes again", f"gradient of block {ahead}") in answer[name]
        for name in ("row", "mlp", "gated"):
            assert (f"block {ahead} leaves", f"block {(ahead + 1) % ranks}") in answer[name]
            assert (f"block {behind} comes", f"gradient of block {rank}") in answer[name]


@on_threads(2)
def test_bad_input_names_what_is_wrong(rank: int) -> None:
    mesh = tp_mesh()
    with pytest.raises(ValueError, match="ParallelMLP: overlap must be False without sequence"):
        ParallelMLP.of(MLP(H, F), mesh, overlap=True)
    with pytest.raises(ValueError, match="overlap must be False where the module recomputes"):
        ParallelMLP.of(MLP(H, F, recompute=True), mesh, sequence=True, overlap=True)
    for layer, kind in ((MLP, ParallelMLP), (GatedMLP, ParallelGatedMLP)):
        with pytest.raises(ValueError, match="tile_tokens must be None with overlap"):
            kind.of(layer(H, F, tile_tokens=2), mesh, sequence=True, overlap=True)
    layer = RowLinear.of(LinearAct(F, H, activation="identity"), mesh, sequence=True, overlap=True)
    with pytest.raises(ValueError, match="size of dim -2 must be a multiple of the 2 ranks"):
        layer(torch.zeros(3, F // 2))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: LayerNorm(H),
    "layer_without_bias": lambda: LayerNorm(H, bias=False),
    "plain": lambda: LayerNorm(H, elementwise_affine=False),
    "rms": lambda: RMSNorm(H, 1e-5, weight_offset=1.0, rounding="hf"),
    "add_layer": lambda: AddLayerNorm(H),
    "add_rms": lambda: AddRMSNorm(H),
}


def _norm_results(
    norm: nn.Module, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    inputs = tuple(each.detach().clone().requires_grad_() for each in inputs)
    outputs = norm(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [grad] * len(outputs))
    found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    found |= {f"input {i}": each.grad for i, each in enumerate(inputs)}
    return found | {
        name: full_tensor(parameter.grad) for name, parameter in norm.named_parameters()
    }


def _norms(rank: int, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    mesh, counts = tp_mesh(), {}
    x, residual, grad = torch.randn(3, B, S, H).to(dtype)
    for name, make in NORMS.items():
        plain = make().to(dtype)
        inputs = (x, residual) if name.startswith("add") else (x,)
        for parameter in plain.parameters():
            nn.init.normal_(parameter)
        allreduce_gradients(split := deepcopy(plain), mesh)
        assert list(split.state_dict()) == list(plain.state_dict())
        eager = _norm_results(plain, inputs, grad)
        plain.zero_grad()
        wide = (each.double() for each in inputs)
        truth = _norm_results(plain.double(), tuple(wide), grad.double())
        mine = tuple(part_of(each, 1) for each in inputs)
        with collectives.recorded() as log:
            found = _norm_results(split, mine, part_of(grad, 1))
        counts[name] = log.counts()
        names = [key for key in found if key[-1].isdigit()]
        assert_all_close(found, *(parts_of(each, names) for each in (truth, eager)), B * S)
    return counts


@each_dtype
def test_norms_of_parts_equal_those_of_the_whole(dtype: torch.dtype) -> None:
    """One all-reduce adds up the gradients of weight and bias."""
    for name, count in threads.run(_norms, 2, dtype)[0].items():
        assert count == ({} if name == "plain" else {"all_reduce": 1}), name


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "kept": {"recompute": False, "bias": True},
    "again": {"recompute": True, "chunk_size": 5, "reduction": "sum"},
    "smoothing": {"label_smoothing": 0.2, "reduction": "none", "bias": True},
    "all": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "ignore_index": -1},
    "offset": {"label_smoothing": 0.1, "bias": True, "recompute": True},
    "class_ignored": {"ignore_index": 4},
}


class _SplitLoss(nn.Module):
    """A loss whose vocabulary is split over ranks."""

    def __init__(
        self, plain: LinearCrossEntropyLoss, mesh: Any, sequence: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.group, self.sequence, self.options = mesh.get_group(), sequence, options
        self.weight, self.bias = (
            distribute("loss", name, getattr(plain, name), mesh, 0, uneven=True)
            for name in ("weight", "bias")
        )

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = to_tensor_parallel(hidden, self.group, sequence=self.sequence)
        weight, bias = local(self.weight), local(self.bias)
        return vocab_parallel_cross_entropy(
            x, weight, target, self.group, bias, vocab_size=V, **self.options
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        projection = VocabParallelProjection(self.group, V)
        x = to_tensor_parallel(hidden, self.group, sequence=self.sequence)
        logits = projection.gather_logits(projection.local_logits(x, self.weight, self.bias))
        softcap = self.options.get("softcap")
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@on_threads("ranks")
def test_split_losses_equal_the_whole_ones(rank: int, ranks: int, dtype: torch.dtype) -> None:
    """23 words on 2 and 4 ranks: the last has fewer."""
    mesh, hidden = tp_mesh(), torch.randn(B, S, H).to(dtype)
    target = torch.randint(V, (B, S))
    target[0, 0], target[0, 1], target[1, 3] = 0, V - 1, 4
    for name, options in LOSSES.items():
        plain = LinearCrossEntropyLoss(H, V, dtype=dtype, **options)
        if name == "offset":
            with torch.no_grad():
                plain.bias += 1e6
        labels = target.clone()
        labels[1, :2] = plain.ignore_index
        exact = deepcopy(plain).double()
        eager, truth = run(plain, hidden, 1 / 3, labels), run(exact, hidden.double(), 1 / 3, labels)
        for sequence in (False, True):
            given = {name: value for name, value in options.items() if name != "bias"}
            split = _SplitLoss(plain, mesh, sequence, **given)
            mine = part_of(hidden, 1) if sequence else hidden
            parts = ["input"] if sequence else []
            found = run(split, mine, 1 / 3, labels)
            assert found["output"].dtype == dtypes.statistics_dtype(dtype)
            eager["output"] = eager["output"].to(found["output"].dtype)
            assert_all_close(found, *(parts_of(each, parts) for each in (truth, eager)), V)
            logits = split.logits(mine)
            if not sequence:
                expected = plain.logits(hidden)
                assert_all_close(
                    {"": logits}, {"": exact.logits(hidden.double())}, {"": expected}, H
                )


class _Tokens(nn.Module):
    """Log-probabilities, log-sum-exps and entropies, of a vocabulary that may be split."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, mesh: Any = None) -> None:
        super().__init__()
        parameters = {"weight": weight, "bias": bias}
        for name, value in parameters.items():
            parameter = nn.Parameter(value)
            if mesh is not None:
                parameter = distribute("tokens", name, parameter, mesh, 0, uneven=True)
            self.register_parameter(name, parameter)
        self.group = None if mesh is None else mesh.get_group()

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"temperature": 0.7, "softcap": 5.0, "return_entropy": True}
        if self.group is None:
            tokens = linear_token_logprobs(hidden, self.weight, target, self.bias, **options)
        else:
            x = to_tensor_parallel(hidden, self.group, sequence=False)
            args = (x, local(self.weight), target, self.group, local(self.bias))
            tokens = vocab_parallel_token_logprobs(*args, vocab_size=V, **options)
        self.is_argmax = tokens.is_argmax
        assert tokens.entropy is not None
        return torch.stack((tokens.logprobs, tokens.logsumexp, tokens.entropy))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@on_threads("ranks")
def test_split_log_probabilities_equal_the_whole_ones(
    rank: int, ranks: int, dtype: torch.dtype
) -> None:
    mesh, hidden = tp_mesh(), torch.randn(B, S, H).to(dtype)
    weight, bias = torch.randn(V, H).to(dtype), torch.randn(V).to(dtype)
    target = (hidden.double() @ weight.double().T + bias).argmax(-1)
    target[0, 0], target[0, 1], target[1, :2] = 0, V - 1, -100
    plain = _Tokens(weight, bias)
    truth = run(deepcopy(plain).double(), hidden.double(), 1 / 3, target)
    split, eager = _Tokens(weight, bias, mesh), run(plain, hidden, 1 / 3, target)
    assert_all_close(run(split, hidden, 1 / 3, target), truth, eager, V)
    assert torch.equal(split.is_argmax, plain.is_argmax)
    assert 0 < split.is_argmax.sum() < target.numel()


@pytest.mark.parametrize("ranks", [2, 4])
@on_threads("ranks")
def test_split_embeddings_give_the_same_bits(rank: int, ranks: int) -> None:
    mesh, grad = tp_mesh(), torch.randn(B, S, H)
    tokens = torch.randint(V, (B, S))
    tokens[0, :3] = torch.tensor([0, V - 1, 3])
    for padding in (None, 3, V - 1):
        plain = nn.Embedding(V, H, padding_idx=padding)
        output = plain(tokens)
        output.backward(grad)
        for sequence in (False, True):
            split = VocabularyEmbedding.of(plain, mesh, sequence=sequence)
            found = split(tokens)
            if sequence:
                assert torch.equal(found, part_of(output, 1))
                found.backward(part_of(grad, 1))
            else:
                assert torch.equal(found, output)
                found.backward(grad)
            assert torch.equal(full_tensor(split.weight.grad), plain.weight.grad)
        with pytest.raises(ValueError, match=r"tokens must be in \[0, 23\), got 23"):
            split(tokens + 1 + V - 1 - int(tokens.max()))


@on_threads(2)
def test_bad_words_and_vocabularies_are_named(rank: int) -> None:
    mesh = tp_mesh()
    head = _SplitLoss(LinearCrossEntropyLoss(H, V), mesh)
    target = torch.zeros(B, S, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"target must be in \[0, 23\) .* got 23 at row 1"):
        target[0, 1] = V
        head(torch.zeros(B, S, H), target)
    with pytest.raises(ValueError, match="size of dim 0 of weight must be enough for the 2 ranks"):
        VocabularyEmbedding.of(nn.Embedding(1, H), mesh)
    with pytest.raises(ValueError, match="max_norm must be off"):
        VocabularyEmbedding.of(nn.Embedding(V, H, max_norm=1.0), mesh)
    with pytest.raises(TypeError, match="module must be a torch.nn.*Embedding, got .*Linear"):
        VocabularyEmbedding.of(nn.Linear(V, H), mesh)  # type: ignore[arg-type]
