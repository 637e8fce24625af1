"""Dagster's daemon, looking for backfills every two seconds rather than thirty.

No setting of an instance says how often the daemon looks for backfills, and a demo would stand still for half a
minute twice. `make dev` and every deployment run `dagster-daemon` itself.
"""

from dagster._daemon import controller
from dagster._daemon.cli import main

if hasattr(controller, "DEFAULT_DAEMON_INTERVAL_SECONDS"):  # Dagster 1.13; should it go, the demo takes a minute more
    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 2

if __name__ == "__main__":
    main()
