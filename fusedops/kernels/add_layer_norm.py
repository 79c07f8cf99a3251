"""add_layer_norm in Triton: the kernels of ``_norm.py``, centred, with a residual."""

from fusedops.kernels._norm import launchers

forward, backward = launchers(centred=True, residual=True)
