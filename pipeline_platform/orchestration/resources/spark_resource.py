"""Spark for a run: in the run's own process, on this machine's warm server, or on a cluster.

dagster-pyspark makes the session on first use. Loading this file loads no Spark: the code server and sensors do so.
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
from pipeline_platform.spark import engine, jvm, shipping
from pipeline_platform.spark import server as spark_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WARM = "warm"
"""Value of `SparkResource.remote` that stands for this machine's warm server."""

_USER = "pipeline-platform"  # a server knows sessions by user and id, and several users may start runs
_GENERATIONS = 100
_TASKS = tuple(
    f"{shipping.PLATFORM}.tasks.{module}"
    for module in ("receive.read_shares", "handle.handle_messages", "handle.repeats", "acknowledge.acknowledger")
)
"""What the tasks of nearly every run import."""


class SparkResource(dg.ConfigurableResource["SparkResource"]):
    """A Spark session for the steps of a run, started on first use.

    Workers get the project's code as a zip. On a Connect server, all runs of the same code share one session, so that
    its Python workers are warm; an edit starts another. So make no temporary views and set nothing that differs by run.

    A process has one Spark session at a time: resources with the same settings share it, others are refused until it
    is closed.
    """

    model_config = QUIET

    remote: Remote = Field(
        default="",
        description=(
            "Where Spark runs: empty for the run's own process; `warm` for the server that `pipeline-platform spark "
            "start` started on this machine (a run that finds it dead starts it anew, a run without one its own "
            "session); or the address of a Spark Connect server, `sc://host:port`."
        ),
    )
    token: str | None = Field(
        default=None,
        repr=False,
        description="Token for the server at an `sc://` address, as an environment variable (`dg.EnvVar`).",
    )
    ui: Ui = Field(
        default="",
        description="Address of the UI of the server at an `sc://` address, such as `http://10.0.0.1:4040`: the log of "
        "a run and `status` then say which tasks take longer than a minute, and on which host.",
    )
    cores: int = Field(default=0, ge=0, description="Tasks at a time in a session of the run's own; 0 takes all cores.")
    memory: str = Field(default="1g", description="Memory of the JVM of a session of the run's own.")
    spark_config: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="More Spark settings for a session of the run's own; servers have theirs from their start.",
    )
    packages: list[str] = Field(
        default_factory=list,
        description="Importable packages and modules that workers get, beside this one and those of the project that "
        "pipelines and connectors of `platform_definitions` are from or import.",
    )
    environment: list[str] = Field(
        default_factory=list,
        description="Names of environment variables of a run that its callbacks get, beside those of the system, Spark "
        "and the platform. The values are never stored.",
    )
    state_folder: str | None = Field(
        default=None,
        description="Where the warm server's state lies; see `pipeline_platform.home.home`.",
    )
    _held: _Held | None = PrivateAttr(default=None)

    @field_validator("environment")
    @classmethod
    def _has_names(cls, names: list[str]) -> list[str]:
        for position, name in enumerate(names):
            if not name.isidentifier():
                # Not quoted: it may be a value.
                raise ValueError(
                    f"environment[{position}] is not the name of a variable. Give names only, such as BANK_TOKEN: each "
                    "run reads their values from its own environment."
                )
        return names

    @property
    def variables(self) -> dict[str, str]:
        """The variables that `environment` names, from this process.

        Raises:
            PipelineError: A variable is not set.
        """
        if missing := [name for name in self.environment if name not in os.environ]:
            raise PipelineError(
                f"SparkResource.environment: {', '.join(missing)} not set in the environment of this run. Set it for "
                "the process that starts runs, or remove the name."
            )
        return {name: os.environ[name] for name in self.environment}

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Self]:
        """Lend the resource to a run; then close what it opened."""
        with closing(self):
            yield self

    @property
    def spark_session(self) -> SparkSession:
        """The session, started or joined on first use, and again after its server died.

        Raises:
            RuntimeError: This process has another Spark session open.
            pipeline_platform.spark.server.SparkServerError: The warm server had died, and another did not start.
            pipeline_platform.spark.jvm.JavaNotFoundError: A session of the run's own finds no Java.
        """
        if self._held is not None and not self._held.place.lives:
            self.close()
        if self._held is None:
            self._held = _hold(self._place())
        return self._held.session

    def warm_up(self, *modules: str) -> None:
        """Start the session and a Python worker per core, which imports modules: the next run need not wait for them.

        The runs of a deployment find them if this resource ships the same packages as theirs.
        """
        engine.warm_up(self.spark_session, self.cores or os.cpu_count() or 1, (*_TASKS, *modules))

    def close(self) -> None:
        """Stop a session of this process's own, leave a server's to the others. The next use opens one again."""
        if self._held is not None:
            held, self._held = self._held, None
            _let_go(held)

    def _place(self) -> _Place:
        log = dg.get_dagster_logger("spark")
        folder = Path(self.state_folder).resolve() if self.state_folder else home()
        packages = tuple(dict.fromkeys((shipping.PLATFORM, *self.packages)))
        if self.remote == WARM:
            server = spark_server.revive(folder, log.warning)
            if server:
                return _Server(
                    packages, server.address, server.token, server.started_at, f";user_id={_USER}", server, folder
                )
            log.warning(
                f"No warm Spark server according to {folder}: starting Spark in this process, which takes seconds. "
                "`pipeline-platform spark start` starts a server (with the same PIPELINE_PLATFORM_HOME)."
            )
        elif self.remote:
            address, _, params = self.remote.rstrip("/").partition("/;")
            return _Server(packages, address, self.token, address, f";{params}" if params else "")
        cores = self.cores or os.cpu_count() or 1
        settings = engine.local_settings(cores, self.memory) | self.spark_config
        return _Process(packages, tuple(sorted(settings.items())), folder)


