"""Offload: what comes back is what left, however late; no weights leave; faults are told."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from small_models import assert_keeps_bits, encoder, encoder_loss, results
from stepped_engine import SteppedEngine, WatchedEngine

import fusedops
from fusedops import memory
from fusedops.memory.apply import policy_state_of
from fusedops.memory.offloading import pool as pools
from fusedops.memory.offloading.offloader import Offloader
from fusedops.memory.offloading.pool import BufferReuseError
from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.ops._weight_gradients import summed
from fusedops.runtime.copy_engine import CopyTimeoutError, HostCopyEngine
from fusedops.testing import threads

CPU = torch.device("cpu")


def offloading(**settings: Any) -> torch.nn.Module:
    """Return a model of which all is offloaded."""
    model = encoder()
    options = memory.OffloadSettings(**{"least_bytes": 1} | settings)
    memory.apply(model, memory.Policy(memory.offload("*")), offload_settings=options)
    return model


@pytest.mark.parametrize("seed", range(150))
def test_what_comes_back_is_what_left_under_any_schedule(seed: int) -> None:
    """Tensors leave, come back, are asked for again and are dropped, as the seed says."""
    draw = random.Random(seed)
    settings = memory.OffloadSettings(
        check=True,
        prefetch_depth=draw.randrange(3),
        in_flight_bytes=draw.choice((0, 20_000, 1 << 30)),
        engine=lambda device: SteppedEngine(seed),
    )
    offloader = Offloader(CPU, settings)
    held: list[tuple[Any, int]] = []
    for number in range(60):
        action = draw.random()
        if action < 0.5 or not held:
            if draw.random() < 0.4:
                offloader.new_group()
            tensor = torch.full((draw.choice((1000, 2000, 3000)),), number, dtype=torch.float32)
            held.append((offloader.put(tensor), number))
            del tensor
        else:
            away, value = held.pop(draw.randrange(len(held)))
            if action < 0.85:
                away.waiting += 1
                found = away.get().view(torch.float32)
                assert bool((found == value).all()), f"{value} left, {found.unique()} came back"
                if draw.random() < 0.3:
                    held.append((away, value))
                del found
            del away


def test_bytes_that_changed_in_a_buffer_are_told() -> None:
    offloader = Offloader(CPU, memory.OffloadSettings(check=True, in_flight_bytes=0))
    away = offloader.put(torch.ones(3000))
    away.buffer.zero_()
    away.waiting += 1
    with pytest.raises(BufferReuseError, match="other bytes came back than had left"):
        away.get()


def test_a_free_buffer_that_is_written_to_is_told() -> None:
    engine = SteppedEngine(0)
    pool = pools.Pool(engine, check=True)
    buffer = pool.take(5000)
    pool.give_back(buffer)
    pool.cool()
    assert bool((buffer == pools.POISON).all())
    buffer[17] = 0
    with pytest.raises(BufferReuseError, match="written to while it was free"):
        pool.take(5000)


def test_a_buffer_is_used_again_after_its_copies_only() -> None:
    engine = HostCopyEngine(delay=lambda number: 0.0 if number == 0 else None)
    pool = pools.Pool(engine)
    source, first = torch.zeros(4096, dtype=torch.uint8), pool.take(4096)
    done, pending = (engine.copy(source, first, to_host=True) for _ in range(2))
    engine.finish(done, 10.0)
    pool.give_back(first, done, pending)
    second = pool.take(4096)
    assert second.data_ptr() != first.data_ptr()
    pending.set_result(None)
    assert pool.take(4096).data_ptr() == first.data_ptr()
    assert pool.nbytes == 8192


@pytest.mark.parametrize(
    "delay",
    [
        lambda number: 0.0,
        lambda number: 0.002,
        lambda number: 0.004 if number % 3 == 0 else 0.0,
        lambda number: random.Random(number).random() * 0.005,
    ],
    ids=["at once", "late", "some late", "any order"],
)
def test_a_model_trains_alike_however_late_the_copies_are(
    delay: Callable[[int], float | None],
) -> None:
    settings = memory.OffloadSettings(
        check=True, least_bytes=1, engine=lambda device: HostCopyEngine(workers=3, delay=delay)
    )
    rules = [memory.offload("*")]
    assert_keeps_bits(encoder(dropout=0.2), encoder_loss, rules, steps=3, settings=settings)


class Loses(HostCopyEngine):
    """Never ends the copies one way, from some copy on."""

    def __init__(self, to_host: bool) -> None:
        super().__init__()
        self._loses = to_host

    def copy(self, *args: Any, to_host: bool, **options: Any) -> Any:
        if to_host == self._loses:
            self._delay = lambda number: None if number >= 5 else 0.0
        return super().copy(*args, to_host=to_host, **options)


@pytest.mark.parametrize(("to_host", "way"), [(True, "out, module '0'"), (False, "back")])
def test_a_copy_that_never_finishes_is_an_error_that_names_it(to_host: bool, way: str) -> None:
    model = offloading(in_flight_bytes=0, timeout=0.05, engine=lambda device: Loses(to_host))
    with pytest.raises(CopyTimeoutError, match=rf"0.05 s \(on the way {way}"):
        results(model, encoder_loss)


def test_the_layer_before_is_fetched_while_one_runs_backward() -> None:
    layers, engine = 4, WatchedEngine()
    model = encoder(layers=layers)
    policy = memory.Policy(memory.recompute("*"), memory.offload("*"))
    options = {"least_bytes": 1, "in_flight_bytes": 0, "engine": lambda device: engine}
    memory.apply(model, policy, offload_settings=memory.OffloadSettings(**options))
    results(model, encoder_loss)
    assert engine.order[:layers] == ["out"] * layers
    # Two layers' inputs are on their way when the first is waited for, then always one ahead.
    ahead = ["back", "back", "wait"] + ["back", "wait"] * (layers - 2) + ["wait"]
    assert engine.order[layers:] == ahead


@pytest.mark.parametrize("step", [results, lambda model, loss: loss(model)], ids=["", "dropped"])
def test_buffers_are_used_again_by_the_next_step(step: Callable[..., object]) -> None:
    """Also those of a graph that is dropped without a backward."""
    model = offloading(in_flight_bytes=0, check=True)
    sizes = []
    for _ in range(4):
        step(model, encoder_loss)
        gc.collect()
        sizes.append(next(iter(policy_state_of(model).offloaders.values())).host_bytes)
    assert sizes[3] == sizes[1]


@pytest.mark.parametrize("check", [False, True])
def test_empty_tensors_leave_and_come_back(check: bool) -> None:
    model = offloading(check=check, least_bytes=0)
    model(torch.empty(0, 16, 32)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert not any(bool(grad.any()) for grad in gradients if grad is not None)


def test_too_little_host_memory_is_told_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError, match="more are wanted, and host_bytes allows 20000"):
        results(offloading(host_bytes=20_000), encoder_loss)
    monkeypatch.setattr(pools, "available_bytes", lambda: 5000)
    model = offloading()
    with pytest.raises(MemoryError, match="bytes of host memory are wanted, and 5000 are"):
        results(model, encoder_loss)
    # The same model trains where there is room: nothing was left half done.
    monkeypatch.setattr(pools, "available_bytes", lambda: None)
    assert_same_bits(results(model, encoder_loss), results(encoder(), encoder_loss))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["offload", "both"])
def test_a_model_on_a_gpu_trains_alike_through_pinned_memory(policy: str) -> None:
    model = encoder(dropout=0.2, hidden=256).cuda()

    def loss(model: torch.nn.Module) -> torch.Tensor:
        x = torch.randn(8, 128, 256, generator=torch.Generator().manual_seed(1)).cuda()
        return (model(x) * x.roll(1, -1)).mean()

    rules = [memory.offload("*")] + [memory.recompute("*")] * (policy == "both")
    assert_keeps_bits(model, loss, rules, steps=5)
    (offloader,) = policy_state_of(model).offloaders.values()
    assert offloader.moved_bytes > 0


def _settings(engine: HostCopyEngine) -> memory.OffloadSettings:
    return memory.OffloadSettings(least_bytes=1, engine=lambda device: engine)


def _left(rank: int, name: str, dtype: torch.dtype, values: dict[str, Any]) -> tuple[int, set[str]]:
    """Return how many tensors left, and which weights among them."""
    whole = Transformer(replace(preset(name), num_layers=1), device="meta", dtype=dtype)
    run = parallelize(whole, ParallelConfig(**values), seed=0)
    engine, model = WatchedEngine(), run.model
    policy = memory.Policy(memory.offload("layers.*"))
    memory.apply(model, policy, offload_settings=_settings(engine))
    tokens = run.rows(torch.arange(4 * run.data_ranks)[:, None] + torch.arange(8))
    shard = run.shard_batch(tokens, tokens)
    run.step([shard], run.count(shard.labels))
    weights = {
        getattr(parameter, "_local_tensor", parameter).untyped_storage()._cdata: name
        for name, parameter in model.named_parameters()
    }
    return len(engine.out), {weights[each] for each in engine.out.keys() & weights.keys()}


CHUNKS = {"dp": 2, "ep": 2, "ep_chunks": 2}
OVERLAP = {"dp": 2, "ep": 2, "overlap_microbatches": True}
SPREAD: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "tp2": ("tiny-llama", torch.float32, {"tp": 2}),
    "ep2": ("tiny-mixtral", torch.float32, {"dp": 2, "ep": 2}),
    "ep2-chunks-half": ("tiny-mixtral", torch.bfloat16, CHUNKS),
    "overlap-half": ("tiny-mixtral", torch.bfloat16, OVERLAP),
}


@pytest.mark.parametrize("case", SPREAD)
def test_no_weight_to_host(case: str) -> None:
    for count, weights in threads.run(_left, 2, *SPREAD[case]):
        assert count > 5 and not weights


def test_experts_that_are_brought_from_the_host_do_not_leave() -> None:
    """Their memory is let go behind the layer: a copy under way would read what is not there."""
    torch.manual_seed(0)
    kept = fusedops.nn.MoE(16, 32, 6, 2, dtype=torch.bfloat16)
    layer, brings, moves = copy.deepcopy(kept), WatchedEngine(), WatchedEngine()
    memory.store_experts(layer, "cpu", settings=_settings(brings))
    memory.apply(layer, memory.Policy(memory.offload("")), offload_settings=_settings(moves))
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    for each in (kept, layer):
        with summed(True):
            output = each(x)
        output.square().sum().backward()
    assert moves.out and not moves.out.keys() & brings.back.keys()
    for mine, theirs in zip(layer.parameters(), kept.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
