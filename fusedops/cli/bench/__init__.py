"""The commands of ``fusedops bench``; ``fusedops.bench`` measures, ``options`` is shared.

Their functions import what they use: ``--help`` must not wait longer than the package itself does.
"""