def shipping_also(spark: SparkResource, packages: Iterable[str]) -> SparkResource:
    """The same resource, whose workers get more packages."""
    options = {name: getattr(spark, name) for name in SparkResource.model_fields}
    return SparkResource(**options | {"packages": sorted({*spark.packages, *packages} - {shipping.PLATFORM})})


@dataclass(frozen=True)
class _Process:
    """Spark inside this process."""

    packages: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    folder: Path
    lives = True

    def open(self, closing_up: ExitStack, code: Path) -> SparkSession:
        java = str(jvm.ensure_java(self.folder))
        foreign = dict.fromkeys(engine.FOREIGN)
        # Java keeps what it was started with.
        with spark_sessions.changed_environment(**foreign, JAVA_HOME=java, **engine.interpreters()):
            session = spark_sessions.open_session(dict(self.settings))
        closing_up.callback(session.stop)
        spark_sessions.ship(session, code)
        return session


@dataclass(frozen=True)
class _Server:
    """A Spark Connect server; `warm` if it is this machine's, of a state folder."""

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
                # It was stopped or timed out. Its id never comes back, so all go on to the next.
                if "SESSION_CLOSED" not in str(error):
                    raise
        raise RuntimeError(f"{self.address} closed {_GENERATIONS} sessions of this code: restart that server.")

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
                f"the warm Spark server (process {self.warm.pid}, since {self.warm.started_at}) died: this run's "
                "messages come back, and another server starts unless it was stopped"
            )


@cache
def _revive_once(place: _Server) -> None:
    """Have another server started and warmed for one that died, however many threads of this process meet its death.

    A process of its own does it: who met the death need not wait, and the next run less.
    """
    assert place.warm
    options = {"remote": WARM, "state_folder": str(place.folder), "packages": place.packages, "cores": place.warm.cores}
    call = f"from {__name__} import revive_warm; revive_warm(**options)"
    command = f"import json, sys; sys.path[:], options = json.loads(sys.argv[1]); {call}"
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    given = json.dumps((sys.path, options))
    subprocess.Popen([sys.executable, "-c", command, given], start_new_session=True, **quiet)  # noqa: S603


def revive_warm(**options: Any) -> None:
    """Revive the server of these options of a `SparkResource`, and begin what runs find warm."""
    if spark_server.revive(Path(options["state_folder"])):
        SparkResource(**options).warm_up(*options["packages"])


_Place = _Process | _Server


@dataclass
class _Held:
    """The session of this process, and how many resources hold it."""

    place: _Place
    session: SparkSession
    closing_up: ExitStack
    holders: int = 0


_lock = threading.RLock()
_current: _Held | None = None


def _hold(place: _Place) -> _Held:
    """Join this process's session, or open it."""
    global _current  # noqa: PLW0603 - a process can have one session
    with _lock:
        if _current is not None and not _current.place.lives:
            dead, _current = _current, None
            dead.closing_up.close()
        if _current is None:
            with ExitStack() as closing_up, ExitStack() as opening:
                # A server has a copy of the code; Spark in this process reads it anew.
                kept = closing_up if isinstance(place, _Process) else opening
                folder = kept.enter_context(tempfile.TemporaryDirectory(prefix="spark-code-"))
                session = place.open(closing_up, shipping.pack(place.packages, Path(folder)))
                _current = _Held(place, session, closing_up.pop_all())
        elif _current.place != place:
            raise RuntimeError(
                "this process has a Spark session with other settings open: Spark allows one at a time. "
                "Close it first, or give both resources the same settings."
            )
        _current.holders += 1
        return _current


def _let_go(held: _Held) -> None:
    """Close the session when its last holder goes."""
    global _current  # noqa: PLW0603
    with _lock:
        held.holders -= 1
        if held.holders == 0 and held is _current:
            _current = None
            held.closing_up.close()


@atexit.register
def _close_at_exit() -> None:
    """Close what a script forgot: a process with an open client may hang at its end."""
    with _lock:
        if _current is not None:
            _current.holders = 1
            _let_go(_current)
