"""Sources whose open connection remembers what it delivered: RabbitMQ."""

from typing import ClassVar

from pipeline_platform.source.contract import Source


class ConnectedSource(Source):
    """A source that gives messages to a connection, and takes back what that has not acknowledged when it closes.

    The run's own process reads and acknowledges, on one connection from `read` to `close`: executors that start a
    process for each step are refused. `abandon` has nothing to do: the connection of a dead run is closed.
    """

    in_tasks: ClassVar[bool] = False
