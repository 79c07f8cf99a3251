"""Runs in a clean environment: imports, one op on each backend, a patched model; prints JSON.

It imports nothing but torch and fusedops, and asserts what it prints.
"""

import json
import platform
import sys
import time

start = time.process_time()
import torch  # noqa: E402

middle = time.process_time()
import fusedops  # noqa: E402

end = time.process_time()


def compare_op() -> float:
    """Return the largest difference of an op, on the kernels in force and on the reference."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(33, 257, generator=generator)
    weight, bias = torch.randn(2, 257, generator=generator)
    fusedops.reset_counters()
    own = fusedops.layer_norm(x, (257,), weight, bias)
    assert all(backend == EXPECTED for _, backend in fusedops.counters()), fusedops.counters()
    with fusedops.use_backend("torch"):
        reference = fusedops.layer_norm(x, (257,), weight, bias)
    return (own - reference).abs().max().item()


def compare_model() -> tuple[float, int]:
    """Return the largest difference of a patched model, and how many modules were replaced."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.LayerNorm(64))
    x = torch.randn(2, 16, 64)
    stock = model(x)
    stock.square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    report = fusedops.patch(model)
    patched = model(x)
    patched.square().mean().backward()
    differences = [(stock - patched).abs().max().item()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        differences.append((parameter.grad - gradient).abs().max().item())
    return max(differences), report.num_replaced


EXPECTED = sys.argv[1]  # the backend that must run
missing = fusedops._core.extension.cpu_library()
assert (missing is None) == (EXPECTED == "cpp"), missing
op, (model, replaced) = compare_op(), compare_model()
assert op < 1e-5 and model < 1e-5 and replaced > 0, (op, model, replaced)
if EXPECTED == "cpp":
    from fusedops.memory import arena
    from fusedops.optim import _step_queue

    assert _step_queue.missing() is None, _step_queue.missing()
    assert arena.place([0, 1], [2, 3], [64, 64]).height == 128
    queue = _step_queue.new_queue(2)
    queue.close()
row = {
    "python": platform.python_version(),
    "torch": torch.__version__,
    "libc": " ".join(platform.libc_ver()),
    "kernels": torch.ops.fusedops_native.isa_in_use() if missing is None else "reference",
    "torch_s": round(middle - start, 3),
    "fusedops_s": round(end - middle, 3),
    "op": op,
    "model": model,
}
print(json.dumps(row))
