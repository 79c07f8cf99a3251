"""Timing of patched modules against stock ones, to keep what is faster."""
