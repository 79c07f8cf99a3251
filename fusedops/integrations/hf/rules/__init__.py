"""What ``patch`` replaces: one module for each kind of module of transformers and torch.

A function ``*_rule(original, ..., module_name)`` returns the ``PatchRule`` for the class
``original``; ``module_name`` names the module that will hold the patched class under its name.
"""
