"""Errors of databases: the reason in a line, a fix, and whether a retry may succeed."""

import re
import sqlite3
from collections.abc import Mapping
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

_RESTARTS: Final = "The server is starting or stopping; the call is retried"
_CUT: Final = (
    "The server, an administrator or the network ended the session; its transaction was rolled back, and the next "
    "attempt or the next run repeats it"
)
_UNREACHED: Final = "Check the host and port in url, and that the server is running"
WAYS_OUT: Final = {
    "disk is full": "Free space on the disk of the database.",
    "database is locked": "Another process has locked {file} for {busy} s. Wait for it, or end it (`fuser {file}` "
    "shows it)",
    "lock timeout": "Another session has the lock. Find it with pg_blocking_pids() and end it, or "
    "wait longer with lock_timeout among the options in url (?options=-c%20lock_timeout%3D5min)",
    "idle-in-transaction timeout": "This process was idle inside a transaction, which was rolled back; its next "
    "attempt or the next run repeats it",
    "unsupported startup parameter": "A pooler rejects the session's timeouts. Add options to its "
    "ignore_startup_parameters, and set lock_timeout and idle_in_transaction_session_timeout for the user in url",
    "read-only transaction": "The server may be a standby, for example after a failover; the call is retried. "
    "Set url to the primary server, and let the user write to the database",
    "invalid byte sequence": "The database has the encoding SQL_ASCII, and contains text that is not UTF-8. Convert "
    "the text, or use a bytea column for payloads",
    "password authentication failed": "Check the user and the password in url",
    "no password supplied": "Add the password to url",
    **dict.fromkeys(("too many clients", "too many connections", "slots are reserved"),
                    "Run fewer runs and tasks at once, or raise max_connections or the connection limit of the user"),
    **dict.fromkeys(("starting up", "shutting down", "recovery mode", "not yet accepting"), _RESTARTS),
    **dict.fromkeys(("terminating connection", "connection is lost", "closed the connection"), _CUT),
    "connection failed": _UNREACHED,
    "connection timeout": _UNREACHED,
}  # fmt: skip
"""Fixes by words of an error's reason; the first match applies."""

STANDBY: Final = "25006"
"""SQLSTATE of a write on a server that only allows reads."""
_PASSING_STATES: Final = (
    "08", STANDBY, "25P03", "40001", "40P01", "53300", "55P03", "57P01", "57P02", "57P03", "57P05",
)  # fmt: skip
"""SQLSTATEs, or their prefixes, of temporary errors: lost or too many connections, deadlocks, timeouts of locks and
idle sessions, and servers that start or stop, or are a standby after a failover."""
_PASSING_REFUSALS: Final = re.compile(
    "starting up|shutting down|recovery mode|not yet accepting|too many (clients|connections)|slots are reserved"
)
_LASTING_REFUSALS: Final = re.compile("FATAL|password|authentication|SSL|certificate")
"""Texts of permanent connection errors. A refused connection has no SQLSTATE: a server's errors contain FATAL, and are
permanent unless `_PASSING_REFUSALS` matches; all other texts are errors of the network, and temporary."""


_QUESTION: Final = re.compile(r" Is the server running [^?]*\?")
"""The advice of PostgreSQL's client library at the end of an unanswered attempt. `_UNREACHED` replaces it."""


def is_of_database(error: BaseException) -> bool:
    """Whether a driver or SQLAlchemy raised the error."""
    cause = _cause(error)
    of_driver = isinstance(cause, sqlite3.Error) or type(cause).__module__.startswith("psycopg")
    return of_driver or isinstance(error, SQLAlchemyError)


def sqlstate(error: BaseException) -> str | None:
    """Return PostgreSQL's code of an error, or None."""
    state: str | None = getattr(_cause(error), "sqlstate", None)
    return state


def reason(error: BaseException) -> str:
    """Return the error in one line: PostgreSQL's primary message only, because the others may quote a payload."""
    cause = _cause(error)
    text = " ".join((getattr(getattr(cause, "diag", None), "message_primary", None) or str(cause)).split())
    return _QUESTION.sub("", text)


def way_out(reason: str, ways_out: Mapping[str, str]) -> str:
    """Return the fix for an error: from `ways_out`, else from `WAYS_OUT`."""
    for words, way in {**ways_out, **WAYS_OUT}.items():
        if words in reason:
            return way
    return "Check that the database exists and that this user may write to it"


def passes(error: BaseException) -> bool:
    """Whether the error is temporary, so that a retry may succeed without a fix."""
    cause = _cause(error)
    if isinstance(cause, sqlite3.Error):  # the low byte is the kind of error
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    if state := sqlstate(cause):
        return state.startswith(_PASSING_STATES)
    if type(cause).__name__ not in ("OperationalError", "ConnectionTimeout"):
        return False
    text = str(cause)
    return bool(_PASSING_REFUSALS.search(text)) or not _LASTING_REFUSALS.search(text)


def _cause(error: BaseException) -> BaseException:
    return getattr(error, "orig", None) or error
