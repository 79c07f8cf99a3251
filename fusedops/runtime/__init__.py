"""What surrounds operators: threads, copies, shared memory, time and memory of the host.

No operator needs it. Its parts depend on ``_core`` alone.
"""
