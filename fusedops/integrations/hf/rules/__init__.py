"""What ``patch`` replaces: ``*_rule(original)`` is the ``PatchRule`` of a class, or ``None``."""
