"""layer_norm in Triton: the kernels of ``_norm.py``, centred."""

from fusedops.kernels._norm import launchers

forward, backward = launchers(centred=True, residual=False)
