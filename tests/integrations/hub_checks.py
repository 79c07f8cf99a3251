"""What ``test_hub_package.py`` checks in processes in which fusedops is not imported."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from kernels import LocalLayerRepository, Mode, get_local_kernel, replace_kernel_forward_from_hub
from kernels import kernelize as kernelize_layers
from kernels.layer import register_kernel_mapping
from torch.nn import functional as F

# Largest difference from torch in float32, relative to the largest value.
_TOLERANCE = 2e-6


def _cases() -> Iterator[tuple[str, Callable[[ModuleType], Any], Any]]:
    """Yield the name of an op, a call of it, and what torch computes."""
    torch.manual_seed(0)
    x, y, weight, bias = torch.randn(6, 64), torch.randn(6, 64), torch.randn(64), torch.randn(64)
    yield "gelu", lambda ops: ops.gelu(x), F.gelu(x)
    yield "bias_gelu", lambda ops: ops.bias_gelu(x, bias), F.gelu(x + bias)
    yield "geglu", lambda ops: ops.geglu(x, y), F.gelu(x) * y
    yield "swiglu", lambda ops: ops.swiglu(x, y), F.silu(x) * y
    normal = F.rms_norm(x, (64,), weight, 1e-6)
    yield "rms_norm", lambda ops: ops.rms_norm(x, (64,), weight, 1e-6), normal
    normal = F.layer_norm(x, (64,), weight, bias)
    yield "layer_norm", lambda ops: ops.layer_norm(x, (64,), weight, bias), normal
    added = F.rms_norm(x + y, (64,), weight, 1e-6)
    yield "add_rms_norm", lambda ops: ops.add_rms_norm(x, y, (64,), weight, 1e-6)[0], added
    added = F.layer_norm(x + y, (64,), weight, bias)
    yield "add_layer_norm", lambda ops: ops.add_layer_norm(x, y, (64,), weight, bias)[0], added
    target = torch.randint(64, (6,))
    yield "cross_entropy", lambda ops: ops.cross_entropy(x, target), F.cross_entropy(x, target)
    q, k, v = (torch.randn(2, 4, 16, 32) for _ in range(3))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    yield "attention", lambda ops: ops.attention(q, k, v, is_causal=True), attended


def ops(folder: str, backend: str) -> None:
    """Compare ten ops with torch, and print which kernels computed them."""
    package = get_local_kernel(Path(folder))
    for name, call, expected in _cases():
        with package.use_backend(backend):
            result = call(package)
        torch.testing.assert_close(result, expected, rtol=0, atol=_TOLERANCE * expected.abs().max())
        print(name)
    assert not any(name.split(".")[0] == "fusedops" for name in sys.modules)
    counters = sys.modules[f"{package.__name__}._core.backends"].counters()
    assert {used for _, used in counters} == {backend}, counters
    print(package.__file__)


def _mapping(folder: str, layer: str) -> dict[str, Any]:
    repository = LocalLayerRepository(Path(folder), layer_name=layer)
    return {"cpu": {Mode.TRAINING: repository, Mode.INFERENCE: repository}}


def transformers(folder: str) -> None:
    """Compare a model of transformers that uses the package with the stock one, with gradients."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
    register_kernel_mapping(
        {"RMSNorm": _mapping(folder, "RMSNorm"), "NewGELU": _mapping(folder, "GELUTanh")}
    )
    for stock, op, calls in ((llama, "rms_norm", 5), (gpt2, "gelu", 2)):
        with tempfile.TemporaryDirectory() as saved:
            stock.save_pretrained(saved)
            fused = type(stock).from_pretrained(saved, use_kernels=True)
        stock.eval()
        ids = torch.randint(64, (2, 7))
        losses = [model(ids, labels=ids).loss for model in (stock, fused)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        for (name, one), other in zip(stock.named_parameters(), fused.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, msg=lambda text, n=name: f"{n} {text}")
        (package,) = [name for name in sys.modules if name.endswith("._core.backends")]
        counters = sys.modules[package].counters()
        assert sum(count for (name, _), count in counters.items() if name == op) == calls, counters
        assert sum(n for (name, _), n in counters.items() if name == f"{op}_backward") == calls
        print(op, losses[0].item())


def mlps(folder: str) -> None:
    """Compare the MLPs of Llama and Gemma with the package's, inside of a module."""
    from transformers import GemmaConfig, LlamaConfig
    from transformers.models.gemma.modeling_gemma import GemmaMLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    for base, config, layer in (
        (LlamaMLP, LlamaConfig(hidden_size=32, intermediate_size=64), "SwiGLUMLP"),
        (GemmaMLP, GemmaConfig(hidden_size=32, intermediate_size=64), "GeGLUMLP"),
    ):
        mlp = base(config)
        x = torch.randn(3, 32)
        expected = mlp(x)
        replace_kernel_forward_from_hub(base, layer)
        register_kernel_mapping({layer: _mapping(folder, layer)})
        model = kernelize_layers(torch.nn.Sequential(mlp), mode=Mode.TRAINING, device="cpu")
        torch.testing.assert_close(model(x), expected)
        assert type(mlp).forward is not mlp.forward.__func__
        print(layer)


def with_fusedops(folder: str) -> None:
    """Print the error of loading the package where fusedops is imported."""
    import fusedops  # noqa: F401

    try:
        get_local_kernel(Path(folder))
    except ImportError as error:
        print(error)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
