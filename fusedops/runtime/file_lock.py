"""Locks of files, which the system releases when their process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl


def try_lock(descriptor: int) -> bool:
    """Lock an open file exclusively until it is closed; ``False``: another process has it.

    A file system without locks counts as one where nobody has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
