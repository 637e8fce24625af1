"""`python -m servers` installs the servers that this machine can run: else a first test would wait for it."""

import os
from pathlib import Path

from servers import kafka, pubsub, sqs

folder = Path(os.environ.get("PIPELINE_SERVERS", Path(__file__).parents[1] / ".servers"))
for server in (kafka, pubsub, sqs):  # RabbitMQ and PostgreSQL are packages of the machine's
    if server.missing() is None:
        server.install(folder)
