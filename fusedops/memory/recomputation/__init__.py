"""Recomputation: regions of modules, selected results, single operators, slices."""
