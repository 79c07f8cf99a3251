"""Write an op in six steps; docs/tutorials/write_an_op.md explains each of them."""

# %%
import os
import statistics
import time

os.environ["TRITON_INTERPRET"] = "1"  # step 4 runs the Triton kernel without a GPU

import torch
import triton
import triton.language as tl
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.cpp_extension import load_inline

import fusedops
from fusedops.library import REPLICATE, Gradient, define_op

fusedops.tune_host()  # memory that was used stays with the process: both sides are faster


# %%
def scale_add(input, other, alpha=1.0):
    """Return ``alpha * input + other``; shapes and dtypes are equal, gradients flow to both."""
    return OP(input, other, float(alpha))


def reference(input, other, alpha):
    """Compute the op in eager torch: the specification, and the backend ``torch``."""
    return (alpha * input + other).contiguous()


def backward_reference(grad_output, alpha, output_mask):
    """Compute the gradients that ``output_mask`` asks for."""
    grad_input = (alpha * grad_output).contiguous() if output_mask[0] else None
    grad_other = grad_output.clone() if output_mask[1] else None
    return grad_input, grad_other


def shard(input, other):
    """List the placements that need no communication: any dim of both, or none."""
    return [([dim], [dim, dim]) for dim in (REPLICATE, *range(input.ndim))]


def shard_backward(grad_output):
    """List the same of the backward: two gradients, of one argument."""
    return [([dim, dim], [dim]) for dim in (REPLICATE, *range(grad_output.ndim))]


OP = define_op(
    "scale_add",
    "(Tensor input, Tensor other, float alpha) -> (Tensor output)",
    contract={"input, other, output": "T [*shape]"},
    reference=reference,
    gradient=Gradient(
        inputs=("input", "other"), outputs=("output",), saves=(), reference=backward_reference
    ),
    triton=__name__,  # the module with the functions forward and backward of step 4
    shard=shard,
    shard_backward=shard_backward,
)

x, y = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
print("equal:", torch.equal(scale_add(x, y, 2.0), 2.0 * x + y))
try:
    scale_add(x, y[:2])
except ValueError as error:
    print("refused:", error)

# %%
samples = [
    (torch.randn(7, 33), torch.randn(7, 33), 0.5),
    (torch.randn(33, 7).T, torch.randn(7, 33), -2.0),  # not contiguous
    (torch.randn(0, 5), torch.randn(0, 5), 1.0),  # empty
]


def check(backend):
    """Compare values and gradients with float64 on each sample."""
    worst = 0.0
    for input, other, alpha in samples:
        leaves = [tensor.clone().requires_grad_() for tensor in (input, other)]
        with fusedops.use_backend(backend):
            output = scale_add(*leaves, alpha)
        output.sum().backward()
        exact = alpha * input.double() + other.double()
        results = [(output, exact)]
        results += [(leaves[0].grad, torch.full_like(exact, alpha))]
        results += [(leaves[1].grad, torch.ones_like(exact))]
        for result, expected in results:
            if result.numel():
                worst = max(worst, (result - expected).abs().max().item())
    print(f"{backend}: largest error {worst:.1e}")


check("torch")
doubles = [tensor.detach().double().requires_grad_() for tensor in (x, y)]
print("gradcheck:", torch.autograd.gradcheck(lambda a, b: scale_add(a, b, 3.0), doubles))
print("opcheck:", torch.library.opcheck(OP, (x, y, 2.0)))

# %%
SOURCE = """
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

at::Tensor forward(const at::Tensor& input, const at::Tensor& other, double alpha) {
  const auto a = input.contiguous(), b = other.contiguous();
  auto output = at::empty_like(a);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "scale_add", [&] {
    using Sum = at::opmath_type<scalar_t>;  // float for half precision
    const auto *x = a.const_data_ptr<scalar_t>(), *y = b.const_data_ptr<scalar_t>();
    auto* z = output.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, a.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) z[i] = Sum(alpha) * Sum(x[i]) + Sum(y[i]);
    });
  });
  return output;
}

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) { m.impl("scale_add", forward); }
"""
print("before:", fusedops.resolve("scale_add", x, y, 2.0))
load_inline(
    "scale_add",
    SOURCE,
    extra_cflags=["-O3", "-fopenmp"],  # without OpenMP at::parallel_for uses one thread
    is_python_module=False,
    no_implicit_headers=True,
)
print("after:", fusedops.resolve("scale_add", x, y, 2.0))

check("cpp")


# %%
@triton.jit
def forward_kernel(x_ptr, y_ptr, z_ptr, alpha, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(z_ptr + offset, (alpha * x + y).to(z_ptr.dtype.element_ty), mask=mask)


def forward(input, other, alpha):
    """Launch the kernel; arguments and result are those of the op."""
    a, b = input.contiguous(), other.contiguous()
    output = torch.empty_like(a)
    if a.numel():
        grid = (triton.cdiv(a.numel(), 1024),)
        forward_kernel[grid](a, b, output, alpha, a.numel(), BLOCK=1024)
    return output


backward = backward_reference  # two operations of torch; a kernel of its own would gain little
check("triton")

# %%
init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
shards = [distribute_tensor(tensor.detach(), mesh, [Shard(0)]) for tensor in (x, y)]
print("placements of the result:", scale_add(*shards, 2.0).placements)
destroy_process_group()


# %%
def seconds(function, *arguments):
    """Return the median time of a call."""
    times = []
    for _ in range(30):
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


a, b = torch.randn(2048, 1024), torch.randn(2048, 1024)
eager, fused = seconds(reference, a, b, 0.5), seconds(scale_add, a, b, 0.5)
print(
    f"eager {eager * 1e3:.2f} ms, scale_add {fused * 1e3:.2f} ms: {eager / fused:.2f} times as fast"
)
