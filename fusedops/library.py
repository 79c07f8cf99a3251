"""For ops of your own: ``define_op`` registers an op with torch as those of fusedops are.

The tutorial "Write an op" uses all of it. It is experimental: names and arguments may change
between minor versions without a deprecation.
"""

from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE

__all__ = ["REPLICATE", "Gradient", "define_op"]
