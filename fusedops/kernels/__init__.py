"""Triton kernels and their launchers; imported only where Triton runs. File name = op name.

``forward`` and ``backward`` of a file take the arguments of the registered operator and of its
backward, in the order of the schemas, and return their results. ``supports`` and
``supports_backward`` return why the kernels cannot run on such arguments, or ``None``.
"""
