"""What went wrong with a database: in one sentence, with a way out, and whether it passes by itself."""

import re
import sqlite3
from collections.abc import Mapping
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

_RESTARTS: Final = "The server stops or starts: it is asked again"
_CUT: Final = (
    "The server, an administrator or the network ended the session; what it was doing is undone, and the next try or "
    "the next run does it"
)
_UNREACHED: Final = "Give the correct host and port in url, and see that the server runs"
WAYS_OUT: Final = {
    "disk is full": "Make room where it lies.",
    "database is locked": "For {busy} s another process holds {file}: wait for it, or end it (`fuser {file}` names it)",
    "lock timeout": "Another session holds what this one waits for: find it with pg_blocking_pids() and end it, or "
    "wait longer with lock_timeout among the options in url (?options=-c%20lock_timeout%3D5min)",
    "idle-in-transaction timeout": "This process stood still inside a transaction, which is undone: its next try or "
    "the next run does the work",
    "unsupported startup parameter": "A pooler does not pass on the session's time-outs: name options among its "
    "ignore_startup_parameters, and set lock_timeout and idle_in_transaction_session_timeout for the user of url",
    "invalid byte sequence": "The database has the encoding SQL_ASCII, and a text that is not UTF-8: convert its "
    "texts, or use a column of bytea for payloads",
    "password authentication failed": "Give the correct user and password in url",
    "no password supplied": "Put the password into url",
    **dict.fromkeys(("too many clients", "too many connections", "slots are reserved"),
                    "Let fewer runs and tasks at it at once, or raise its max_connections or the limit of the user"),
    **dict.fromkeys(("starting up", "shutting down", "recovery mode", "not yet accepting"), _RESTARTS),
    **dict.fromkeys(("terminating connection", "connection is lost", "closed the connection"), _CUT),
    "connection failed": _UNREACHED,
    "connection timeout": _UNREACHED,
}  # fmt: skip
"""What to do about an error, by words of its reason: the first that fit."""

_PASSING_STATES: Final = ("08", "40001", "40P01", "25P03", "53300", "55P03", "57P01", "57P02", "57P03", "57P05")
"""SQLSTATEs, or how they begin, of lost connections and too many of them, deadlocks, time-outs of locks and of sessions
that stood still, and servers that stop or start."""
_PASSING_REFUSALS: Final = re.compile(
    "starting up|shutting down|recovery mode|not yet accepting|too many (clients|connections)|slots are reserved"
)
_LASTING_REFUSALS: Final = re.compile("FATAL|password|authentication|SSL|certificate")
"""What a connection is refused with. There is no SQLSTATE then: of a server's own words (FATAL), those that pass are
known; all others are the network's."""


def is_of_database(error: BaseException) -> bool:
    """Whether a driver or SQLAlchemy raised it."""
    cause = _cause(error)
    of_driver = isinstance(cause, sqlite3.Error) or type(cause).__module__.startswith("psycopg")
    return of_driver or isinstance(error, SQLAlchemyError)


def sqlstate(error: BaseException) -> str | None:
    """PostgreSQL's code of an error; None where it gave none."""
    state: str | None = getattr(_cause(error), "sqlstate", None)
    return state


def reason(error: BaseException) -> str:
    """Say it in one line: PostgreSQL's main sentence alone, for the others may quote a row, and with it a payload."""
    cause = _cause(error)
    return " ".join((getattr(getattr(cause, "diag", None), "message_primary", None) or str(cause)).split())


def way_out(reason: str, ways_out: Mapping[str, str]) -> str:
    """Say what to do about an error: by `ways_out`, else by this module's own."""
    for words, way in {**ways_out, **WAYS_OUT}.items():
        if words in reason:
            return way
    return "Is the database there, and may this user write to it?"


def passes(error: BaseException) -> bool:
    """Whether the same may succeed a little later, and nobody has to do anything for it."""
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
