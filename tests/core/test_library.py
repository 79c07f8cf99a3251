"""What define_op gives every op, shown on layer_norm, and life without optional parts."""

from __future__ import annotations

import dataclasses

import fresh_process
import pytest
import torch
from ptx_machine import nvcc
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import fusedops
from fusedops._core import backends, extension
from fusedops._core.library import Gradient, define_op

needs_cpu_library = pytest.mark.skipif(
    extension.cpu_library() is not None, reason="needs the C++ kernels"
)


def _leaves() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(6, 16, requires_grad=True),
        torch.randn(16, requires_grad=True),
        torch.randn(16, requires_grad=True),
    )


def _run(code: str, **environment: str) -> str:
    """Run code in a new process and return what it prints."""
    return fresh_process.run(code, check=True, **environment).stdout


def test_second_backward_without_retain_graph_is_an_error() -> None:
    x, weight, bias = _leaves()
    loss = fusedops.layer_norm(x, (16,), weight, bias).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_forward_mode_is_refused_not_dropped() -> None:
    x, weight, bias = (leaf.detach() for leaf in _leaves())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            fusedops.layer_norm(dual, (16,), weight, bias)


def test_backend_request_nests_and_ends() -> None:
    x = torch.randn(2, 4)
    fusedops.reset_counters()
    with fusedops.use_backend("torch"):
        with fusedops.use_backend("cpp"):
            fusedops.layer_norm(x, (4,))
        fusedops.layer_norm(x, (4,))
        with fusedops.use_backend(None):
            fusedops.layer_norm(x, (4,))
    fusedops.layer_norm(x, (4,))
    assert fusedops.counters() == {("layer_norm", "cpp"): 3, ("layer_norm", "torch"): 1}


@needs_cpu_library
def test_every_compiled_kernel_is_that_of_an_op() -> None:
    """A kernel without an op has no schema, and nothing calls it."""
    dangling = [line for line in torch._C._dispatch_find_dangling_impls() if "fusedops_" in line]
    assert not dangling, "registered with m.impl, but define_op does not know the name"


def test_every_cuda_kernel_is_that_of_an_op() -> None:
    names = nvcc.kernel_names()
    assert "layer_norm" in names
    for name in names:
        assert hasattr(torch.ops.fusedops, name), f"csrc/cuda registers {name}: no op has the name"


def test_a_kernel_that_is_registered_after_its_op_gets_the_schema_when_it_is_called() -> None:
    printed = _run(
        """
        import torch, fusedops
        from fusedops._core import library
        library.define_op(
            "late",
            "(Tensor input, int times) -> (Tensor output)",
            contract={"input, output": "T [*shape]"},
            reference=lambda input, times: input * times,
        )
        x = torch.ones(2)
        print(fusedops.resolve("late", x, 3).backend, torch.ops.fusedops.late(x, 3).tolist())
        registered = torch.library.Library("fusedops_cpp", "IMPL")
        registered.impl("late", lambda input, times: input + times, "CPU")
        print(fusedops.resolve("late", x, 3).backend, torch.ops.fusedops.late(x, 3).tolist())
        """
    )
    assert printed.splitlines() == ["torch [3.0, 3.0]", "cpp [4.0, 4.0]"]


@needs_cpu_library
def test_a_kernel_with_other_arguments_than_its_op_is_an_error() -> None:
    printed = _run(
        """
        import torch, fusedops
        from fusedops._core import extension
        torch.ops.load_library(extension.library_path("libfusedops_cpu.so"))
        try:
            extension.declare("fusedops_cpp", "gelu", "(Tensor input) -> (Tensor output)")
        except RuntimeError as error:
            print(error)
        extension.declare("fusedops_cpp", "gelu", "(Tensor input, str form) -> (Tensor output)")
        print(torch.ops.fusedops_cpp.gelu(torch.zeros(1), "none").item())
        """,
        FUSEDOPS_DISABLE_NATIVE="1",
    )
    refusal, value = printed.splitlines()
    assert "fusedops_cpp::gelu does not fit the schema (Tensor input) -> (Tensor output)" in refusal
    assert value == "0.0"


@pytest.mark.parametrize(
    ("attribute", "names", "nearest"),
    [
        ("inputs", ("inputs",), "input"),
        ("outputs", ("put",), "output"),
        ("saves", ("rst",), "rstd"),
    ],
)
def test_gradient_names_are_those_of_the_schema(
    attribute: str, names: tuple[str, ...], nearest: str
) -> None:
    usual = Gradient(("input",), ("output",), ("input",), torch.abs, torch.abs)
    with pytest.raises(ValueError, match=f"wrong.*{attribute}.*did you mean {nearest!r}"):
        define_op(
            "wrong",
            "(Tensor input) -> (Tensor output, Tensor rstd)",
            contract={"input, output, rstd": "T [*shape]"},
            reference=torch.abs,
            fake=torch.abs,
            gradient=dataclasses.replace(usual, **{attribute: names}),
        )
    assert "wrong" not in backends.op_names()


def test_every_public_name_is_listed() -> None:
    assert set(fusedops.__all__) <= set(dir(fusedops))
    assert all(hasattr(fusedops, name) for name in dir(fusedops))
    assert {"Any", "importlib", "annotations"}.isdisjoint(dir(fusedops))


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="'layernorm'.*did you mean 'layer_norm'"):
        fusedops.resolve("layernorm", torch.ones(1))
    with pytest.raises(ValueError, match="'tritn'.*did you mean 'triton'"):
        with fusedops.use_backend("tritn"):
            pass


