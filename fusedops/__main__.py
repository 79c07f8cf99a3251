"""``python -m fusedops`` is the command ``fusedops``; ``torchrun -m fusedops train`` needs it."""

from fusedops.cli.main import app

app(prog_name="fusedops")
