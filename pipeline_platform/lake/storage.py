"""Where the lake lies: a local folder or an object store, by one set of calls."""

import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from typing import Any, Self
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from pipeline_platform.model.safe_text import address

AWAY_S = 120
"""Seconds that each request is tried again while an object store is away: it may start anew, and its host reboot."""

_S3_NAMES = {
    "aws_region": ("aws_region", "region", "aws_default_region", "default_region"),
    "aws_endpoint_url": ("aws_endpoint_url_s3", "aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint"),
    "aws_access_key_id": ("aws_access_key_id", "access_key_id"),
    "aws_secret_access_key": ("aws_secret_access_key", "secret_access_key"),
    "aws_session_token": ("aws_session_token", "aws_token", "session_token", "token"),
    "aws_skip_signature": ("aws_skip_signature", "skip_signature"),
    "aws_virtual_hosted_style_request": ("aws_virtual_hosted_style_request", "virtual_hosted_style_request"),
}
"""What PyArrow has to be told, too: by the name that delta-rs prefers, all that it takes it by, the strongest first."""
_CREDENTIALS = {
    "aws_access_key_id": "access_key",
    "aws_secret_access_key": "secret_key",
    "aws_session_token": "session_token",
}
"""PyArrow's names of what both clients find by themselves where it is in the environment, in a profile or a role."""
_PATIENCE = {"max_retries": "1000", "retry_timeout": f"{AWAY_S}s", "backoff_config.max_backoff": "5s"}
_BRIEF = {"max_retries": "0", "timeout": "5s"}
"""For calls of delta-rs in which no other thread runs, none that renews a lease either: to try again is ours."""
_ATTEMPTS = 13
"""PyArrow's tries, each after twice as long as the last, and at most 20 s: about `AWAY_S` in all."""
_S3 = ("s3", "s3a")
_STORES = (*_S3, "gs")
_MISREAD = re.compile(r"[%#?*\[\]{}|^\\\x00-\x1f\x7f]")
"""Characters that delta-rs decodes, takes for parts of a URL or rejects, or that Spark takes for a pattern."""
_LEFT: list[pafs.FileSystem] = []
"""Clients of other processes: to destroy one may wait for threads that only its own process has."""