def test_compiled_code_obeys_a_later_request() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fusedops.layer_norm(x, (4,)), backend="aot_eager")
    x = torch.randn(2, 4)
    compiled(x)
    fusedops.reset_counters()
    with fusedops.use_backend("torch"):
        compiled(x)
    assert fusedops.counters() == {("layer_norm", "torch"): 1}


def test_compiled_code_on_disk_is_that_of_these_schemas() -> None:
    printed = _run(
        """
        import torch
        torch.compiler.config.cache_key_tag = "mine;"
        import fusedops
        from fusedops._core import library
        print(torch.compiler.config.cache_key_tag)
        library._SCHEMAS.append("another_op(Tensor input) -> Tensor")
        library.tag_compiled_code()
        print(torch.compiler.config.cache_key_tag)
        """
    )
    at_import, changed = printed.split()
    for tag in (at_import, changed):
        assert tag.startswith("mine;fusedops:") and tag.count("fusedops") == 1
    assert changed != at_import


def test_resolve_tells_why() -> None:
    arguments = (torch.randn(2, 4).to(torch.float8_e4m3fn), (4,), None, None, 1e-5)
    resolution = fusedops.resolve("layer_norm", *arguments)
    assert resolution.backend == "torch"
    assert "float8_e4m3fn" in dict(resolution.passed_over)["cpp"]


def test_environment_asks_for_a_backend() -> None:
    printed = _run(
        """
        import torch, fusedops
        fusedops.layer_norm(torch.ones(2, 4), (4,))
        print(fusedops.counters())
        """,
        FUSEDOPS_BACKEND="torch",
    )
    assert printed.strip() == "{('layer_norm', 'torch'): 1}"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FUSEDOPS_BACKND", "torch", "did you mean FUSEDOPS_BACKEND?"),
        ("FUSEDOPS_DEBUG", "1", "FUSEDOPS_DEBUG is set, but nothing reads it: known are"),
    ],
)
def test_a_setting_that_does_nothing_is_told(variable: str, value: str, said: str) -> None:
    assert said in fresh_process.run("import fusedops", check=True, **{variable: value}).stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FUSEDOPS_DISABLE_NATIVE", "true", "must be one of '0', '1', got 'true'"),
        ("FUSEDOPS_BACKEND", "tritn", "got 'tritn' (did you mean 'triton'?)"),
    ],
)
def test_a_value_that_means_nothing_is_the_error_of_the_first_op(
    variable: str, value: str, said: str
) -> None:
    printed = _run(
        """
        import torch, fusedops
        def error():
            try:
                fusedops.layer_norm(torch.ones(2, 4), (4,))
            except ValueError as found:
                return str(found)
        print(error())
        with fusedops.use_backend("torch"):
            print(error())
        print(error())
        """,
        **{variable: value},
    ).splitlines()
    assert said in printed[0] and variable in printed[0]
    assert printed[1:] == ["None", printed[0]]


def test_import_needs_neither_triton_nor_transformers_nor_distributed_tensors() -> None:
    printed = _run(
        """
        import sys
        sys.modules.update(triton=None, transformers=None)
        import torch, fusedops
        y = fusedops.layer_norm(torch.arange(4.0).reshape(1, 4), (4,))
        print("torch.distributed.tensor" in sys.modules, round(y.sum().item(), 4))
        model = torch.nn.Sequential(torch.nn.LayerNorm(4))
        print(fusedops.patch(model).num_replaced)
        """
    )
    assert printed.split() == ["False", "0.0", "1"]


WITHOUT_LIBRARY = """
import torch, fusedops
from fusedops.specs import all_specs, tensors_in

print(fusedops._core.extension.cpu_library())
for name, spec in all_specs().items():
    sample = spec.samples(torch.device("cpu"), torch.float32)[0]
    with torch.autocast("cpu", torch.bfloat16):
        mine = spec.op(*sample.args, **sample.kwargs)
        eager = spec.eager(*sample.args, **sample.kwargs)
    assert tensors_in(mine)[0].dtype == tensors_in(eager)[0].dtype, name
    if not sample.leaves:
        continue
    leaf = sample.leaves[-1]
    outputs = tensors_in(spec.op(*sample.args, **sample.kwargs))
    floating = [each for each in outputs if each.is_floating_point()]
    sum(each.square().sum() for each in floating).backward(inputs=[leaf])
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0, name
assert {backend for _, backend in fusedops.counters()} == {"torch"}
print("all equal")
"""


@pytest.mark.ci
def test_without_the_compiled_library_all_ops_run_on_the_reference() -> None:
    printed = _run(WITHOUT_LIBRARY, FUSEDOPS_DISABLE_NATIVE="1").splitlines()
    assert printed == ["FUSEDOPS_DISABLE_NATIVE=1 is set", "all equal"]


def test_a_missing_library_is_explained(tmp_path: object) -> None:
    code = "import fusedops; print(fusedops._core.extension.cpu_library())"
    printed = _run(code, FUSEDOPS_LIBRARY=str(tmp_path))
    assert "does not exist" in printed and "tools/native.py build" in printed


def test_a_check_given_to_define_op_is_asked_wherever_no_compiled_kernel_refuses() -> None:
    weight = torch.ones(7)
    words = r"^layer_norm: weight must be of shape \[8\] \(normalized_shape\), got \[7\]$"
    for backend in (None, "torch"):
        with fusedops.use_backend(backend), pytest.raises(ValueError, match=words):
            fusedops.layer_norm(torch.ones(3, 8), (8,), weight)
    with FakeTensorMode(), pytest.raises(ValueError, match=words):
        fusedops.layer_norm(torch.ones(3, 8), (8,), torch.ones(7))
    compiled = torch.compile(fusedops.layer_norm, backend="eager")
    with pytest.raises(ValueError, match=words):
        compiled(torch.ones(3, 8), (8,), weight)
