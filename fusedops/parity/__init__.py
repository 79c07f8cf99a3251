"""The former name of ``fusedops.testing``, for one release."""

import warnings

from fusedops.testing import *  # noqa: F403

warnings.warn(
    "fusedops.parity is now fusedops.testing; the old name goes with the next release",
    DeprecationWarning,
    stacklevel=2,
)
