"""Which configurations of the attention kernels are compiled for the static report."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _launch
from fusedops.kernels._attention_backward import delta_kernel, delta_sizes
from fusedops.kernels._attention_backward_keys import keys_kernel
from fusedops.kernels._attention_backward_queries import queries_kernel
from fusedops.kernels._attention_forward import forward_kernel
from fusedops.kernels._attention_launch import block_table

_PLAIN = {
    "LEFT": False,
    "RIGHT": True,
    "MASK": "none",
    "PER_QUERY": False,
    "ALIBI": False,
    "SINKS": False,
    "SOFTCAP": False,
    "FOLD": True,
    "DROPOUT": "none",
    "VARLEN": False,
    "GROUP": 1,
    "WANTS_KEY": True,
    "WANTS_VALUE": True,
    "WANTS_QUERY": True,
    "WANTS_SCORES": False,
    "DELTA": "given",
    "PRECISION": "ieee",
}
