"""Triton kernels and their launchers; imported only where Triton runs. File name = op name."""
