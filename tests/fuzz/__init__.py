"""Fuzzers: ``python -m tests.fuzz operators --calls 100000 --seed 1 --processes 2``."""
