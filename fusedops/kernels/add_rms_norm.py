"""add_rms_norm in Triton: the kernels of ``_norm.py``, not centred, with a residual."""

from fusedops.kernels._norm import launchers

forward, backward = launchers(centred=False, residual=True)
