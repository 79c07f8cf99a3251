"""Rules: which tensors they fit, who wins, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from small_models import (
    CHECKED,
    Count,
    assert_keeps_bits,
    encoder,
    encoder_loss,
    gpt2,
    language_loss,
    peak,
    results,
)
from torch import nn

from fusedops import UnsupportedError, memory
from fusedops.memory.apply import policy_state_of
from fusedops.memory.policy import MemoryRule


@pytest.mark.parametrize(
    "rules",
    [
        [memory.save(ops="attention")],
        [memory.recompute("*"), memory.save(ops="attention")],
        [memory.recompute("*"), memory.save(ops=["mlp", "aten::mm"], outputs="preactivation")],
        [memory.recompute("*"), memory.save("*.self_attn")],
        [memory.recompute("*"), memory.save("1")],
        [memory.recompute(nn.TransformerEncoderLayer)],
        [memory.recompute(ops="layer_norm")],
        [memory.recompute(ops=["layer_norm", "add_layer_norm", "attention", "mlp"])],
        [memory.offload("*")],
        [memory.offload(ops="attention")],
        [memory.offload(when=lambda saved: saved.nbytes > 5000)],
        [memory.recompute("*"), memory.offload("*")],
        [memory.recompute("*"), memory.save(ops="attention"), memory.offload(ops="attention")],
        [memory.recompute("0"), memory.offload("1"), memory.save("2")],
        [memory.recompute(ops="layer_norm"), memory.offload("*")],
    ],
    ids=lambda rules: ", ".join(map(str, rules)),
)
def test_every_policy_gives_the_same_bits(rules: list[MemoryRule]) -> None:
    assert_keeps_bits(encoder(dropout=0.3), encoder_loss, rules, steps=2)


def test_what_is_offloaded_leaves_room() -> None:
    model = gpt2()
    before = peak(model, language_loss)
    memory.apply(model, memory.Policy(memory.offload("transformer.h.*")))
    assert peak(model, language_loss) < 0.8 * before


def test_recomputation_wins_over_offload_and_its_inputs_leave() -> None:
    model = encoder()
    policy = memory.Policy(memory.recompute("*"), memory.offload("*"))
    memory.apply(model, policy, offload_settings=CHECKED)
    results(model, encoder_loss)
    (offloader,) = policy_state_of(model).offloaders.values()
    rows = 2 * 16 * 32 * 4
    assert offloader.moved_bytes == 3 * rows


def calls(layers: int, *rules: MemoryRule) -> Counter[str]:
    """Return how often operators are called in a step."""
    model = encoder(layers=layers)
    memory.apply(model, memory.Policy(*rules))
    with Count() as counted:
        results(model, encoder_loss)
    return counted.calls


def test_an_op_that_is_recomputed_runs_twice_and_the_others_once() -> None:
    counts = calls(1, memory.recompute(ops="add_layer_norm"))
    assert counts["fusedops::add_layer_norm"] == 4 and counts["fusedops::attention"] == 1


def test_what_is_saved_inside_a_region_is_not_computed_again() -> None:
    rules = memory.recompute("*"), memory.save(ops="attention")
    for ordered in (rules, rules[::-1]):  # a rule for an operator wins over later ones for modules
        counts = calls(2, *ordered)
        assert counts["fusedops::attention"] == 2 and counts["fusedops::linear_act"] > 4


def test_a_tensor_that_several_nodes_save_is_moved_once() -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return y.sin() + y.cos() + (y.view(-1)[: y.numel() // 2] * y.view(-1)[2:].sum()).sum()

    model = nn.Sequential(Square())
    x = torch.randn(64, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    memory.apply(model, memory.Policy(memory.offload("0")))
    (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(found, expected)
    (offloader,) = policy_state_of(model).offloaders.values()
    assert offloader.moved_bytes == x.nbytes


def test_parameters_and_buffers_are_never_offloaded() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.register_buffer("scale", torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t() * self.scale

    model = Scaled()
    x = torch.randn(64, 64, requires_grad=True)
    policy = memory.Policy(memory.offload(when=lambda saved: True))
    memory.apply(model, policy, offload_settings=CHECKED)
    model(x).sum().backward()
    assert not policy_state_of(model).offloaders


def test_a_tensor_that_is_written_to_after_it_was_saved_is_an_error() -> None:
    class Overwrites(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            z = y.sin()
            y.add_(1)
            return z

    model = Overwrites()
    x = torch.randn(64, 64, requires_grad=True)
    for rule in (memory.offload(""), memory.save("")):
        memory.apply(model, memory.Policy(rule))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x).sum().backward()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: memory.save(), ValueError, "name modules, ops or outputs"),
        (lambda: memory.save(3), TypeError, "modules must be names"),
        (lambda: memory.save(ops="atention"), ValueError, "did you mean 'fusedops::attention'"),
        (lambda: memory.save(ops="aten::nothing_like_it"), ValueError, "is no operator"),
        (lambda: memory.save(ops=3), TypeError, "ops must be names of operators"),
        (lambda: memory.save(outputs=3), TypeError, "outputs must be names"),
        (lambda: memory.save(when=3), TypeError, "when must be a function"),
        (lambda: memory.recompute(ops="aten::native_dropout"), ValueError, "draws random numbers"),
        (lambda: memory.recompute(ops="aten::native_batch_norm"), ValueError, "running statistics"),
        (lambda: memory.recompute("x", mp_comm_recompute=1), TypeError, "must be a bool"),
        (lambda: memory.recompute("x", recompute_slice_activation=True), ValueError, "group must"),
        (lambda: memory.recompute(ops="mlp", mp_comm_recompute=False), ValueError, "whole modules"),
        (lambda: memory.OffloadSettings(prefetch_depth=-1), ValueError, "prefetch_depth must be"),
        (lambda: memory.OffloadSettings(timeout=0.0), ValueError, "timeout must be positive"),
        (lambda: memory.OffloadSettings(engine=3), TypeError, "engine must be a function"),
        (lambda: memory.Policy("recompute"), TypeError, "each rule must come from"),
        (lambda: memory.apply(nn.Linear(1, 1), "x"), TypeError, "policy must be a Policy"),
        (lambda: memory.apply(3, memory.Policy()), TypeError, "model must be"),
        (
            lambda: memory.apply(encoder(), memory.Policy(memory.save("self_attn"))),
            ValueError,
            "names no module of the model; the nearest names are '2.self_attn'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    make: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.usefixtures("own_products")
def test_a_module_whose_parent_does_its_work_is_refused_and_nothing_changes() -> None:
    model = gpt2()
    expected = results(model, language_loss)
    with pytest.raises(UnsupportedError, match="name the parent instead"):
        memory.apply(model, memory.Policy(memory.recompute("transformer.h.*.mlp.c_fc")))
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert_same_bits(results(model, language_loss), expected)
