"""Recomputation: regions of modules, selected results, single operators, sliced inputs."""
