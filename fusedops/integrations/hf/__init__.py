"""Patching by rule: ``patch.py`` applies rules, ``rules/rule.py`` says what a rule is.

``tables.py`` finds the rule of a class, ``report.py`` tells what was done.
"""
