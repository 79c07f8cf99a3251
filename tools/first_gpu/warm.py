"""Compiles what the tests will launch, on all processors, and launches nothing.

Launchers run on fake CUDA tensors (``tests/ops/fake_gpu.py``), which have no values, so that no
index is ever followed. Each launch goes through Triton's own path to its compiler, with the
specialisations, options and target of the real one: the tests find the machine code in Triton's
cache on disk. Triton 3.6 compiles a C function per signature at the first launch as well, later
ones have one for all; both are made here. A kernel that fails here is told and fails in its test.

An item is an op, a dtype, ``hot`` or ``plain``, and the number of a sample. Processes share the
items and claim each one, and each kernel, by a file.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from first_gpu import order, protocol, stand_in

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("bfloat16", "float16", "float32")
KINDS = ("hot", "plain")


@functools.cache
def known_ops() -> tuple[str, ...]:
    """Return what has samples: ops, and kernel files with configurations of the static report."""
    import hot_samples

    from fusedops.specs import all_specs

    return tuple(sorted({*all_specs(), *hot_samples.ops()}))


@functools.cache
def plain(op: str, dtype: torch.dtype) -> Sequence[Any]:
    """Return the samples of an op's spec, on the CPU."""
    from fusedops.specs import all_specs

    return all_specs()[op].samples(torch.device("cpu"), dtype) if op in all_specs() else []


@functools.cache
def hot_calls(op: str, dtype: torch.dtype, capability: int | None = None) -> Sequence[Any]:
    """Return the calls that launch the configurations of the static report.

    Args:
        op: one of ``known_ops()``.
        dtype: of the data.
        capability: only what the report has for this one of 80, 90, 100 and 120.
    """
    import hot_samples

    return hot_samples.calls(op, dtype, capability) if op in hot_samples.ops() else []


def items(ops: Sequence[str], capability: int | None = None) -> list[str]:
    """Return the names of all items, the hot ones and the first dtype in front.

    Args:
        ops: some of ``known_ops()``.
        capability: of the GPU; one that the report does not have gets all configurations.
    """
    reported = capability if capability in (80, 90, 100, 120) else None
    found = []
    for kind in KINDS:
        for op, name in order.ordered(ops, DTYPES):
            dtype = getattr(torch, name)
            count = (
                len(plain(op, dtype)) if kind == "plain" else len(hot_calls(op, dtype, reported))
            )
            found += [f"{op} {name} {kind} {number}" for number in range(count)]
    return found


def compile_item(item: str, capability: int | None = None) -> None:
    """Compile the kernels of one item of ``items(ops, capability)``."""
    import fake_gpu
    import hot_samples

    from fusedops.specs import all_specs
    from fusedops.specs.comparison import fresh

    op, name, kind, number = item.split()
    dtype = getattr(torch, name)
    if kind == "plain":
        sample = fresh(plain(op, dtype)[int(number)])
        fake_gpu.launch_everything(all_specs()[op].op, sample)
        return
    reported = capability if capability in (80, 90, 100, 120) else None
    call = hot_calls(op, dtype, reported)[int(number)]
    fake_gpu.launch(fake_gpu.calls_of(hot_samples.made(call, dtype, torch.device("cpu")).run))


@contextlib.contextmanager
def compiling(
    capability: int, multiprocessors: int, claims: Path, failed: list[str]
) -> Iterator[None]:
    """Let launches compile for a GPU, and do no more.

    Args:
        capability: of the GPU, 90 for 9.0.
        multiprocessors: of the GPU.
        claims: folder where processes claim kernels.
        failed: gets a line for each kernel that does not compile.
    """
    import fake_gpu
    from triton.compiler import compile as triton_compile

    def compile_once(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        if not protocol.claim(claims, cache_hash(source, target, options)):
            return SimpleNamespace(hash="another process has it")
        try:
            kernel = triton_compile(source, target=target, options=options)
            build_launcher(kernel)
        except Exception as error:
            first = next((line for line in str(error).split("\n") if line.strip()), "")
            failed.append(f"{source.name}: {type(error).__name__}: {first}")
            return SimpleNamespace(hash="failed")
        return kernel

    major, minor = divmod(capability, 10)
    facts = SimpleNamespace(multi_processor_count=multiprocessors, major=major, minor=minor)
    with contextlib.ExitStack() as stack:
        # Fakes of a GPU that is there would make a context, and the machine may have one GPU.
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: False))
        stack.enter_context(mock.patch.object(fake_gpu, "GPU", torch.device("cuda", 0)))
        stack.enter_context(fake_gpu.present(capability, compile=compile_once))
        stack.enter_context(
            mock.patch.object(torch.cuda, "get_device_properties", lambda device: facts)
        )
        yield


def cache_hash(source: Any, target: Any, options: Any) -> str:
    """Return the name of a kernel in Triton's cache."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(target)
    parsed = backend.parse_options(dict(options or {}, **source.parse_options()))
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def build_launcher(kernel: Any) -> None:
    """Compile the C function that launches kernels of a signature, where Triton has such ones."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(kernel.src, kernel.metadata)


def build_driver() -> None:
    """Compile what Triton's driver has in C; without it the first launch of a process does."""
    from triton.backends.nvidia import driver

    try:
        driver.CudaUtils()
    except Exception as error:
        print(f"Triton's driver was not compiled: {error}", flush=True)


def main() -> int:
    """Work through the items that no other process has claimed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, required=True, help="90 for 9.0")
    parser.add_argument("--multiprocessors", type=int, required=True)
    parser.add_argument("--claims", type=Path, required=True, help="folder of the claims")
    options = protocol.options(parser)
    stand_in.install_if_asked(driver=False)
    torch.set_num_threads(1)
    events = protocol.Events(options.events)
    failed: list[str] = []
    if protocol.claim(options.claims, "the driver's functions"):
        build_driver()
    with compiling(options.capability, options.multiprocessors, options.claims, failed):
        for item in json.loads(options.items.read_text()):
            if not protocol.claim(options.claims, item.replace(" ", ".")):
                continue
            events.start(item)
            failed.clear()
            try:
                compile_item(item, options.capability)
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")
            text = protocol.shortened("\n".join(failed))
            facts = {"error": failed[0].split("\n")[0], "text": text} if failed else {}
            events.end(item, "failed" if failed else "passed", **facts)
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "ops")]
    sys.exit(main())
