"""``fusedops bench``: measures ops and whole models, reports, compares two measurements.

In reading order: ``machine`` (where), ``limits`` (what the machine can do), ``contenders`` (who
competes), ``cases`` (one op at one size measured), ``results`` (the record on file), ``table``
and ``chart`` (shown), ``compare`` (two records), ``command`` (the command line, ``options`` what
its commands share). Whole models: ``model_zoo`` (which), ``models`` (one measured),
``models_report`` and ``svg`` (shown), ``models_command``. Memory policies on them: ``memory``,
``memory_command``.
"""
