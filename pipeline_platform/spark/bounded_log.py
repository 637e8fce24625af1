"""Keep what comes by standard input in a file of a bounded size, and what came before that in another beside it.

Spark's server says all that it says into this, and so do its workers, which print what their callbacks print. A process
of its own: the server outlives whoever started it. This module stands alone, so that it starts at once.
"""

import os
import sys
from contextlib import suppress


def main(path: str, limit: int) -> None:
    """Append to `path`, which exists, until nothing comes any more; at `limit` bytes it becomes `path`.1."""
    while said := os.read(0, 65_536):
        with suppress(OSError):  # a full disk costs what is said meanwhile, never the server that says it
            if os.path.getsize(path) + len(said) > limit:
                os.replace(path, f"{path}.1")
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            with open(path, "r+b") as log:  # never made again: who removes its folder means to be rid of it
                log.seek(0, os.SEEK_END)
                log.write(said)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
