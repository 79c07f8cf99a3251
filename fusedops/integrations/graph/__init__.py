"""Fused ops in the graphs that ``torch.compile`` captures; ``passes.py`` is what Inductor calls."""
