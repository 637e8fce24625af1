"""`python -m servers NAME`: start a server on this machine until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

from servers import azure, iceberg_rest, kafka, kinesis, postgres, pubsub, rabbitmq, s3, sqs
from servers.server import ServerError

FOLDER = Path(os.environ.get("PIPELINE_SERVERS", Path(__file__).parents[1] / ".servers"))
INSTALLED = (azure, iceberg_rest, kafka, kinesis, pubsub, s3, sqs)
"""Servers that are installed into `FOLDER`. RabbitMQ and PostgreSQL are packages of the system."""
_ENDING = (signal.SIGINT, signal.SIGTERM)


class Use(NamedTuple):
    """Instructions for a server. Texts contain `{address}`.

    Attributes:
        module: Module that starts it.
        environment: Environment variables for its clients.
        source: Module of its connector, the class, and its options.
        needs: Objects to create before a pipeline runs.
    """

    module: ModuleType
    environment: dict[str, str]
    source: tuple[str, str, str]
    needs: str


USES = {
    "kafka": Use(
        kafka,
        {"KAFKA_BOOTSTRAP_SERVERS": "{address}"},
        ("kafka", "KafkaSource", 'bootstrap_servers="{address}", group_id="trial", topics=["trial"]'),
        "a topic 'trial'",
    ),
    "kinesis": Use(
        kinesis,
        {**sqs.ENVIRONMENT, "AWS_ENDPOINT_URL_KINESIS": "{address}"},
        (
            "kinesis",
            "KinesisSource",
            f'stream="trial", endpoint_url="{{address}}", region_name="{sqs.REGION}"',
        ),
        "a stream 'trial'",
    ),
    "postgres": Use(
        postgres,
        {"DATABASE_URL": "{address}"},
        ("table_queue", "TableQueue", 'url="{address}", table="trial"'),
        "its tables: pipeline-platform table-queue create trial",
    ),
    "pubsub": Use(
        pubsub,
        {"PUBSUB_EMULATOR_HOST": "{address}"},
        ("pubsub", "PubsubSource", f'project="{pubsub.PROJECT}", subscription="trial", emulator_host="{{address}}"'),
        "a topic and a subscription 'trial'",
    ),
    "rabbitmq": Use(
        rabbitmq,
        {"RABBITMQ_URL": "{address}"},
        ("rabbitmq", "RabbitmqSource", 'url="{address}", queue="trial", declare={{}}'),
        "nothing, the source declares its queue",
    ),
    "sqs": Use(
        sqs,
        {**sqs.ENVIRONMENT, "AWS_ENDPOINT_URL_SQS": "{address}"},
        (
            "sqs",
            "SqsSource",
            f'queue_url="{{address}}/000000000000/trial", endpoint_url="{{address}}", region_name="{sqs.REGION}"',
        ),
        "a queue 'trial'",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Execute a command of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m servers",
        description="Servers for tests and trials, on loopback. A server runs until Ctrl-C or SIGTERM, and its data is "
        "deleted afterwards.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("install", help="install all servers that this machine can run, before tests need them")
    for name, use in USES.items():
        lack = use.module.missing()
        commands.add_parser(name, help=f"not available: {lack}" if lack else f"start {name}")
    command = parser.parse_args(arguments).command
    if command is None:
        parser.print_help()
        return 0
    try:
        install() if command == "install" else serve(USES[command])
    except ServerError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def install() -> None:
    """Install the servers that this machine can run."""
    for server in INSTALLED:
        if server.missing() is None:
            server.install(FOLDER)


def serve(use: Use) -> None:
    """Run a server until a signal comes."""
    for ending in _ENDING:
        signal.signal(ending, _interrupt)
    with suppress(KeyboardInterrupt), use.module.serve(FOLDER) as server:
        sys.stdout.writelines(f"{line}\n" for line in how_to_use(use, server.address))
        sys.stdout.flush()
        signal.pause()


def how_to_use(use: Use, address: str) -> Iterator[str]:
    """Yield lines with the address of a server, and with code for a shell and for `resources/`."""
    module, kind, options = use.source
    yield f"The server listens on {address} until Ctrl-C. For a shell:"
    yield from (f"  export {name}='{value.format(address=address)}'" for name, value in use.environment.items())
    yield "For resources/trial.py:"
    yield f"  from pipeline_platform.connectors.{module} import {kind}"
    yield "  from pipeline_platform.orchestration import source_resource"
    yield f'  trial = source_resource({kind})(name="trial", {options.format(address=address)})'
    yield f"Create first: {use.needs}."


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    for ending in _ENDING:  # the shutdown has started
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
