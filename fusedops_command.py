"""The program ``fusedops`` starts here, outside of the package.

``fusedops/__init__.py`` sees by this module that its process runs the command, and then imports
torch when a subcommand needs it: ``fusedops --help`` and usage errors must not wait for torch.
Nothing else may import this module.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line in ``sys.argv``."""
    from fusedops.cli.main import app

    app(prog_name="fusedops")
