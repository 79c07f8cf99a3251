"""One file per Hugging Face family: its rules, and the fused classes that only it has.

``*_like.py`` serve families that are one another under other names. A file is imported when the
model at hand is of its family (``patch.py`` has the list), never before.
"""
