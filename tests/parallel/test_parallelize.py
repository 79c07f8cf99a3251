"""A transformer on many processes: the loss, gradients and weights of one process.

In float64, so that what is left are differences of order, and any of meaning is plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from process_pool import World

from fusedops.models import ParallelConfig, Transformer, initialize, parallelized, preset

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
RANKS = 8
SEQUENCES, TOKENS = 8, 24
SEED = 5


def _batch(words: int, documents: bool) -> tuple[Any, ...]:
    """Return tokens, labels of which one sequence has none, and documents of uneven lengths."""
    generator = torch.Generator().manual_seed(3)
    shape = SEQUENCES, TOKENS
    tokens = torch.randint(words, shape, generator=generator)
    labels = torch.randint(words, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.1] = -100
    labels[2] = -100
    if not documents:
        return tokens, labels, None, None
    begins = torch.rand(shape, generator=generator) < 0.15
    return tokens, labels, None, begins.cumsum(1)


def _step(model: Transformer, documents: bool) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Return the mean loss, the norm of the gradients, the gradients and the weights of a step."""
    run = parallelized(model)
    batch = [
        each if each is None else run.rows(each)
        for each in _batch(model.config.vocab_size, documents)
    ]
    microbatches = run.config.microbatches
    parts = [
        [None if each is None else each.chunk(microbatches)[i] for each in batch]
        for i in range(microbatches)
    ]
    optimizer = run.optimizer(lr=0.01, eps=1e-3)
    shards = [run.shard_batch(*each) for each in parts]
    count = run.count(torch.stack([each.labels for each in shards]))
    outputs = []
    for i, shard in enumerate(shards):
        run.begin(last=i == microbatches - 1)
        output = model(*shard[:2], positions=shard.positions, document_ids=shard.document_ids)
        run.loss(output, count).backward()
        outputs.append(output)
    grads = {name: _whole(each.grad) for name, each in model.named_parameters()}
    norm = run.clip(0.1)
    optimizer.step()
    weights = {name: _whole(each.detach()) for name, each in model.named_parameters()}
    return run.mean_loss(outputs, count), norm, grads, weights


def _whole(tensor: Any) -> Any:
    if tensor is None:
        return None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def _config(name: str, **others: Any) -> Any:
    balanced = {"balance_loss": 0.01, "z_loss": 0.001} if preset(name).num_experts else {}
    sizes = {"num_layers": 2, "vocab_size": 131, "seq_len": 32}
    return replace(preset(name), **(sizes | balanced | others))


def _parity(world: World, name: str, values: dict[str, Any], on_meta: bool, documents: bool) -> str:
    from fusedops.models import parallelize

    alone = Transformer(_config(name), dtype=torch.float64, device="meta").to_empty(device="cpu")
    initialize(alone, SEED)
    if values.get("microbatches", 1) > 1:
        alone.__dict__["_parallelized"] = replace(
            parallelized(alone), config=ParallelConfig(microbatches=values["microbatches"])
        )
    model = Transformer(_config(name), dtype=torch.float64, device="meta")
    if not on_meta:
        model.to_empty(device="cpu")
        # The values of process 0 count.
        initialize(model, SEED if world.rank == 0 else SEED + 1)
    model = parallelize(model, ParallelConfig(**values), seed=SEED)
    expected, found = _step(alone, documents), _step(model, documents)
    torch.testing.assert_close(found[0], expected[0], msg=lambda text: f"loss: {text}")
    for kind, mine, theirs in zip(("gradient", "weight"), found[2:], expected[2:], strict=True):
        assert mine.keys() == theirs.keys()
        for name_, value in theirs.items():
            said = f"{kind} of {name_}"
            torch.testing.assert_close(mine[name_], value, msg=lambda text, s=said: f"{s}: {text}")
    torch.testing.assert_close(found[1], expected[1], msg=lambda text: f"norm: {text}")
    return "same"


CASES = {
    "dp8": ("tiny-gpt2", {"dp": 8}),
    "dp8-zero1": ("tiny-llama", {"dp": 8, "zero": 1}),
    "dp4-tp2": ("tiny-llama", {"dp": 4, "tp": 2}),
    "dp4-tp2-sp": ("tiny-gpt2", {"dp": 4, "tp": 2, "sp": True}),
    "dp2-tp4-sp-zero3": ("tiny-llama", {"dp": 2, "tp": 4, "sp": True, "zero": 3}),
    "dp4-cp2": ("tiny-gpt2", {"dp": 4, "cp": 2}),
    "dp2-cp2-tp2-sp-zero2": ("tiny-qwen3", {"dp": 2, "cp": 2, "tp": 2, "sp": True, "zero": 2}),
    "dp2-cp2-tp2-ulysses": ("tiny-llama", {"dp": 2, "cp": 2, "tp": 2, "context": "all_to_all"}),
    "dp8-ep4": ("tiny-mixtral", {"dp": 8, "ep": 4}),
    "dp8-ep2-zero3": ("tiny-mixtral", {"dp": 8, "ep": 2, "zero": 3}),
    "dp4-tp2-ep2": ("tiny-mixtral", {"dp": 4, "tp": 2, "ep": 2}),
    "dp2-cp2-tp2-sp-ep2-zero1": (
        "tiny-mixtral",
        {"dp": 2, "cp": 2, "tp": 2, "sp": True, "ep": 2, "zero": 1},
    ),
    "bert-dp4-tp2-sp": ("tiny-bert", {"dp": 4, "tp": 2, "sp": True}),
    "pangu-dp4-tp2-sp": ("tiny-pangu", {"dp": 4, "tp": 2, "sp": True}),
    "alibi-cp2-tp2": ("tiny-alibi", {"dp": 2, "cp": 2, "tp": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_one_process(on_ranks: OnRanks, case: str) -> None:
    name, values = CASES[case]
    assert set(on_ranks(_parity, name, values, True, False)) == {"same"}
