"""Spark for a run: in the run's own process, on this machine's warm server, or on a cluster.

dagster-pyspark creates the session on first use. This module must not import Spark: code servers and sensors load it.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import dagster as dg
from pydantic import Field, PrivateAttr, field_validator

from pipeline_platform.home import home
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.orchestration.resources import spark_sessions
from pipeline_platform.orchestration.resources.addresses import QUIET, Remote, Ui
from pipeline_platform.run.work.local_worker import LocalWorker
from pipeline_platform.spark import engine, jvm, shipping
from pipeline_platform.spark import server as spark_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WARM = "warm"
"""Value of `SparkResource.remote` for this machine's warm server."""

_USER = "pipeline-platform"  # a server knows sessions by user and id, and several users may start runs
_GENERATIONS = 100
_TASKS = tuple(
    f"{shipping.PLATFORM}.tasks.{module}"
    for module in ("receive.read_shares", "handle.handle_messages", "handle.repeats", "acknowledge.acknowledger")
)
"""Modules that nearly every run imports in tasks."""


class SparkResource(dg.ConfigurableResource["SparkResource"]):
    """A Spark session for the steps of a run, started on first use.

    Workers get the project's code as a zip. On a Connect server, all runs with the same code share one session, so that
    its Python workers are warm; changed code starts another session. Do not create temporary views or change settings
    in it.

    A process has one Spark session at a time. Resources with the same settings share it; other settings are refused
    until it is closed.
    """

    model_config = QUIET

    remote: Remote = Field(
        default="",
        description=(
            "Where Spark runs. Empty: in the run's own process. `warm`: on the server that `pipeline-platform spark "
            "start` started on this machine; a run restarts a crashed server, and uses its own process if no server "
            "was started. `sc://host:port`: on this Spark Connect server."
        ),
    )
    token: str | None = Field(
        default=None,
        repr=False,
        description="Token for the server at an `sc://` address. Use an environment variable (`dg.EnvVar`).",
    )
    ui: Ui = Field(
        default="",
        description="Address of the Spark UI of the server at an `sc://` address, such as `http://10.0.0.1:4040`. With "
        "it, run logs and `status` list tasks that take longer than a minute, and their hosts.",
    )
    cores: int = Field(default=0, ge=0, description="Parallel tasks of a session in the run's process. 0: all cores.")
    memory: str = Field(default="1g", description="Memory of the JVM of a session in the run's process.")
    spark_config: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="Further Spark settings of a session in the run's process. Servers ignore them.",
    )
    packages: list[str] = Field(
        default_factory=list,
        description="Further packages and modules to ship to workers. The platform, and the project's packages that "
        "pipelines and connectors import, are always shipped.",
    )
    environment: list[str] = Field(
        default_factory=list,
        description="Names of environment variables of the run to pass to callbacks, besides those of the system, "
        "Spark and the platform. Values are never stored.",
    )
    state_folder: str | None = Field(
        default=None,
        description="State folder of the warm server. Default: see `pipeline_platform.home.home`.",
    )
    _held: _Held | None = PrivateAttr(default=None)
    _worker: LocalWorker | None = PrivateAttr(default=None)

    @field_validator("environment")
    @classmethod
    def _has_names(cls, names: list[str]) -> list[str]:
        for position, name in enumerate(names):
            if not name.isidentifier():
                # Not quoted: it may be a secret value.
                raise ValueError(
                    f"environment[{position}] is not a valid name of a variable. Give names only, such as BANK_TOKEN: "
                    "each run reads the values from its own environment."
                )
        return names

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables of this process that `environment` names.

        Raises:
            PipelineError: A variable is not set.
        """
        if missing := [name for name in self.environment if name not in os.environ]:
            raise PipelineError(
                f"SparkResource.environment: {', '.join(missing)} not set in the environment of this run. Set the "
                "variable for the process that starts runs, or remove its name."
            )
        return {name: os.environ[name] for name in self.environment}

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Self]:
        """Yield the resource to a run, then close its session."""
        with closing(self):
            yield self

    @property
    def spark_session(self) -> SparkSession:
        """Return the session. It is started or joined on first use, and again after a crash of its server.

        Raises:
            RuntimeError: This process has another Spark session open.
            pipeline_platform.spark.server.SparkServerError: The warm server crashed, and could not be restarted.
            pipeline_platform.spark.jvm.JavaNotFoundError: No Java was found for a session in this process.
        """
        with _lock:
            if self._held is not None and not self._held.place.lives:
                self._leave()
            if self._held is None:
                self._held = _hold(self._place())
            return self._held.session

    @property
    def local_worker(self) -> LocalWorker | None:
        """Return the process that calls callbacks for few messages; None if Spark runs on other machines.

        A cluster may have packages, devices and networks that the machine of the runs lacks.
        """
        if self.remote not in ("", WARM):
            return None
        if self._worker is None:
            server = spark_server.status(self._folder) if self.remote else None
            self._worker = LocalWorker(server.cores if server else self._cores)
        return self._worker

    def warm_up(self, *modules: str) -> None:
        """Start the session and a Python worker per core that imports modules, so that the next run starts faster.

        Only runs that ship the same packages as this resource use them.
        """
        engine.warm_up(self.spark_session, self._cores, (*_TASKS, *modules))

    def close(self) -> None:
        """Stop a session in this process, or disconnect from a server, and end the local worker.

        The next use opens a session again.
        """
        if self._worker is not None:
            self._worker.close()
        self._leave()

    def _leave(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            _let_go(held)

    @property
    def _folder(self) -> Path:
        return Path(self.state_folder).resolve() if self.state_folder else home()

    @property
    def _cores(self) -> int:
        return self.cores or os.cpu_count() or 1

    def _place(self) -> _Place:
        log = dg.get_dagster_logger("spark")
        folder = self._folder
        packages = tuple(dict.fromkeys((shipping.PLATFORM, *self.packages)))
        if self.remote == WARM:
            server = spark_server.revive(folder, log.warning)
            if server:
                return _Server(
                    packages, server.address, server.token, server.started_at, f";user_id={_USER}", server, folder
                )
            log.warning(
                f"Found no warm Spark server in {folder}: starting Spark in this process, which takes some seconds. "
                "Start a server with `pipeline-platform spark start` and the same PIPELINE_PLATFORM_HOME."
            )
        elif self.remote:
            address, _, params = self.remote.rstrip("/").partition("/;")
            return _Server(packages, address, self.token, address, f";{params}" if params else "")
        settings = engine.local_settings(self._cores, self.memory) | self.spark_config
        return _Process(packages, tuple(sorted(settings.items())), folder)


def shipping_also(spark: SparkResource, packages: Iterable[str]) -> SparkResource:
    """Return a copy of a resource that ships more packages to workers."""
    options = {name: getattr(spark, name) for name in SparkResource.model_fields}
    return SparkResource(**options | {"packages": sorted({*spark.packages, *packages} - {shipping.PLATFORM})})


@dataclass(frozen=True)
class _Process:
    packages: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    folder: Path
    lives = True

    def open(self, closing_up: ExitStack, code: Path) -> SparkSession:
        java = str(jvm.ensure_java(self.folder))
        foreign = dict.fromkeys(engine.FOREIGN)
        # The JVM keeps the environment that it is started with.
        with spark_sessions.changed_environment(**foreign, JAVA_HOME=java, **engine.interpreters()):
            session = spark_sessions.open_session(dict(self.settings))
        closing_up.callback(session.stop)
        spark_sessions.ship(session, code)
        return session


@dataclass(frozen=True)
class _Server:
    """A Spark Connect server. `warm` is set for this machine's warm server."""

    packages: tuple[str, ...]
    address: str
    token: str | None
    life: str
    params: str
    warm: spark_server.SparkServer | None = None
    folder: Path | None = None

    @property
    def lives(self) -> bool:  # as far as is known
        return self.warm is None or self.warm.lives

    def open(self, closing_up: ExitStack, code: Path) -> SparkSession:
        for generation in range(_GENERATIONS):
            try:
                session = self._join(code, shipping.session_id(code.name, self.life, generation))
                closing_up.callback(spark_sessions.leave, session)
                return session
            except Exception as error:
                # The session was stopped or timed out. Its id cannot be used again: every run takes the next id.
                if "SESSION_CLOSED" not in str(error):
                    raise
        raise RuntimeError(f"{self.address} closed {_GENERATIONS} sessions of this code. Restart that server.")

    def _join(self, code: Path, name: str) -> SparkSession:
        token = f";token={quote(self.token)}" if self.token else ""
        remote = f"{self.address}/{token};session_id={name}{self.params}"
        session = spark_sessions.open_session({"spark.remote": remote})
        try:
            session.client.set_retry_policies([spark_sessions.retry_policy(self.address, self._expect_alive)])
            spark_sessions.ship(session, code)
        except BaseException:
            spark_sessions.leave(session)
            raise
        return session

    def _expect_alive(self) -> None:
        if self.warm is not None and not self.warm.lives:
            _revive_once(self)
            raise spark_server.SparkServerDiedError(
                f"the warm Spark server (process {self.warm.pid}, started {self.warm.started_at}) crashed or was "
                "stopped. This run's messages will be redelivered. A crashed server is restarted automatically"
            )


