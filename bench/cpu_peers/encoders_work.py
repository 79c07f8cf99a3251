"""BERT encoders of two sizes with random weights: the last hidden states of some sequences."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layers_work import frozen, zentorch
from torch import nn
from ways import Contest, Running, Way

import fusedops


@dataclass(frozen=True)
class Encoding:
    """What is encoded: a batch without padding, with the mask that a tokenizer gives."""

    layers: int
    hidden_size: int
    batch: int
    tokens: int

    def model(self) -> nn.Module:
        """Return the model in float32; the weights are the same in all processes."""
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=30522,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=12,
            intermediate_size=4 * self.hidden_size,
        )
        torch.manual_seed(0)
        return BertModel(config, add_pooling_layer=False).eval()

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask."""
        ids = torch.randint(30522, (self.batch, self.tokens), generator=torch.Generator())
        return ids, torch.ones_like(ids)


# name -> layers, hidden size and what is encoded: sequences x tokens
SIZES = {
    "MiniLM": (6, 384, ((1, 16), (1, 32), (1, 128), (8, 64), (32, 128))),
    "e5-base": (12, 768, ((1, 32), (1, 128), (8, 64))),
}


class States(nn.Module):
    """The encoder with tensors alone as arguments and result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states."""
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


def in_torch(
    work: Encoding, dtype: torch.dtype, change: Callable[[nn.Module], Any] | None = None
) -> Running:
    """Return the stock model, or what ``change`` makes of it."""
    states, inputs = States(work.model().to(dtype)), work.inputs()
    call = states if change is None else change(states)

    def run(_: object = None) -> torch.Tensor:
        with torch.no_grad():
            return call(*inputs)

    return Running(run, [run()])


def patched(states: States) -> States:
    """Patch the model with fusedops."""
    fusedops.patch(states.model)
    return states


def in_onnxruntime(work: Encoding) -> Running:
    """Export to ONNX, fuse with the optimizer for BERT, and run on ONNX Runtime."""
    import onnxruntime
    from onnxruntime.transformers import optimizer

    ids, mask = work.inputs()
    model = work.model()
    # The optimizer fuses the attention of this form only, and ONNX Runtime refuses what it makes
    # of a model that its session has optimised before (1.32).
    model.set_attn_implementation("eager")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        torch.onnx.export(
            States(model),
            (ids, mask),
            path,
            input_names=["ids", "mask"],
            output_names=["states"],
            dynamo=False,
        )
        optimized = optimizer.optimize_model(
            path, model_type="bert", num_heads=12, hidden_size=work.hidden_size, opt_level=0
        )
        optimized.save_model_to_file(path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"ids": ids.numpy(), "mask": mask.numpy()}

    def run(_: object = None) -> Any:
        return session.run(None, feed)[0]

    return Running(run, [torch.from_numpy(run())])


def in_openvino(work: Encoding, precision: str) -> Running:
    """Convert with OpenVINO and compile for one stream; ``precision``: of its products."""
    import openvino

    inputs = work.inputs()
    shapes = [tuple(each.shape) for each in inputs]
    model = openvino.convert_model(States(work.model()), example_input=inputs, input=shapes)
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }
    compiled = openvino.Core().compile_model(model, "CPU", options)
    arrays = [each.numpy() for each in inputs]

    def run(_: object = None) -> Any:
        return compiled(arrays, share_inputs=True)[0]

    return Running(run, [torch.from_numpy(run())])


def contests() -> list[Contest]:
    """Return a contest for each model, batch and dtype."""
    found = []
    for name, (layers, hidden_size, batches) in SIZES.items():
        for batch, tokens in batches:
            work = Encoding(layers, hidden_size, batch, tokens)
            for dtype, short in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
                encoder_ways = {
                    "patched": Way(partial(in_torch, work, dtype, patched), "fusedops"),
                    "transformers": Way(partial(in_torch, work, dtype), "transformers"),
                    "torch.compile": Way(partial(in_torch, work, dtype, frozen)),
                    "zentorch": Way(
                        partial(in_torch, work, dtype, zentorch), "zentorch", process="zentorch"
                    ),
                    "OpenVINO": Way(
                        partial(in_openvino, work, short), "openvino", process="openvino"
                    ),
                }
                if dtype == torch.float32:
                    make = partial(in_onnxruntime, work)
                    encoder_ways["ONNX Runtime"] = Way(make, "onnxruntime", process="onnxruntime")
                reference = partial(_reference, work)
                title = f"{name} encoder, {batch} x {tokens} tokens"
                found.append(Contest(title, str(dtype)[6:], reference, encoder_ways, "patched"))
    return found


def _reference(work: Encoding) -> Any:
    return in_torch(work, torch.float64).outputs
