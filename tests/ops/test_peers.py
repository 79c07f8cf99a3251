"""Other libraries' kernels as the benchmark calls them: right import paths, right values."""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

import pytest
import torch
from comparing import assert_close

from fusedops._core import env
from fusedops._core.checks import UnsupportedError
from fusedops.bench.contenders import load_peers, peers_of
from fusedops.specs import Spec, all_specs, tensors_in
from fusedops.specs.comparison import baseline, floating, fresh, incoming, truth

PEERS_MODULE: Any = load_peers()
PACKAGES, Peer = PEERS_MODULE.PACKAGES, PEERS_MODULE.Peer
PEERS = [
    (spec, label)
    for spec in all_specs().values()
    for label, peer in peers_of(spec.name).items()
    if isinstance(peer, Peer)
]
each_peer = pytest.mark.parametrize(
    ("spec", "label"), PEERS, ids=[f"{spec.name}-{label}" for spec, label in PEERS]
)


def installed(spec: Spec, label: str) -> Any:
    peer = peers_of(spec.name)[label]
    try:
        importlib.metadata.version(PACKAGES[label])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGES[label]} is not installed")
    return peer


@each_peer
def test_an_installed_peer_has_what_its_adapter_imports(spec: Spec, label: str) -> None:
    loaded = installed(spec, label).load()
    assert callable(loaded) or hasattr(loaded, "apply")


@each_peer
def test_an_adapter_has_the_arguments_of_the_op(spec: Spec, label: str) -> None:
    ours = inspect.signature(spec.op).parameters
    _, *theirs = inspect.signature(peers_of(spec.name)[label].adapt).parameters.values()
    rest = any(each.kind is each.VAR_KEYWORD for each in theirs)
    named = [other.name for other in theirs if other.kind is not other.VAR_KEYWORD]
    placed = [each.name for each in theirs if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert placed == list(ours)[: len(placed)]
    assert set(named) <= set(ours) if rest else set(named) == set(ours)


@each_peer
def test_an_absent_peer_says_so(spec: Spec, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = peers_of(spec.name)[label]
    monkeypatch.setattr(peer, "module", "no_such_package_of_kernels")
    sample = fresh(spec.samples(torch.device("cpu"), torch.float32)[0])
    with pytest.raises(UnsupportedError, match=f"{PACKAGES[label]} is not installed"):
        peer(*sample.args, **sample.kwargs)


def assert_matches_float64(spec: Spec, label: str, device: str, dtype: torch.dtype) -> set[str]:
    """Compare a peer with float64, twice, on inputs that it leaves as they were or says so.

    Small samples with elements are tried; the names of those that the peer takes are returned.
    """
    peer, taken = installed(spec, label), set()
    for sample in spec.samples(torch.device(device), dtype):
        sizes = [tensor.numel() for tensor in sample.tensors]
        if sample.random or sample.args[0].dim() < 2 or 0 in sizes or max(sizes) > 4096:
            continue
        exact, eager = truth(spec, sample), baseline(spec, fresh(sample))
        for _ in range(2):
            call = fresh(sample)
            before = [tensor.detach().clone() for tensor in call.tensors]
            try:
                outputs = tensors_in(peer(*call.args, **call.kwargs))
            except UnsupportedError:
                break
            taken.add(sample.name)
            wide = floating(outputs)
            grads_out = incoming(wide)
            kept = [grad.clone() for grad in grads_out]
            trains = bool(call.leaves) and all(output.requires_grad for output in wide)
            grads = torch.autograd.grad(wide, call.leaves, grads_out) if trains else ()
            pairs = zip((*outputs, *grads), exact.outputs + exact.grads, strict=False)
            for i, (got, want) in enumerate(pairs):
                base, depth = (eager.outputs + eager.grads)[i], 64 * want.numel()
                assert_close(got, want, base, f"{spec.name} of {label}, result {i}", depth)
            if not peer.overwrites:
                assert all(map(torch.equal, before, call.tensors)), "the inputs were overwritten"
                assert all(map(torch.equal, kept, grads_out)), "the gradients were overwritten"
    assert taken
    return taken


@pytest.mark.interpreter
@each_peer
def test_values_of_liger_in_the_interpreter(spec: Spec, label: str) -> None:
    if label != "liger":
        pytest.skip("no Triton kernel")
    from triton.runtime.errors import InterpreterError

    try:
        assert_matches_float64(spec, label, "cpu", torch.float32)
    except InterpreterError as error:
        pytest.skip(f"the interpreter cannot run it: {error}")


@pytest.mark.gpu
@each_peer
def test_values_on_a_gpu(spec: Spec, label: str) -> None:
    assert not env.triton_interpreted()
    assert_matches_float64(spec, label, "cuda", torch.bfloat16)