@cache
def _revive_once(place: _Server) -> None:
    """Restart and warm up a crashed server, once per process even if several threads detect the crash.

    This takes place in a new process, so that the failing run does not wait for it.
    """
    assert place.warm
    options = {"remote": WARM, "state_folder": str(place.folder), "packages": place.packages, "cores": place.warm.cores}
    call = f"from {__name__} import revive_warm; revive_warm(**options)"
    command = f"import json, sys; sys.path[:], options = json.loads(sys.argv[1]); {call}"
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    given = json.dumps((sys.path, options))
    subprocess.Popen([sys.executable, "-c", command, given], start_new_session=True, **quiet)  # noqa: S603


def revive_warm(**options: Any) -> None:
    """Restart and warm up the server of a `SparkResource` with these options, if it crashed."""
    if spark_server.revive(Path(options["state_folder"])):
        SparkResource(**options).warm_up(*options["packages"])


_Place = _Process | _Server


@dataclass
class _Held:
    """Session of this process, and the number of resources that use it."""

    place: _Place
    session: SparkSession
    closing_up: ExitStack
    holders: int = 0


_lock = threading.RLock()
_current: _Held | None = None
"""The session of this process: Spark allows one, whichever resource opened it."""


def _hold(place: _Place) -> _Held:
    """Return this process's session, opened if necessary."""
    global _current  # noqa: PLW0603 - a process can have one session
    with _lock:
        if _current is not None and not _current.place.lives:
            dead, _current = _current, None
            dead.closing_up.close()
        if _current is None:
            with ExitStack() as closing_up, ExitStack() as opening:
                # A server has a copy of the code; Spark in this process reads the file again.
                kept = closing_up if isinstance(place, _Process) else opening
                folder = kept.enter_context(tempfile.TemporaryDirectory(prefix="spark-code-"))
                session = place.open(closing_up, shipping.pack(place.packages, Path(folder)))
                _current = _Held(place, session, closing_up.pop_all())
        elif _current.place != place:
            raise RuntimeError(
                "this process already has a Spark session with other settings, and Spark allows one session per "
                "process. Close it first, or give both resources the same settings."
            )
        _current.holders += 1
        return _current


def _let_go(held: _Held) -> None:
    """Close the session if no resource uses it any more."""
    global _current  # noqa: PLW0603
    with _lock:
        held.holders -= 1
        if held.holders == 0 and held is _current:
            _current = None
            held.closing_up.close()


@atexit.register
def _close_at_exit() -> None:
    """Close a session that a script left open: a process with an open client may hang at its exit."""
    with _lock:
        if _current is not None:
            _current.holders = 1
            _let_go(_current)
