"""Encode queries and batches with BERT encoders: stock, patched, ONNX Runtime and OpenVINO.

    python bench/models/encode_queries.py            # about four minutes
    python bench/models/encode_queries.py --record   # keeps the figures in bench/results/<device>

The encoders have the sizes of all-MiniLM-L6-v2 and e5-base and random weights: nothing is
downloaded. All compute ``last_hidden_state`` for tokens without padding; the pooler, which
sentence-transformers does not read, is left out for all. ONNX Runtime (with its graph optimizations
for BERT) and OpenVINO take part where they are installed. The variants run in turns in one process,
with a pause in between in which the threads of the one before stop spinning.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel
from transformers.utils import logging as transformers_logging

import fusedops
from fusedops.bench import machine
from fusedops.runtime import timer
from fusedops.terminal import files
from fusedops.terminal.console import console, number_columns, show_table

# Layers, hidden size, heads; the feed-forward layer is four times as wide.
ENCODERS = {"minilm": (6, 384, 12), "e5-base": (12, 768, 12)}
SIZES = ((1, 8), (1, 16), (1, 32), (1, 64), (1, 128), (8, 64), (32, 128))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STOCK, FUSED, ONNX, OPENVINO = "stock", "fusedops", "onnxruntime", "openvino"
PAUSE = 3e-3  # seconds
_NAMES = ("input_ids", "attention_mask", "token_type_ids")

Run = Callable[[dict[str, torch.Tensor]], Any]


class _Exported(nn.Module):
    """What is exported: the hidden states alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(**dict(zip(_NAMES, inputs, strict=True)))[0]
        return hidden


