"""Layers in inference: linear layers with what follows them, norms and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from ways import Contest, Running, Way

from fusedops import ops

ROWS = (32, 1024)  # tokens


class Layer(nn.Module):
    """Parameters and a function of them: what compilers get."""

    def __init__(self, function: Callable[..., torch.Tensor], shapes: Sequence[Sequence[int]]):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function = function
        self.weights = nn.ParameterList(
            torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes
        )

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Call the function with the inputs and all parameters."""
        return self.function(*inputs, *self.weights)


def _linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def _mlp(x: torch.Tensor, up: torch.Tensor, bias: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(_linear_gelu(x, up, bias), down)


def _swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _our_mlp(x: torch.Tensor, up: torch.Tensor, bias: torch.Tensor, down: torch.Tensor):
    return F.linear(ops.linear_act(x, up, bias, activation="gelu_tanh"), down)


def _our_swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor):
    return F.linear(ops.linear_glu(x, gate, up, activation="silu"), down)


# name -> torch's function, ours, shapes of the parameters
LAYERS = {
    "MLP with GELU, 768 -> 3072 -> 768": (
        _mlp,
        _our_mlp,
        ((3072, 768), (3072,), (768, 3072)),
    ),
    "MLP with SwiGLU, 768 -> 2048 -> 768": (
        _swiglu,
        _our_swiglu,
        ((2048, 768), (2048, 768), (768, 2048)),
    ),
    "RMS norm, 768 wide": (
        lambda x, w: F.rms_norm(x, (768,), w, 1e-6),
        lambda x, w: ops.rms_norm(x, (768,), w, 1e-6),
        ((768,),),
    ),
    "layer norm, 768 wide": (
        lambda x, w, b: F.layer_norm(x, (768,), w, b),
        lambda x, w, b: ops.layer_norm(x, (768,), w, b),
        ((768,), (768,)),
    ),
}
ATTENTION = {
    "attention, 1 x 12 heads of 64, 128 tokens": (1, 12, 128, 64),
    "attention, 8 x 12 heads of 64, 512 tokens": (8, 12, 512, 64),
}


def _run(
    function: Callable[..., torch.Tensor],
    shapes: Sequence[Sequence[int]],
    inputs: Sequence[Sequence[int]],
    dtype: torch.dtype,
    compiler: Callable[[nn.Module], Callable[..., torch.Tensor]] | None = None,
) -> Running:
    layer = Layer(function, shapes).bfloat16().to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(*shape, generator=generator).bfloat16().to(dtype) for shape in inputs]
    call = layer if compiler is None else compiler(layer)

    def run(_: object = None) -> torch.Tensor:
        with torch.no_grad():
            return call(*tensors)

    return Running(run, [run()])


def frozen(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Compile for inference: parameters are constants, oneDNN packs the weights."""
    return torch.compile(module, dynamic=False, options={"freezing": True})


def zentorch(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Compile with AMD's backend, which packs weights where ``freezing`` is set."""
    import zentorch as package

    torch._inductor.config.freezing = True
    return torch.compile(module, dynamic=False, backend=package.__name__)


def contests() -> list[Contest]:
    """Return a contest for each layer, number of rows and dtype."""
    works = [
        (f"{name}, {rows} tokens", torchs, ours, shapes, ((rows, 768),))
        for rows in ROWS
        for name, (torchs, ours, shapes) in LAYERS.items()
    ]
    works += [
        (name, F.scaled_dot_product_attention, ops.attention, (), (shape,) * 3)
        for name, shape in ATTENTION.items()
    ]
    found = []
    for work, torchs, ours, *sizes in works:
        for dtype in (torch.float32, torch.bfloat16):
            layer_ways = {
                "fusedops": Way(partial(_run, ours, *sizes, dtype), "fusedops"),
                "torch": Way(partial(_run, torchs, *sizes, dtype)),
                "torch.compile": Way(partial(_run, torchs, *sizes, dtype, frozen)),
                "zentorch": Way(
                    partial(_run, torchs, *sizes, dtype, zentorch), "zentorch", process="zentorch"
                ),
            }
            reference = partial(_reference, torchs, *sizes)
            found.append(Contest(work, str(dtype)[6:], reference, layer_ways, "fusedops"))
    return found


def _reference(function: Callable[..., torch.Tensor], *sizes: Sequence[Sequence[int]]):
    return _run(function, *sizes, torch.float64).outputs