class Lake(BaseModel):
    """A root that all tables lie under, reached alike by the driver and by tasks.

    Paths given to it are relative to the root and made by this package only: no payload, id or batch key is ever
    part of one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,), hide_input_in_errors=True)

    root: str = Field(description="A folder, or the URL of an object store such as s3://bucket/prefix.", min_length=1)
    storage_options: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="For S3, by delta-rs's names (AWS_REGION, AWS_ENDPOINT_URL, ...); credentials are better left to "
        "the environment. None for gs://.",
    )

    @field_validator("root")
    @classmethod
    def _resolve(cls, root: str) -> str:
        """Make a folder absolute, because tasks run in folders of their own. Refuse names that a client misreads."""
        scheme, _, place = root.partition("://") if "://" in root else ("", "", root)
        if scheme and scheme not in _STORES:
            raise ValueError(
                f"root begins with {scheme}://: the lake lies in a folder (give its path) or at s3:// or gs://. Other "
                "stores often have a gateway that speaks S3: give its address as AWS_ENDPOINT_URL in storage_options"
            )
        if scheme and {":", "@"} & {*place.partition("/")[0]}:  # a secret key may contain a /
            raise ValueError("root must be a URL without user, password and query. Put credentials in the environment")
        real = root if scheme else os.path.realpath(root)
        if found := sorted(set(_MISREAD.findall(place if scheme else real))):
            raise ValueError(
                f"root is {real!r}, which contains {' '.join(map(repr, found))}: delta-rs or Spark would look for its "
                "files in another place. Choose a name without % # ? * [ ] { } | ^ \\ and control characters"
            )
        return root if scheme else os.path.abspath(root)

    @model_validator(mode="after")
    def _is_reached_alike(self) -> Self:
        """Refuse what delta-rs, which commits, and PyArrow, which writes files, would not reach alike."""
        scheme = urlsplit(self.root).scheme if "://" in self.root else ""
        urls = {name: value for name, value in self.storage_options.items() if "://" in value}
        if found := [name for name, url in urls.items() if address(url) != url]:
            raise ValueError(
                f"{', '.join(found)} must be a URL without user, password and query. Put credentials in the "
                "environment of all processes"
            )
        if scheme == "gs" and self.storage_options:
            raise ValueError(
                f"storage_options sets {', '.join(sorted(self.storage_options))}, which at gs:// reaches commits and "
                "no files: leave it empty, and set GOOGLE_APPLICATION_CREDENTIALS in the environment of all processes"
            )
        return self

    @property
    def is_local(self) -> bool:
        """True for a folder of this machine."""
        return "://" not in self.root

    def uri(self, *parts: str) -> str:
        """The address of a path under the root, as delta-rs and Spark take it."""
        return "/".join([self.root.rstrip("/"), *parts])

    @cached_property
    def _filesystem(self) -> pafs.FileSystem:
        if self.is_local:
            return pafs.LocalFileSystem()
        if urlsplit(self.root).scheme not in _S3:
            return pafs.FileSystem.from_uri(self.root)[0]
        given = self.options or {}
        options: dict[str, Any] = {ours: given[name] for name, ours in _CREDENTIALS.items() if name in given}
        endpoint = urlsplit(given.get("aws_endpoint_url", ""))
        if endpoint.netloc:
            options |= {"endpoint_override": endpoint.netloc, "scheme": endpoint.scheme}
        return pafs.S3FileSystem(
            **options,
            region=given.get("aws_region"),
            anonymous=_is_on(given.get("aws_skip_signature")),
            force_virtual_addressing=_is_on(given.get("aws_virtual_hosted_style_request")),
            allow_delayed_open=True,  # one request for a small file in place of three
            retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        )

    @property
    def options(self) -> dict[str, str] | None:
        """What clients are told: `storage_options`, else the environment's words for S3."""
        if urlsplit(self.root).scheme not in _S3:
            return None
        given = {key.lower(): value for key, value in self.storage_options.items()}
        around = {key.lower(): value for key, value in os.environ.items() if key.startswith("AWS_")}
        named = {}
        for name, names in _S3_NAMES.items():
            value = _first(given, names) or (None if name in _CREDENTIALS else _first(around, names))
            given = {key: text for key, text in given.items() if key not in names}
            if value is not None:
                named[name] = value
        if named.get("aws_endpoint_url", "").startswith("http://"):
            named["aws_allow_http"] = "true"
        return {**named, **given}

    @property
    def patient_options(self) -> dict[str, str] | None:
        """What delta-rs is told: the same, and to try again for `AWAY_S`."""
        return self.options and {**_PATIENCE, **self.options}

    @property
    def polars_options(self) -> dict[str, Any] | None:
        """What Polars is told of a table that delta-rs opened: that one's options, but `max_retries` as a number."""
        options = self.patient_options
        return options and {**options, "max_retries": int(options["max_retries"])}

    def below(self, uri: str) -> pafs.FileSystem:
        """Return the file system of a folder under the root, such as a table."""
        return pafs.SubTreeFileSystem(uri.partition("://")[2].rstrip("/"), self._filesystem)

    def _at(self, path: str) -> str:
        """A path as the file system takes it: without the scheme of an object store."""
        return self.uri(path).partition("://")[2] or self.uri(path)

    def leave_connections(self) -> None:
        """Leave the client to the process that this one was forked from: two must not talk on one connection."""
        if client := vars(self).pop("_filesystem", None):
            _LEFT.append(client)

    def __getstate__(self) -> dict[Any, Any]:
        """Leave the client behind, for it holds the driver's credentials: each process makes its own."""
        state = super().__getstate__()
        state["__dict__"] = {key: value for key, value in state["__dict__"].items() if key != "_filesystem"}
        return state

    def open_output(self, path: str) -> pa.NativeFile:
        """Open a new file for writing; an object appears when it is closed."""
        if self.is_local:
            os.makedirs(os.path.dirname(self._at(path)), exist_ok=True)
        return self._filesystem.open_output_stream(self._at(path))

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for reading at any place."""
        return self._filesystem.open_input_file(self._at(path))

    def write(self, path: str, content: bytes) -> None:
        """Write a whole file. On a local disk it appears under its name when it is complete and on disk."""
        if not self.is_local:
            with self.open_output(path) as file:
                file.write(content)
            return
        half = f"{path}.{uuid.uuid4().hex}.half"
        try:
            with self.naming(path), self.open_output(half) as file:
                file.write(content)
            with self.naming(path):
                _fsync(self._at(half))  # or a power cut may leave the name and no content
            os.replace(self._at(half), self._at(path))
            self._sync_folder(os.path.dirname(self._at(path)))
        except BaseException:
            with suppress(OSError):
                os.remove(self._at(half))
            raise

    def sync(self, *paths: str) -> None:
        """Have files on disk, and the entries of the folders that lead to them. An object store needs no call.

        A power cut must not take what a commit names, nor a commit whose messages were acknowledged.
        """
        if not self.is_local:
            return
        for path in paths:
            with self.naming(path):
                _fsync(self._at(path))
        for folder in dict.fromkeys(os.path.dirname(self._at(path)) for path in paths):
            self._sync_folder(folder)

    def _sync_folder(self, folder: str) -> None:
        _fsync(folder)
        while len(folder) >= len(self.root):
            _sync_entry(folder)
            folder = os.path.dirname(folder)

    @contextmanager
    def naming(self, *parts: str) -> Iterator[None]:
        """Name a path in an error of its disk: a disk without space is one of several."""
        try:
            yield
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), self.uri(*parts)) from error

    def read(self, path: str) -> bytes | None:
        """Read a whole file; None where there is none."""
        try:
            with self.open_input(path) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """The names directly under a folder, sorted; none where there is no such folder."""
        found = self._filesystem.get_file_info(pafs.FileSelector(self._at(folder), allow_not_found=True))
        return sorted(info.base_name for info in found)

    def remove_file(self, path: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self._filesystem.delete_file(self._at(path))

    def remove(self, folder: str, first: str = "") -> None:
        """Remove a folder and all in it, if it is there, one file first; others may remove it at the same time.

        At an object store no host of a task may call it: delta-rs does not bear a fork.
        """
        if not self.is_local:
            self._remove_objects(folder, first)
            return
        if first:
            self.remove_file(f"{folder}/{first}")
        while self._filesystem.get_file_info(self._at(folder)).type != pafs.FileType.NotFound:
            try:
                self._filesystem.delete_dir(self._at(folder))
            except OSError as error:  # another process removed a file in it first, or wrote one
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                    raise

    def _remove_objects(self, folder: str, first: str) -> None:
        from deltalake.fs import DeltaStorageHandler  # PyArrow takes three times as many requests

        again: dict[str, Any] = {"stop": stop_after_delay(AWAY_S), "wait": wait_fixed(1), "reraise": True}
        for attempt in Retrying(retry=retry_if_exception_type(OSError), **again):
            with attempt:
                store = DeltaStorageHandler(self.root, {**(self.options or {}), **_BRIEF})
                with suppress(FileNotFoundError):
                    store.delete_file(f"{folder}/{first or '_'}")
                store.delete_dir(folder)


def _first(given: Mapping[str, str], names: Iterable[str]) -> str | None:
    return next((given[name] for name in names if name in given), None)


def _is_on(switch: str | None) -> bool:
    return (switch or "").lower() in ("true", "1", "yes", "on", "y")


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=4096)
def _sync_entry(folder: str) -> None:
    """Have a folder's own entry on disk, once a process: the process that made it may have died before that."""
    with suppress(PermissionError):  # of what the lake lies in
        _fsync(os.path.dirname(folder))
