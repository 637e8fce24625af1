"""Checks of the services of a deployment: control store, clocks, lake, sources and Spark."""

import socket
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dagster as dg

from pipeline_platform.cli.doctor.check import Finding, error, ok, warning
from pipeline_platform.cli.terminal import duration
from pipeline_platform.control import store
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.home import home
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.failure import reason_of
from pipeline_platform.orchestration.deployment import Built
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource
from pipeline_platform.source.contract import Source, SourceError
from pipeline_platform.spark import jvm
from pipeline_platform.spark import server as spark_server

_FAR_S, _TOO_FAR_S = 2.0, 30.0
"""Differences of clocks. Half of the shortest lease, a minute, is too far."""


def with_resource(
    built: Built, instance: dg.DagsterInstance | None, key: str, look: Callable[[Any], Finding]
) -> Finding:
    """Set up a resource, and check it."""
    try:
        with dg.build_resources({key: built.resources[key]}, instance) as resources:
            return look(getattr(resources, key))
    except dg.DagsterInvalidConfigError as refused:
        reasons = "; ".join(
            each.message.partition("PostProcessingError: ")[2] or each.message for each in refused.errors
        )
        return error(f"its options are not valid: {reasons}", "Set the variable, or correct the resource")
    except dg.DagsterResourceFunctionError as refused:
        return error(f"it cannot be set up: {reason_of(refused.user_exception)}")


def control_store(control: ControlStore) -> Finding:
    """Check that the control store answers with tables of this release."""
    try:
        with control.writing() as connection:
            control.now(connection)
    except ControlStoreError as refused:
        return error(str(refused))
    return ok(f"{control}, tables of version {store.VERSION}")


def clock(control: ControlStore) -> Finding:
    """Compare the clock of the control store, by which claims expire, with the clock of this machine."""
    try:
        with control.reading() as connection:
            before = time.time()
            theirs = control.now(connection) / 1_000_000
            after = time.time()
    except ControlStoreError as refused:
        return error(str(refused))
    ahead_s = max(theirs - after, before - theirs, 0.0)
    text = f"the clocks of the control store and of this machine differ by {duration(ahead_s)}"
    if ahead_s < _FAR_S:
        return ok(text)
    fix = "Synchronise the clocks of all machines, for example with chrony"
    return error(text, fix) if ahead_s > _TOO_FAR_S else warning(text, fix)


def lake(root: Lake) -> Finding:
    """Write a small file to the lake, read it, and remove it."""
    folder, content = f".doctor-{uuid.uuid4().hex}", b"pipeline-platform doctor"
    path = f"{folder}/probe"
    fix = "Check the path, the credentials and the permissions"
    try:
        root.write(path, content)
    except OSError as refused:
        return error(f"{root.root} is not writable: {refused}", fix)
    try:
        found = root.read(path)
        root.remove_file(path)
        if root.is_local:
            root.remove(folder)
    except OSError as refused:
        return error(f"{root.root} is not readable: {refused}", fix)
    if found != content:
        return error(f"{root.root} returned other content than was written", "Use a store with consistent reads")
    return ok(f"{root.root} is readable and writable")


def source(key: str, built: Built, control: ControlStore, instance: dg.DagsterInstance | None) -> Finding:
    """Ask a source for its backlog."""

    def look(found: Source) -> Finding:
        try:
            found.open(control)
            backlog = found.backlog()
        except SourceError as refused:
            return error(f"{key} {refused.summary}: {refused}")
        if backlog.lost:
            return error(f"{key} lost messages: {backlog.lost}", "See the page of the source in the documentation")
        age_s = backlog.age(datetime.now(UTC))
        age = f", the oldest {duration(age_s)} old" if backlog.oldest and age_s is not None else ""
        return ok(f"{key} ({type(found).__name__}): {backlog}{age}")

    return with_resource(built, instance, key, look)


def spark(resource: SparkResource, within_s: float) -> Finding:
    """Check that runs find Spark: a server that accepts connections, or Java."""
    folder = Path(resource.state_folder).resolve() if resource.state_folder else home()
    if resource.remote == WARM and (server := spark_server.status(folder)):
        return ok(f"the warm server runs at {server.address}")
    if resource.remote not in ("", WARM):
        address = urlsplit(resource.remote)
        try:
            with socket.create_connection((address.hostname or "", address.port or 15002), within_s):
                return ok(f"{resource.remote.partition('/;')[0]} accepts connections")
        except OSError as refused:
            text = f"{resource.remote.partition('/;')[0]} does not answer: {refused}"
            return error(text, "Start the Spark Connect server, or correct PIPELINE_PLATFORM_SPARK")
    try:
        java = jvm.ensure_java(folder)
    except jvm.JavaNotFoundError as missing:
        return error(str(missing))
    return ok(f"a large run starts Spark in its own process, with the Java in {java}")
