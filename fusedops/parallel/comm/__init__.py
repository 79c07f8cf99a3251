"""Communication: one function for each collective, counted; shared memory within a machine."""
