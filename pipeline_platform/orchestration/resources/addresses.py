"""Validation of addresses in resources: Dagster shows them, so they must not contain credentials."""

from typing import Annotated

from pydantic import AfterValidator, ConfigDict

from pipeline_platform.model.safe_text import address, secrets_in

QUIET = ConfigDict(hide_input_in_errors=True)
"""Config of every resource: an invalid value may be a secret, and Dagster stores errors in its event log."""


def _remote(remote: str) -> str:
    if remote in ("", "warm"):
        return remote
    if not remote.startswith("sc://"):
        raise ValueError(
            "must be empty (Spark in the run's own process), `warm`, or the address of a Spark Connect server, "
            "`sc://host:port`"
        )
    server, _, parameters = remote.partition(";")
    if "@" in server or any(secrets_in(f"{server}?{parameters.replace(';', '&')}")):
        raise ValueError("must not contain a user, password or token: the UI shows it. Set token=dg.EnvVar(...)")
    return remote


def _ui(ui: str) -> str:
    if ui and (not ui.startswith(("http://", "https://")) or address(ui) != ui):
        raise ValueError("must be http://host:port or https://host:port, without user, password or query")
    return ui


Remote = Annotated[str, AfterValidator(_remote)]
Ui = Annotated[str, AfterValidator(_ui)]
