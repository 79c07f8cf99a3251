"""Benchmarks of ops and whole models: measured, recorded, shown and compared.

In reading order: ``machine`` (where), ``limits`` (what the machine can do), ``contenders`` (who
competes), ``runner`` (jobs and conditions), ``cases`` (one op at one size measured), ``results``
(the record on file), ``report`` and ``svg`` (shown), ``compare`` (two records). Whole models:
``model_zoo`` (which), ``models`` (one measured). Memory policies: ``memory``. Layouts: ``scaling``.
Commands are in ``cli/bench``.
"""
