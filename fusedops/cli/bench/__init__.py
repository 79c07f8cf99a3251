"""``fusedops bench``: ``commands`` has its command lines, ``options`` what they share."""