def make_encoder(name: str) -> nn.Module:
    """Return an encoder of one of the sizes with random weights, for evaluation in float32."""
    layers, hidden_size, heads = ENCODERS[name]
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden_size,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def make_batch(batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Return token ids, a mask of ones and token types of zeros, ``[batch_size, seq_len]``."""
    generator = torch.Generator().manual_seed(seq_len)
    tokens = torch.randint(1000, 20000, (batch_size, seq_len), generator=generator)
    values = (tokens, torch.ones_like(tokens), torch.zeros_like(tokens))
    return dict(zip(_NAMES, values, strict=True))


def export(model: nn.Module, path: Path) -> None:
    """Write a model as ONNX, with sizes of batch and tokens left open."""
    axes = {name: {0: "batch", 1: "tokens"} for name in (*_NAMES, "hidden")}
    inputs = tuple(make_batch(2, 16).values())
    torch.onnx.export(
        _Exported(copy.deepcopy(model)),
        inputs,
        str(path),
        input_names=list(_NAMES),
        output_names=["hidden"],
        dynamic_axes=axes,
        dynamo=False,
    )


def onnxruntime_run(path: Path, name: str) -> Run:
    """Return a run of ONNX Runtime, whose transformer optimizer has fused the graph."""
    import onnxruntime
    from onnxruntime.transformers import optimizer

    _, hidden_size, heads = ENCODERS[name]
    fused = path.with_suffix(".fused.onnx")
    model = optimizer.optimize_model(
        str(path), model_type="bert", num_heads=heads, hidden_size=hidden_size
    )
    model.save_model_to_file(str(fused))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(str(fused), options)
    return lambda batch: session.run(None, {key: value.numpy() for key, value in batch.items()})


def openvino_run(path: Path, dtype: str) -> Run:
    """Return a run of OpenVINO with its arithmetic in a dtype."""
    import openvino

    hints = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(str(path), "CPU", hints)
    request = compiled.create_infer_request()
    return lambda batch: request.infer(
        {key: value.numpy() for key, value in batch.items()}, share_inputs=True
    )


def make_runs(name: str, dtype: str, folder: Path) -> dict[str, Run]:
    """Return what encodes a batch, by name; the patched model shares the weights of stock."""
    model = make_encoder(name)
    path = folder / f"{name}.onnx"
    peers: dict[str, Run] = {}
    if importlib.util.find_spec("onnx") is not None and not path.exists():
        export(model, path)
    # The kernels of ONNX Runtime for the CPU have no bfloat16.
    if path.exists() and dtype == "float32" and importlib.util.find_spec(ONNX) is not None:
        peers[ONNX] = onnxruntime_run(path, name)
    if path.exists() and importlib.util.find_spec(OPENVINO) is not None:
        peers[OPENVINO] = openvino_run(path, dtype)
    stock = model.to(DTYPES[dtype])
    fused = copy.deepcopy(stock, {id(weight): weight for weight in stock.parameters()})
    fusedops.patch(fused)
    return {STOCK: _eager(stock), FUSED: _eager(fused), **peers}


def _eager(model: nn.Module) -> Run:
    @torch.inference_mode()
    def run(batch: dict[str, torch.Tensor]) -> Any:
        return model(**batch).last_hidden_state

    return run


@contextlib.contextmanager
def _after_pause() -> Iterator[None]:
    time.sleep(PAUSE)
    yield


def compare(runs: dict[str, Run], batch: dict[str, torch.Tensor], seconds: float) -> dict[str, Any]:
    """Time the runs in turns; return the figures, ready for JSON."""
    variants = [
        timer.Variant(name, lambda _, run=run: run(batch), context=_after_pause)
        for name, run in runs.items()
    ]
    timing = timer.measure(variants, timer.CpuClock(), timer.TimingPlan(9, 100, seconds))
    return {
        name: {
            "seconds": asdict(timing.spread(name)),
            "ratio": asdict(timing.ratio(name, FUSED)),  # its time by that of fusedops
            "undisturbed": timing.trusted(name),
        }
        for name in runs
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and write the JSON.

    Returns:
        0.

    Raises:
        SystemExit: with code 2 and one sentence, for what the user can put right.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--encoder", choices=("all", *ENCODERS), default="all", help="size of the encoder")
    add("--dtype", choices=("both", *DTYPES), default="both", help="of the arithmetic")
    add("--tokens", type=int, default=4096, help="leave out batches with more tokens")
    add("--seconds", type=float, default=6.0, help="about how long to measure each batch")
    add("--out", type=Path, default=Path("out"), help="output directory (default: out)")
    add("--record", action="store_true", help="keep the results in bench/results/<device>")
    with files.one_line_errors():
        return _run(parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    transformers_logging.set_verbosity_error()
    device = torch.device("cpu")
    targets = [files.make_folder(options.out) / "encode_queries.json"]
    if options.record:
        folder = Path(__file__).resolve().parents[1] / "results" / machine.machine(device).slug
        targets.append(files.make_folder(folder) / "encode_queries.json")
    for target in targets:
        files.check_writable(target)
    tuning = fusedops.tune_host()
    names = ENCODERS if options.encoder == "all" else [options.encoder]
    dtypes = DTYPES if options.dtype == "both" else [options.dtype]
    rows = []
    with tempfile.TemporaryDirectory() as folder_name:
        for name in names:
            for dtype in dtypes:
                runs = make_runs(name, dtype, Path(folder_name))
                for size in SIZES:
                    if size[0] * size[1] <= options.tokens:
                        result = compare(runs, make_batch(*size), options.seconds)
                        row = {"encoder": name, "dtype": dtype, "variants": result}
                        rows.append({**row, "batch": size[0], "seq_len": size[1]})
                        _show(rows[-1:])
    record = {
        "machine": machine.describe(device),
        "versions": machine.versions() | _peer_versions(),
        "source": machine.git_commit(),
        "created": machine.now(),
        "allocator": "tuned" if tuning.allocator_tuned else "system",
        "rows": rows,
    }
    for target in targets:
        files.write_json(target, record)
    print(f"wrote {targets[-1]}", file=sys.stderr)
    return 0


def _peer_versions() -> dict[str, str]:
    found = (name for name in (ONNX, OPENVINO) if importlib.util.find_spec(name) is not None)
    return {name: importlib.import_module(name).__version__ for name in found}


def _show(rows: Sequence[dict[str, Any]]) -> None:
    cells = []
    for row in rows:
        for name, result in row["variants"].items():
            spread = result["seconds"]
            cells.append(
                (
                    f"{row['encoder']} {row['dtype']}",
                    f"{row['batch']} x {row['seq_len']}",
                    name,
                    f"{spread['median'] * 1e3:.2f} ({spread['q1'] * 1e3:.2f}-"
                    f"{spread['q3'] * 1e3:.2f}){'' if result['undisturbed'] else ' ?'}",
                    f"{result['ratio']['median']:.2f}",
                )
            )
    figures = number_columns("batch", "variant", "ms", "its time by ours")
    show_table(console(), ("encoder", *figures), cells)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
