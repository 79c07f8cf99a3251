"""The label of tokens without a target: torch's default of ``ignore_index``."""

IGNORE_INDEX = -100
