"""What is written of each step: ``metrics.jsonl``, and the figures in it."""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fusedops.launch.config_table import InputError
from fusedops.models import TransformerConfig
from fusedops.ops.baddbmm import baddbmm
from fusedops.train.loggers import Logger

FILE = "metrics.jsonl"
_log = logging.getLogger(__name__)
_PRODUCT = {"cpu": 1024, "cuda": 8192}
_TRIES = 20
_ENOUGH_SECONDS = 0.5


class Metrics:
    """Writes a line of JSON for each step, and gives it to other loggers.

    Args:
        folder: of the run.
        step: that the run resumes from: lines of later steps, which an ended run had written after
            its last checkpoint, are removed. Lines count from 1, the first step that was done.
        loggers: that get each line, too.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, folder: Path, *, step: int = 0, loggers: Sequence[Logger] = ()) -> None:
        self._path, self._loggers = folder / FILE, loggers
        self._warned = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b")
        except OSError as error:
            raise InputError(self._cannot(error)) from None
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Remove the lines of all steps after this one.

        Those before stay as they are: a process that is killed meanwhile loses none.

        Raises:
            InputError: a line is not one of these.
        """
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            try:
                # A killed process may have left half a line.
                if not line.endswith(b"\n") or int(json.loads(line)["step"]) > step:
                    break
            except (ValueError, TypeError, KeyError):
                raise InputError(
                    f"{self._path} is damaged: line {number} is no step's; move it away, and the "
                    "run continues with a new one"
                ) from None
            end += len(line)
        self._file.truncate(end)
        self._file.seek(end)

    def write(self, record: dict[str, Any]) -> None:
        """Write what is known of a step; ``record["step"]`` is its number.

        If the disk is full, one warning is logged and lines stay in memory until there is room.
        """
        # JSON knows no NaN and no infinity.
        line = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        try:
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            self._warn(self._cannot(error))
        numbers = {
            name: float(value)
            for name, value in record.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for logger in self._loggers:
            try:
                logger.log(numbers, record["step"])
            except Exception as error:  # a service that does not answer is no reason to stop
                self._warn(f"log.{logger.name}: {error}")

    def close(self) -> None:
        """Close the files."""
        try:
            self._file.close()
        except OSError as error:
            _log.warning("%s: its last lines are lost", self._cannot(error))
        for logger in self._loggers:
            try:
                logger.close()
            except Exception as error:  # the run itself is complete
                _log.warning("log.%s: %s", logger.name, error)

    def _warn(self, text: str) -> None:
        if not self._warned:
            _log.warning("%s; training continues", text)
        self._warned = True

    def _cannot(self, error: OSError) -> str:
        return f"cannot write {self._path}: {error.strerror or error}"


def flops_per_token(model: TransformerConfig, seq_len: int) -> float:
    """Return the floating-point operations of forward and backward for one token.

    Six for each weight that the token is multiplied by: embeddings are looked up and count only as
    a tied head, and of the experts only those that a token goes to. The products of attention are
    ``6 * layers * (query_width + value_width) * seq_len``, of which a causal model does half.
    Recomputation does not count: it is no useful work.
    """
    weights = model.output(own_weight=True).total
    width = model.query_width + model.num_heads * model.value_size
    products = 6 * width * seq_len * (0.5 if model.causal else 1.0)
    total = 0.0
    for index, count in model.kinds(range(model.num_layers)).items():
        total += count * (6 * model.used_weights(index) + products)
    return total + 6 * weights


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of a large square product: the best of a few.

    On a CPU, torch's product and ours are tried: torch's takes twice as long on Zen 5 in float32.
    """
    size = _PRODUCT[device.type]
    factor = torch.ones(size, size, device=device, dtype=dtype)
    batch, addend = factor[None], factor.new_zeros(1, 1, 1)
    times: list[float] = []
    while len(times) < _TRIES and sum(times) < _ENOUGH_SECONDS:
        began = time.perf_counter()
        if device.type == "cpu" and len(times) % 2:
            baddbmm(addend, batch, batch)
        else:
            torch.mm(factor, factor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: on the GPU, or on the host without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
