"""The ``fusedops`` command. It sits on top: nothing else in the package imports it."""
