"""Sources whose server tracks messages per connection: RabbitMQ."""

from typing import ClassVar

from pipeline_platform.source.contract import Source


class ConnectedSource(Source):
    """A source that delivers messages to a connection, and redelivers unacknowledged messages when it closes.

    The run's own process reads and acknowledges, on one connection from `read` to `close`: executors that start a
    process for each step are refused. `abandon` does nothing: the connection of a crashed run is closed.
    """

    in_tasks: ClassVar[bool] = False
