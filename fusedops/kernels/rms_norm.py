"""rms_norm in Triton: the kernels of ``_norm.py``, not centred."""

from fusedops.kernels._norm import launchers

forward, backward = launchers(centred=False, residual=False)
