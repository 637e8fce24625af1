"""Run a command, and end it with all its children on request, or when the parent process ends.

Run as `python guard.py COMMAND ARGUMENT...`. Standard input is a pipe from the parent. A byte in it stops the command
in order, and its end kills the command. The kernel closes the pipe when the parent ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run the command and return its exit code."""
    # A process group reaches all processes that the command starts.
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, process_group=0)  # noqa: S603

    def signal_all(sent: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, sent)

    def obey() -> None:
        if os.read(0, 1):
            signal_all(signal.SIGTERM)
            os.read(0, 1)
        signal_all(signal.SIGKILL)

    threading.Thread(target=obey, daemon=True).start()
    code = command.wait()
    signal_all(signal.SIGKILL)
    return code


if __name__ == "__main__":
    sys.exit(main())
