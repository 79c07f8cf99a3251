"""swiglu in Triton: the kernels are those of ``_glu.py``."""

from __future__ import annotations

import functools

from fusedops.kernels import _glu

forward = functools.partial(_glu.forward, activation="silu")
backward = functools.partial(_glu.backward, activation="silu")
