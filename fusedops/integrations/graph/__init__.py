"""Fused ops in the graphs that ``torch.compile`` captures, for code that no rule knows.

``passes.py`` is what Inductor calls; ``reader.py`` reads a graph, and each other module holds the
rewrites of one kind.
"""
