"""What ``patch`` replaces: one module for each kind of module of transformers and torch.

A function ``*_rule(original, ...)`` returns the ``PatchRule`` for the class ``original``, or
``None`` where there is none for its code.
"""
