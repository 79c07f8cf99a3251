"""Patching by rule table: torch's own modules here, Hugging Face's families in ``families/``.

``rules.py`` says what a rule is and when a fused module steps aside, ``patch.py`` applies rules,
``report.py`` tells what was done. Beside them stand the fused layers that several families share.
A family's file is imported only when the model at hand comes from it.
"""
