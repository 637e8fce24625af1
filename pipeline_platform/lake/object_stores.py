"""Options by which delta-rs, which commits, and PyArrow, which reads and writes files, connect to the same store."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import pyarrow.fs as pafs

S3 = ("s3", "s3a")
AZURE = ("abfs", "abfss", "az")
STORES = (*S3, "gs", *AZURE)
"""Schemes of the URLs of object stores."""

AWAY = re.compile(
    r"AWS Error (?:NETWORK_CONNECTION|REQUEST_TIMEOUT|SERVICE_UNAVAILABLE|SLOW_DOWN|INTERNAL_FAILURE).*|"
    r"Azure Error: .*(?:connection|connect to server|timed out|timeout).*|"
    r"Generic \w+ error(?=[\s\S]*(?:error sending request|after \d+ retries))"
)
"""Errors of PyArrow and delta-rs about a store that does not answer, after their own retries, also within the
traceback of a task."""

_S3_NAMES = {
    "aws_region": ("aws_region", "region", "aws_default_region", "default_region"),
    "aws_endpoint_url": ("aws_endpoint_url_s3", "aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint"),
    "aws_access_key_id": ("aws_access_key_id", "access_key_id"),
    "aws_secret_access_key": ("aws_secret_access_key", "secret_access_key"),
    "aws_session_token": ("aws_session_token", "aws_token", "session_token", "token"),
    "aws_skip_signature": ("aws_skip_signature", "skip_signature"),
    "aws_virtual_hosted_style_request": ("aws_virtual_hosted_style_request", "virtual_hosted_style_request"),
}
"""Options that PyArrow needs, too, by delta-rs's preferred name: all names that delta-rs accepts, by precedence."""
_S3_CREDENTIALS = {
    "aws_access_key_id": "access_key",
    "aws_secret_access_key": "secret_key",
    "aws_session_token": "session_token",
}
"""PyArrow's names of the credentials, which both clients also find in the environment, a profile or a role."""
_AZURE_NAMES = {
    "azure_storage_account_name": ("azure_storage_account_name", "account_name"),
    "azure_storage_account_key": (
        *("azure_storage_account_key", "azure_storage_access_key", "azure_storage_master_key"),
        *("account_key", "access_key", "master_key"),
    ),
    "azure_storage_sas_key": ("azure_storage_sas_key", "azure_storage_sas_token", "sas_key", "sas_token"),
    "azure_storage_client_id": ("azure_storage_client_id", "azure_client_id", "client_id"),
    "azure_storage_client_secret": ("azure_storage_client_secret", "azure_client_secret", "client_secret"),
    "azure_storage_tenant_id": (
        *("azure_storage_tenant_id", "azure_storage_authority_id", "azure_tenant_id", "azure_authority_id"),
        *("tenant_id", "authority_id"),
    ),
    "azure_storage_endpoint": ("azure_storage_endpoint", "azure_endpoint", "endpoint"),
}
"""The same for Azure. Without credentials, both clients use the environment, a managed identity or the Azure CLI."""
_AZURE_LOGIN = {"azure_storage_account_key": "account_key", "azure_storage_sas_key": "sas_token"}
_AZURE_IDENTITY = {
    "azure_storage_client_id": "client_id",
    "azure_storage_client_secret": "client_secret",
    "azure_storage_tenant_id": "tenant_id",
}
"""PyArrow's names of an identity, which both clients also find in the environment, with its secret or token."""
_ATTEMPTS = 13
"""Number of PyArrow's attempts at S3, with pauses that double up to 20 s: about two minutes in all."""


def options_of(root: str, given: Mapping[str, str]) -> dict[str, str] | None:
    """Return the options of a store's clients: the given ones, else variables of the environment; None without any."""
    scheme = urlsplit(root).scheme
    if scheme in S3:
        found = _named(given, "AWS_", _S3_NAMES, found_by_clients=_S3_CREDENTIALS)
        insecure = {"aws_allow_http": "true"} if found.get("aws_endpoint_url", "").startswith("http://") else {}
        return insecure | found
    if scheme in AZURE:
        found = _named(given, "AZURE_", _AZURE_NAMES, found_by_clients=_AZURE_IDENTITY)
        insecure = {"allow_http": "true"} if found.get("azure_storage_endpoint", "").startswith("http://") else {}
        account = {"azure_storage_account_name": named} if (named := _azure_account(root)) else {}
        return insecure | found | account
    return None


def filesystem(root: str, options: Mapping[str, str]) -> pafs.FileSystem:
    """Return PyArrow's client of a store, whose paths start with the bucket or container."""
    scheme = urlsplit(root).scheme
    if scheme in S3:
        return _s3(options)
    return _azure(options) if scheme in AZURE else pafs.FileSystem.from_uri(root)[0]


def path_of(uri: str) -> str:
    """Return a path for the store's file system: `bucket/path`, also of `abfss://container@account.host/path`."""
    bucket, slash, path = uri.partition("://")[2].partition("/")
    return bucket.partition("@")[0] + slash + path


def _s3(given: Mapping[str, str]) -> pafs.FileSystem:
    options: dict[str, Any] = {ours: given[name] for name, ours in _S3_CREDENTIALS.items() if name in given}
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


def _azure(given: Mapping[str, str]) -> pafs.FileSystem:
    account = given["azure_storage_account_name"]
    login = _AZURE_LOGIN | (_AZURE_IDENTITY if "azure_storage_client_secret" in given else {})
    options = {ours: given[name] for name, ours in login.items() if name in given}
    endpoint = urlsplit(given.get("azure_storage_endpoint", ""))
    if endpoint.netloc:
        # PyArrow puts the account before an authority that starts with a dot, and into the path of any other.
        authority = endpoint.netloc.removeprefix(account)
        options |= {f"{service}_storage_authority": authority for service in ("blob", "dfs")}
        options |= {f"{service}_storage_scheme": endpoint.scheme for service in ("blob", "dfs")}
    return pafs.AzureFileSystem(account, **options)


def _azure_account(root: str) -> str | None:
    """Return the account of `abfss://container@account.dfs.core.windows.net/path`."""
    return urlsplit(root).netloc.partition("@")[2].partition(".")[0] or None


def _named(
    given: Mapping[str, str],
    prefix: str,
    names: Mapping[str, tuple[str, ...]],
    found_by_clients: Iterable[str] = (),
) -> dict[str, str]:
    """Return options by their preferred names; options that clients find in the environment are not read from it."""
    given = {key.lower(): value for key, value in given.items()}
    around = {key.lower(): value for key, value in os.environ.items() if key.startswith(prefix)}
    named = {}
    for name, known in names.items():
        value = _first(given, known) or (None if name in found_by_clients else _first(around, known))
        given = {key: text for key, text in given.items() if key not in known}
        if value is not None:
            named[name] = value
    return {**named, **given}


def _first(given: Mapping[str, str], names: Iterable[str]) -> str | None:
    return next((given[name] for name in names if name in given), None)


def _is_on(switch: str | None) -> bool:
    return (switch or "").lower() in ("true", "1", "yes", "on", "y")
