"""The commands of ``fusedops bench``; ``fusedops.bench`` measures, ``options`` is shared."""
