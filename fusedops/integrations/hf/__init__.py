"""Patching by rule table: one file per Hugging Face family, one for torch's own modules.

``rules.py`` says what a rule is and when a fused module steps aside, ``patch.py`` applies rules,
``report.py`` tells what was done. transformers is imported by the family files only, and those
only when the model at hand comes from it.
"""
