"""The first hour on a rented GPU: correctness and figures in calls of nine minutes.

    python -m first_gpu test results

In reading order: ``__main__`` (the command line), ``calls`` (what each call does), ``library``
(what must be built first), ``supervise`` (processes that work through items, and what ends one),
``protocol`` (how a process says what it does), ``warm`` (compiles), ``worker`` (tests),
``launches`` (the last launch of a process), ``sanitized`` (compute-sanitizer), ``figures`` and
``figure_list`` (measures), ``results`` (archive and summary), ``stand_in`` (a GPU that
leaves launches out, for the rehearsal).
"""
