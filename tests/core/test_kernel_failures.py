"""A kernel that a GPU cannot run: the next backend serves the call, with one warning."""

import dataclasses
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

import fusedops
from fusedops._core import backends, env, extension, kernel_failures
from fusedops._core.capability import compute_capability

triton = pytest.importorskip("triton")


class _Launcher:
    """Stands for the Triton module of an op; ``error`` is what its launches raise."""

    def __init__(self, error):
        self.error, self.launches = error, 0

    def forward(self, *args):
        self.launches += 1
        raise self.error


@pytest.fixture
def launcher(monkeypatch):
    """Return a function that replaces the Triton kernels of an op by a launcher that fails."""
    monkeypatch.setattr(extension, "triton_missing", lambda: None)
    monkeypatch.setattr(env, "triton_interpreted", lambda: True)
    monkeypatch.setitem(backends._ORDER, "cpu", ("triton", "torch"))
    monkeypatch.setattr(backends, "_LOGGED", set())

    def replace(op, error):
        stand_in = _Launcher(error)
        monkeypatch.setitem(sys.modules, "failing_kernels", stand_in)
        kernels = dataclasses.replace(backends._KERNELS[op], triton="failing_kernels")
        monkeypatch.setitem(backends._KERNELS, op, kernels)
        return stand_in

    yield replace
    kernel_failures.clear()


ERRORS = (
    triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory"),
    triton.runtime.errors.PTXASError("ptxas fatal: too many registers"),
    RuntimeError("PassManager::run failed"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_kernel_that_does_not_fit_is_replaced_with_one_warning(launcher, caplog, error):
    stand_in = launcher("gelu", error)
    wide, narrow = torch.randn(4, 32), torch.randn(2, 16)
    backends.reset_counters()
    with caplog.at_level(logging.WARNING, "fusedops"):
        for values in (wide, wide + 1, narrow):
            result = backends.run("gelu", (values, "none"))
            torch.testing.assert_close(result, torch.nn.functional.gelu(values))
    assert stand_in.launches == 2, "one attempt per compilation"
    assert backends.counters() == {("gelu", "torch"): 3}, "what failed does not count"
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "gelu: does not run on triton" in messages[0]
    assert str(error) in messages[0]
    assert "does not fit it" in str(backends.resolve("gelu", wide, "none"))


def test_other_errors_of_a_launcher_are_raised(launcher):
    for error in (RuntimeError("CUDA error: an illegal memory access"), ValueError("of a bug")):
        stand_in = launcher("gelu", error)
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                backends.run("gelu", (torch.ones(3), "none"))
        assert stand_in.launches == 2


def test_a_requested_backend_that_does_not_fit_is_an_error(launcher):
    launcher("gelu", ERRORS[0])
    for _ in range(2):
        with (
            fusedops.use_backend("triton"),
            pytest.raises(fusedops.UnsupportedError, match="'triton' was requested.*shared memory"),
        ):
            backends.run("gelu", (torch.ones(3), "none"))


def test_an_op_that_writes_in_place_is_not_repeated(launcher, monkeypatch):
    launcher("gelu", ERRORS[0])
    schema = SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(is_mutable=True)))
    monkeypatch.setattr(torch.ops.fusedops, "gelu", schema)
    with pytest.raises(fusedops.UnsupportedError, match="may be incomplete"):
        backends.run("gelu", (torch.ones(3), "none"))


@pytest.mark.parametrize(
    ("hip", "capability", "reason", "tiles"),
    [
        ("6.4", (9, 4), "compiled for NVIDIA GPUs", 80),
        (None, (7, 5), "need compute capability 8.0 or newer, this GPU has 7.5", 80),
        (None, (12, 0), None, 120),
    ],
    ids=("MI300", "T4", "RTX 5090"),
)
def test_the_cuda_library_is_chosen_where_it_has_code(monkeypatch, hip, capability, reason, tiles):
    from fusedops.kernels import _attention_launch, _descriptors

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    caches = (
        compute_capability,
        _attention_launch.generation_of,
        _descriptors.available,
    )
    device = torch.device("cuda", 0)
    for cache in caches:
        cache.cache_clear()
    try:
        refusal = backends._unsupported_gpu(device)
        assert (refusal is None) == (reason is None)
        assert reason is None or reason in refusal
        assert not _descriptors.available(device)
        assert _attention_launch.generation_of(device) == tiles
    finally:
        for cache in caches:
            cache.cache_clear()
