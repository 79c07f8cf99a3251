"""Faults that are planted into compiled kernels are found by executing them.

A fault counts if it drops an order between threads, or changes a bit of a result. It is found if
the machine refuses the kernel or a result leaves the operator's band around float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import gpu_faults
import hot_samples
import ptx_gpu
import pytest
import torch
from gpu_faults import Fault
from ptx_machine import MachineError

import fusedops
from fusedops._core import env
from fusedops.specs import Sample, Spec, all_specs
from fusedops.specs.comparison import ComparisonResult, difference_from_truth, fresh, run

pytest.importorskip("triton")
if env.triton_interpreted():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the machine needs a process that sees no GPU", allow_module_level=True)

CPU = torch.device("cpu")
SEEDS = 3
FAULTS_OF_A_KERNEL = 24
ORDERS = ("ordering dropped", "waits for a group less")


@dataclass(frozen=True)
class Run:
    """What a call gives, and which lines of each PTX it has executed."""

    result: ComparisonResult
    lines: dict[str, set[int]]


@dataclass(frozen=True)
class Call:
    """A call of an operator, with its gradients, on the GPU of a compute capability."""

    spec: Spec
    capability: int
    sample: Sample
    run: Callable[[], ComparisonResult]

    def execute(self, change: Callable[[str], str] = str, seed: int = 0) -> Run:
        """Run the call with PTX that ``change`` returns for the compiled one."""
        with ptx_gpu.present(self.capability, seed) as gpu, fusedops.use_backend("triton"):
            gpu.change = change
            result = self.run()
        lines = {text: program.executed_lines() for text, program in gpu.programs.items()}
        return Run(result, lines)


def sample_call(op: str, name: str, capability: int) -> Call:
    """Return the call of a sample of an operator."""
    spec = all_specs()[op]
    (sample,) = [each for each in spec.samples(CPU, torch.bfloat16) if each.name == name]
    return Call(spec, capability, fresh(sample), lambda: run(spec.op, fresh(sample)))


def hot_call(op: str, name: str) -> Call:
    """Return a call of the static report, on sm_90."""
    (call,) = [each for each in hot_samples.calls(op, torch.bfloat16) if each.name == name]
    sample = call.sample(hot_samples.New(CPU, torch.bfloat16))
    return Call(all_specs()[op], 90, call.plain(sample), lambda: call.run(sample))


# Samples with several tiles along each loop, so that every barrier has something to order.
SAMPLES = (
    *(
        ("attention", "long", 80),
        ("cross_entropy", "negative_offset", 80),
        ("linear_act", "odd_sizes", 80),
    ),
    *(
        ("add_rms_norm", "many_rows", 80),
        ("attention", "long", 90),
        ("moe_sort", "random_300x8_of_37", 90),
    ),
    *(("layer_norm", "many_rows", 90), ("attention", "long", 120)),
)
HOT = (
    *(("linear_act", "272x272x528 along"), ("linear_act", "272x272x528 apart")),
    *(("linear_glu", "272x272x528 along silu"), ("attention", "D64 of 4")),
)
CALLS = {
    **{
        f"{op} {name}, sm_{capability}": partial(sample_call, op, name, capability)
        for op, name, capability in SAMPLES
    },
    **{f"{op} {name}, sm_90": partial(hot_call, op, name) for op, name in HOT},
}


def outcome(call: Call, original: str, fault: Fault, expected: ComparisonResult) -> str:
    """Return how a planted fault ended: ``refused``, ``wrong``, ``survived`` or ``no effect``."""
    same = True
    for seed in range(SEEDS if fault.kind in ORDERS else 1):
        try:
            changed = call.execute(lambda text: fault.text if text == original else text, seed)
        except MachineError:
            return "refused"
        result = changed.result
        if difference_from_truth(result, call.spec, call.sample) is not None:
            return "wrong"
        pairs = zip(
            [*result.outputs, *result.grads], [*expected.outputs, *expected.grads], strict=True
        )
        same &= all(torch.equal(one, other) for one, other in pairs)
    return "no effect" if same and fault.kind not in ORDERS else "survived"


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_planted_faults_are_found(name: str) -> None:
    call = CALLS[name]()
    expected = call.execute()
    found: Counter[str] = Counter()
    survivors = []
    for number, (text, lines) in enumerate(expected.lines.items()):
        for fault in gpu_faults.chosen_faults(text, lines, FAULTS_OF_A_KERNEL, seed=number):
            how = outcome(call, text, fault, expected.result)
            found[how] += 1
            if how == "survived":
                survivors.append(
                    f"{fault.kind}, line {fault.line}: {fault.before} -> {fault.after}"
                )
    print(f"{name}: {dict(found)}", *survivors, sep="\n  ")
    num_planted = sum(found.values()) - found["no effect"]
    assert len(survivors) <= 0.08 * num_planted, survivors
