"""Hot samples launch every configuration of the static report, on GPUs of four generations.

What is counted is what Triton would compile: the launchers run on fake tensors, and each launch
goes through Triton's own ``run`` up to the compiler. A pointer that stands in for an absent tensor
is another argument's tensor; no kernel reads it, and its type does not count.
"""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_gpu
import hot_samples
import pytest
import torch
from kernel_cases import CASES
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedops import kernels
from fusedops._core import backends, env
from fusedops.specs import all_specs, multi_tensor_specs

pytest.importorskip("triton")
if env.triton_interpreted():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

DTYPES = (torch.bfloat16, torch.float32)
FILES = sorted(Path(kernels.__file__).parent.glob("[!_]*.py"))
CAPABILITIES = (80, 90, 100, 120)
Case = dict[str, Any]  # a configuration of the report, as kernel_cases describes it


@dataclass(frozen=True)
class Launch:
    """What a launch would compile."""

    kernel: Any  # the ``@triton.jit`` function
    types: dict[str, str]  # of arguments; "constexpr" for a number that is 1, and for a constant
    constants: dict[str, Any]  # their values, a number that is 1 among them
    stand_ins: frozenset[str]  # names of pointers that are another argument's tensor
    numbers: dict[str, int]
    options: tuple[int, int]  # ``num_warps``, ``num_stages``


class Recorder:
    """Keeps the launches that are different compilations."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def observe(self, kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        self._arguments = arguments
        kernel.device_caches.clear()  # every launch reaches the compiler

    def compile(self, source: Any, *, target: Any, options: dict[str, Any], **_: Any) -> Any:
        names, given = source.fn.arg_names, self._arguments
        tensors = [(name, id(v)) for name, v in given.items() if isinstance(v, torch.Tensor)]
        counts = collections.Counter(address for _, address in tensors)
        self.launches.append(
            Launch(
                kernel=source.fn,
                types=dict(source.signature),
                constants={names[path[0]]: value for path, value in source.constants.items()},
                stand_ins=frozenset(name for name, address in tensors if counts[address] > 1),
                numbers={name: value for name, value in given.items() if type(value) is int},
                options=(options["num_warps"], options["num_stages"]),
            )
        )
        return SimpleNamespace()


def cases(op: str, capability: int | None = None) -> list[Case]:
    """Return the configurations of a kernel file that the report has, all or those of a GPU."""
    known = CASES[op]()
    return [c for c in known if capability in (None, *(c["capabilities"] or CAPABILITIES))]


def launches_of(calls: list[Any], capability: int) -> list[Launch]:
    """Return what calls of registered operators launch on a GPU."""
    recorder = Recorder()
    with fake_gpu.present(capability, compile=recorder.compile, observe=recorder.observe):
        fake_gpu.launch(calls)
    return recorder.launches


def difference(case: Case, launch: Launch) -> list[str]:
    """Return what of a launch is not as the case says."""
    if launch.kernel is not case["kernel"]:
        return ["kernel"]
    wrong = []
    wanted = (case["num_warps"], case["num_stages"])
    if launch.options != wanted:
        wrong.append(f"warps and stages {launch.options}, not {wanted}")
    for name, value in case["constexprs"].items():
        got = launch.constants.get(name, launch.numbers.get(name))
        # The stride of what is absent, or broadcast, is 0.
        absent = name.startswith("stride_") and value == 1 and got == 0
        if got != value and not absent:
            wrong.append(f"{name}={got}, not {value}")
    for name, kind in case["signature"].items():
        got = launch.types[name].replace(" ", "")
        is_one = got == "constexpr" and launch.constants.get(name) == 1 and kind == "i32"
        if got != kind and not is_one and name not in launch.stand_ins:
            wrong.append(f"{name} is {got}, not {kind}")
    return wrong


# What a launch depends on is layouts, and integers: other tensors have no values.
WITHOUT_VALUES = FakeTensorMode(allow_non_fake_inputs=True)


class Shapes(hot_samples.New):
    """Makes tensors without values."""

    def __call__(self, *shape: int, **options: Any) -> torch.Tensor:
        with WITHOUT_VALUES:
            made = torch.empty(shape, device=self.device, dtype=options.get("dtype", self.dtype))
        return made.requires_grad_(options.get("grad", True))


def calls_of(call: hot_samples.HotCall, dtype: torch.dtype) -> list[Any]:
    """Return the calls of registered operators that a hot call makes."""
    # Launchers over lists look at tensors on the host.
    new = hot_samples.New if call.op in multi_tensor_specs() else Shapes
    sample = call.sample(new(torch.device("cpu"), dtype))

    def incoming(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [each.new_empty(each.shape) for each in outputs]

    return fake_gpu.calls_of(lambda: call.run(sample, incoming), "cpp")


@functools.cache
def launched(op: str) -> dict[int, list[Launch]]:
    """Return the launches of all hot calls of a kernel file by capability."""
    found: dict[int, list[Launch]] = {capability: [] for capability in CAPABILITIES}
    for dtype in DTYPES:
        for call in hot_samples.calls(op, dtype):
            calls = calls_of(call, dtype)
            for capability, launches in found.items():
                launches += launches_of(calls, capability)
    return found


def test_every_op_has_a_hot_sample() -> None:
    called = {
        call.op
        for op in hot_samples.ops()
        for dtype in DTYPES
        for call in hot_samples.calls(op, dtype)
    }
    launched = {name for name, op in backends._KERNELS.items() if op.triton is not None}
    assert called == {*all_specs(), *multi_tensor_specs()} & launched


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("op", [path.stem for path in FILES if path.stem != "__init__"])
def test_every_configuration_of_the_report_is_launched(op: str, capability: int) -> None:
    missing = []
    assert bool(cases(op)) == (op in hot_samples.ops())
    for case in cases(op, capability):
        differences = [difference(case, launch) for launch in launched(op)[capability]]
        if [] not in differences:
            of_it = [found for found in differences if found != ["kernel"]]
            near = min(of_it, key=len, default=["no launch of it"])
            name = case["kernel"].__name__.strip("_")
            missing.append(f"{name} {case['label']}: {'; '.join(near)}")
    total = len(cases(op, capability))
    assert not missing, f"{len(missing)} of {total} not launched:\n" + "\n".join(missing)
