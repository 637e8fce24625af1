"""Files of the lake, in a local folder or an object store, by the same calls."""

import errno
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from typing import Any, Self
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from pipeline_platform.lake import object_stores
from pipeline_platform.model.safe_text import address

AWAY_S = 120
"""Seconds for which each request is retried while an object store is unavailable: enough for a reboot of its host."""

_PATIENCE = {"max_retries": "1000", "retry_timeout": f"{AWAY_S}s", "backoff_config.max_backoff": "5s"}
_BRIEF = {"max_retries": "0", "timeout": "5s"}
"""Options for calls of delta-rs that block all other threads, including lease renewal; the caller retries them."""
SMALL = 2**20
"""Size in bytes up to which a file of an object store is read at once: a request takes longer than its bytes."""
_MISREAD = re.compile(r"[%#?*\[\]{}|^\\\x00-\x1f\x7f]")
"""Characters that delta-rs decodes, parses as parts of a URL or rejects, or that Spark parses as a pattern."""
_LEFT: list[pafs.FileSystem] = []
"""Clients of other processes, kept because their destructors may wait for threads of those processes."""


class Lake(BaseModel):
    """Root folder or URL of all tables, used by the driver and by tasks.

    Paths are relative to the root and created by this package only: they never contain a payload, an id or a batch key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,), hide_input_in_errors=True)

    root: str = Field(description="A folder, or the URL of an object store such as s3://bucket/prefix.", min_length=1)
    storage_options: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="Options of S3 or Azure, by delta-rs's names (AWS_REGION, AZURE_STORAGE_ACCOUNT_NAME, ...). Prefer "
        "to set credentials in the environment. Must be empty for gs://.",
    )

    @field_validator("root")
    @classmethod
    def _resolve(cls, root: str) -> str:
        """Make a folder absolute, because tasks run in other folders. Reject names that a client misreads."""
        scheme, _, place = root.partition("://") if "://" in root else ("", "", root)
        if scheme and scheme not in object_stores.STORES:
            raise ValueError(
                f"root must be a folder, or a URL that starts with s3://, gs://, az:// or abfss://, got {scheme}://. "
                "For a store with an S3 gateway, set AWS_ENDPOINT_URL in storage_options to the address of the gateway"
            )
        bucket = place.partition("/")[0]
        names_account = scheme in object_stores.AZURE and re.fullmatch(r"[\w$-]+@\w+(\.[\w-]+)+", bucket)
        if scheme and {":", "@"} & {*bucket} and not names_account:  # a secret key may contain a /
            raise ValueError("root must be a URL without user, password and query. Put credentials in the environment")
        real = root if scheme else os.path.realpath(root)
        if found := sorted(set(_MISREAD.findall(place if scheme else real))):
            raise ValueError(
                f"root must not contain {' '.join(map(repr, found))}, got {real!r}: delta-rs or Spark would misread "
                "it. Choose a name without % # ? * [ ] { } | ^ \\ and control characters"
            )
        return root if scheme else os.path.abspath(root)

    @model_validator(mode="after")
    def _is_reached_alike(self) -> Self:
        """Reject options that apply to only one of delta-rs, which commits, and PyArrow, which writes files."""
        scheme = urlsplit(self.root).scheme if "://" in self.root else ""
        urls = {name: value for name, value in self.storage_options.items() if "://" in value}
        if found := [name for name, url in urls.items() if address(url) != url]:
            raise ValueError(
                f"{', '.join(found)} must be a URL without user, password and query. Put credentials in the "
                "environment of all processes"
            )
        if scheme in object_stores.AZURE and "azure_storage_account_name" not in (self.options or {}):
            raise ValueError(
                f"root {self.root} does not contain the storage account. Set azure_storage_account_name in "
                "storage_options, AZURE_STORAGE_ACCOUNT_NAME in the environment, or root to "
                "abfss://container@account.dfs.core.windows.net/path"
            )
        if scheme == "gs" and self.storage_options:
            raise ValueError(
                f"storage_options must be empty for gs://, got {', '.join(sorted(self.storage_options))}: it would "
                "apply to commits, but not to files. Set GOOGLE_APPLICATION_CREDENTIALS in the environment of all "
                "processes"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether the root is a local folder."""
        return "://" not in self.root

    def uri(self, *parts: str) -> str:
        """Return the address of a path under the root, for delta-rs and Spark."""
        return "/".join([self.root.rstrip("/"), *parts])

    @cached_property
    def _filesystem(self) -> pafs.FileSystem:
        if self.is_local:
            return pafs.LocalFileSystem()
        return object_stores.filesystem(self.root, self.options or {})

    @property
    def options(self) -> dict[str, str] | None:
        """Options of a store's clients: `storage_options`, else variables of the environment; None for a folder."""
        return object_stores.options_of(self.root, self.storage_options)

    @property
    def patient_options(self) -> dict[str, str] | None:
        """Options of delta-rs: `options`, with retries for `AWAY_S`."""
        return self.options and {**_PATIENCE, **self.options}

    @property
    def polars_options(self) -> dict[str, Any] | None:
        """Options of Polars for a table opened by delta-rs: `patient_options`, with `max_retries` as a number."""
        options = self.patient_options
        return options and {**options, "max_retries": int(options["max_retries"])}

    def below(self, uri: str) -> pafs.FileSystem:
        """Return the file system of a folder under the root, such as a table."""
        return pafs.SubTreeFileSystem(object_stores.path_of(uri).rstrip("/"), self._filesystem)

    def _at(self, path: str) -> str:
        """Return a path for the file system: without the scheme of an object store."""
        return self.uri(path) if self.is_local else object_stores.path_of(self.uri(path))

    def leave_connections(self) -> None:
        """Drop the client of the parent process after a fork: two processes must not share a connection."""
        if client := vars(self).pop("_filesystem", None):
            _LEFT.append(client)

    def __getstate__(self) -> dict[Any, Any]:
        """Omit the client, which contains credentials of the driver: each process creates its own."""
        state = super().__getstate__()
        state["__dict__"] = {key: value for key, value in state["__dict__"].items() if key != "_filesystem"}
        return state

    def open_output(self, path: str) -> pa.NativeFile:
        """Open a new file for writing; in an object store it appears when it is closed."""
        if self.is_local:
            os.makedirs(os.path.dirname(self._at(path)), exist_ok=True)
        return self._filesystem.open_output_stream(self._at(path))

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for random access. A small file of an object store is read at once, in two requests."""
        file = self._filesystem.open_input_file(self._at(path))
        if self.is_local or file.size() > SMALL:
            return file
        with file:
            return pa.BufferReader(file.read_buffer())

    def write(self, path: str, content: bytes) -> None:
        """Write a whole file. On a local disk it appears under its name once it is complete and synced."""
        if not self.is_local:
            with self.open_output(path) as file:
                file.write(content)
            return
        half = f"{path}.{uuid.uuid4().hex}.half"
        try:
            with self.naming(path), self.open_output(half) as file:
                file.write(content)
            with self.naming(path):
                _fsync(self._at(half))  # otherwise a power cut may leave an empty file
            os.replace(self._at(half), self._at(path))
            self._sync_folder(os.path.dirname(self._at(path)))
        except BaseException:
            with suppress(OSError):
                os.remove(self._at(half))
            raise

    def sync(self, *paths: str) -> None:
        """Sync files and the folders that lead to them to disk. No effect on an object store.

        After a power cut, files named by a commit and commits whose messages were acknowledged must still exist.
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
        """Add the path to an `OSError` without a file name, because a machine may have several disks."""
        try:
            yield
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), self.uri(*parts)) from error

    def read(self, path: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        try:
            with self.open_input(path) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """Return the sorted names directly under a folder; empty if the folder does not exist."""
        return sorted(info.base_name for info in self._listed(folder))

    def folders(self, folder: str) -> list[str]:
        """Return the sorted names of the folders directly under a folder; other programs may put files beside them."""
        return sorted(info.base_name for info in self._listed(folder) if info.type == pafs.FileType.Directory)

    def _listed(self, folder: str) -> list[pafs.FileInfo]:
        selector = pafs.FileSelector(self._at(folder), allow_not_found=True)
        found: list[pafs.FileInfo] = self._filesystem.get_file_info(selector)
        return found

    def files(self, folder: str) -> list[str]:
        """Return the sorted paths of all files in a folder and its subfolders, as paths under the folder."""
        root = self._at(folder)
        found = self._filesystem.get_file_info(pafs.FileSelector(root, allow_not_found=True, recursive=True))
        return sorted(info.path[len(root) + 1 :] for info in found if info.type == pafs.FileType.File)

    def remove_file(self, path: str) -> None:
        """Remove a file, if it exists."""
        with suppress(FileNotFoundError):
            self._filesystem.delete_file(self._at(path))

    def remove(self, folder: str, first: str = "") -> None:
        """Remove a folder with its content, if it exists; with `first`, remove this file first. Safe concurrently.

        For an object store, do not call it in a callback process: delta-rs is not fork-safe.
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


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=4096)
def _sync_entry(folder: str) -> None:
    """Sync a folder's entry in its parent, once per process: the process that created it may have crashed."""
    with suppress(PermissionError):  # a parent of the lake's root may be unreadable
        _fsync(os.path.dirname(folder))
