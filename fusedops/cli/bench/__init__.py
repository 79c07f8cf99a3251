"""``fusedops bench``: measures ops, reports, compares two measurements.

In reading order: ``machine`` (where), ``limits`` (what the machine can do), ``contenders`` (who
competes), ``cases`` (one op at one size measured), ``results`` (the record on file), ``table``
and ``chart`` (shown), ``compare`` (two records), ``command`` (the command line).
"""
