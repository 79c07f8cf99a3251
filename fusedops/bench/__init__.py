"""Benchmarks of ops and whole models: measured, recorded, shown and compared.

In reading order: ``machine`` (where), ``conditions`` (how), ``limits`` (what the machine can do),
``contenders`` (who competes), ``cases`` (one op at one size measured), ``results`` (the record on
file), ``table``, ``chart`` and ``svg`` (shown), ``compare`` (two records). Whole models:
``model_zoo`` (which), ``models`` (one measured), ``models_report`` (shown). Memory policies:
``memory``. Layouts: ``scaling``. Commands are in ``cli/bench``.
"""
