"""The first hour on a rented GPU: tests, memory checks and figures, in calls of limited time.

``__main__`` (the command line and what each call does), ``plugin`` (of pytest, for tests on one GPU
that several processes share), ``figures`` and ``figure_list`` (what is measured).
"""
