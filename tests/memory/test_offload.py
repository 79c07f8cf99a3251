"""Offload: what comes back is what left, however the copies are scheduled; and faults are told."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import assert_keeps_bits, assert_same_bits, encoder, encoder_loss, results
from stepped_engine import SteppedEngine

from fusedops import memory
from fusedops.memory.apply import policy_state_of
from fusedops.memory.offloading import pool as pools
from fusedops.memory.offloading.offloader import Offloader
from fusedops.memory.offloading.pool import BufferReuseError
from fusedops.runtime.copy_engine import CopyTimeoutError, HostCopyEngine

CPU = torch.device("cpu")


class TooEarly(pools.Pool):
    """The planted bug: a buffer is free as soon as it is given back."""

    def give_back(self, buffer: torch.Tensor, *tickets: Any) -> None:
        self._release(buffer)


def schedule(seed: int, *, loses: float = 0.0) -> None:
    """Let tensors leave, come back, be asked for again and be dropped, as the seed says.

    Every tensor that comes back is compared with what left.
    """
    draw = random.Random(seed)
    settings = memory.OffloadSettings(
        check=True,
        prefetch_depth=draw.randrange(3),
        in_flight_bytes=draw.choice((0, 20_000, 1 << 30)),
        engine=lambda device: SteppedEngine(seed, loses=loses),
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


def offloading(**settings: Any) -> torch.nn.Module:
    """Return a model of which all is offloaded."""
    model = encoder()
    options = memory.OffloadSettings(**{"least_bytes": 1} | settings)
    memory.apply(model, memory.Policy(memory.offload("*")), offload_settings=options)
    return model


def test_what_comes_back_is_what_left_under_any_schedule() -> None:
    for seed in range(150):
        schedule(seed)


def test_the_fuzzer_finds_a_buffer_that_is_used_again_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fusedops.memory.offloading.offloader.Pool", TooEarly)
    found = 0
    for seed in range(150):
        try:
            schedule(seed)
        except BufferReuseError:
            found += 1
    assert found > 10


def test_poison_shows_in_what_is_read_from_a_buffer_that_was_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another planted bug, with the checksum off: the buffer is free when its copy back starts."""
    start = Offloader._start

    def start_and_release(offloader: Offloader, away: Any) -> None:
        started = away.prefetch is None
        start(offloader, away)
        if started and away.prefetch is not None:
            offloader._pool._release(away.buffer)

    monkeypatch.setattr(Offloader, "_start", start_and_release)
    monkeypatch.setattr("fusedops.memory.offloading.offloader._checksum", lambda tensor: 0)
    wrong = []
    for seed in range(20):
        try:
            schedule(seed)
        except (AssertionError, BufferReuseError) as error:
            wrong.append(str(error))
    assert any("nan" in each for each in wrong)


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


def test_a_copy_that_never_finishes_is_an_error_that_names_it() -> None:
    engine = HostCopyEngine(delay=lambda n: None if n == 5 else 0.0)
    model = offloading(in_flight_bytes=0, timeout=0.05, engine=lambda device: engine)
    with pytest.raises(CopyTimeoutError, match=r"0.05 s \(on the way out, module '0'"):
        results(model, encoder_loss)


def test_a_copy_back_that_never_finishes_is_an_error() -> None:
    made: list[int] = []

    class LosesTheWayBack(HostCopyEngine):
        def copy(self, source: Any, target: Any, *, to_host: bool, after: Any = None) -> Any:
            if not to_host:
                made.append(1)
                self._delay = lambda number: None
            return super().copy(source, target, to_host=to_host, after=after)

    model = offloading(in_flight_bytes=0, timeout=0.05, engine=lambda device: LosesTheWayBack())
    with pytest.raises(CopyTimeoutError, match="on the way back"):
        results(model, encoder_loss)
    assert made


def test_the_layer_before_is_fetched_while_one_runs_backward() -> None:
    """With copies of 30 ms that run side by side, layers that came one by one would take longer."""
    order: list[str] = []

    class Watched(HostCopyEngine):
        def copy(self, source: Any, target: Any, *, to_host: bool, after: Any = None) -> Any:
            order.append("out" if to_host else "back")
            return super().copy(source, target, to_host=to_host, after=after)

        def wait(self, ticket: Any, seconds: float) -> None:
            order.append("wait")
            super().wait(ticket, seconds)

    layers = 4
    settings = memory.OffloadSettings(
        least_bytes=1, in_flight_bytes=0, engine=lambda device: Watched()
    )
    model = encoder(layers=layers)
    memory.apply(
        model, memory.Policy(memory.recompute("*"), memory.offload("*")), offload_settings=settings
    )
    results(model, encoder_loss)
    assert order[:layers] == ["out"] * layers
    # Two layers' inputs are on their way when the first is waited for, then always one ahead.
    assert order[layers:] == ["back", "back", "wait"] + ["back", "wait"] * (layers - 2) + ["wait"]


def test_buffers_are_used_again_by_the_next_step() -> None:
    model = offloading(in_flight_bytes=0, check=True)
    sizes = []
    for _ in range(4):
        results(model, encoder_loss)
        gc.collect()
        sizes.append(next(iter(policy_state_of(model).offloaders.values())).host_bytes)
    assert sizes[3] == sizes[1]


def test_too_little_host_memory_is_told_before_it_is_taken() -> None:
    model = offloading(host_bytes=20_000)
    with pytest.raises(MemoryError, match="more are wanted, and host_bytes allows 20000"):
        results(model, encoder_loss)


def test_more_than_the_host_has_is_told_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "available_bytes", lambda: 5000)
    model = offloading()
    with pytest.raises(MemoryError, match="bytes of host memory are wanted, and 5000 are"):
        results(model, encoder_loss)
    # The same model trains where there is room: nothing was left half done.
    monkeypatch.setattr(pools, "available_bytes", lambda: None)
    assert_same_bits(results(model, encoder_loss), results(encoder(), encoder_loss))


def test_a_graph_that_is_dropped_gives_its_buffers_back() -> None:
    model = offloading(check=True)
    encoder_loss(model)
    gc.collect()
    until = time.monotonic() + 10
    offloader = next(iter(policy_state_of(model).offloaders.values()))
    before = offloader.host_bytes
    while time.monotonic() < until and (offloader._offloads or offloader._prefetches):
        offloader._release_done()
        time.sleep(0.01)
    encoder_loss(model)
    assert offloader.host_bytes == before


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


@pytest.mark.parametrize("check", [False, True])
def test_an_empty_tensor_leaves_and_comes_back(check: bool) -> None:
    offloader = Offloader(CPU, memory.OffloadSettings(check=check, least_bytes=0))
    for _ in range(2):
        away = offloader.put(torch.empty(0, 3))
        away.waiting += 1
        assert away.get().nbytes == 0
        del away
    model = offloading(check=check, least_bytes=0)
    model(torch.empty(0, 16, 32)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert not any(bool(grad.any()) for grad in gradients if grad is not None)
