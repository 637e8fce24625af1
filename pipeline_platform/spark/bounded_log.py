"""Write standard input, the output of Spark's server and workers, into a log of bounded size.

It is a separate process, because the server outlives its starter. It starts fast, because it does not import the
platform.
"""

import os
import sys
from contextlib import suppress


def main(path: str, limit: int) -> None:
    """Append to `path`, which exists, until the input ends; at `limit` bytes it becomes `path`.1."""
    while printed := os.read(0, 65_536):
        with suppress(OSError):  # a full disk costs these lines, never the server
            if os.path.getsize(path) + len(printed) > limit:
                os.replace(path, f"{path}.1")
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            with open(path, "r+b") as log:  # does not create it: a folder that was removed stays removed
                log.seek(0, os.SEEK_END)
                log.write(printed)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
