"""Roots of a lake, and the options of its clients for an object store."""

import errno
import os
import socket
import threading
from unittest import mock

import polars as pl
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from deltalake import write_deltalake

from pipeline_platform.lake import storage
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import CommitConflictError, Table
from servers import sqs

HOW = {"allow_delayed_open": True, "retry_strategy": pafs.AwsStandardS3RetryStrategy(max_attempts=13)}


@pytest.mark.parametrize(
    ("root", "options", "said"),
    [
        ("az://box/lake", {"azure_storage_account_key": "hidden"}, "does not contain the storage account"),
        ("file:///tmp/lake", {}, "must be a folder, .* got file://"),
        (
            "gs://box",
            {"google_service_account": "hidden"},
            "must be empty for gs://, got google_service_account.*GOOGLE_APPLICATION_CRED",
        ),
    ],
)
def test_a_store_that_not_all_clients_reach_alike_is_refused(root, options, said):
    with pytest.raises(ValueError, match=said) as refused:
        Lake(root=root, storage_options=options)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"AWS_REGION": "eu-west-1"}, {"region": "eu-west-1"}),
        ({"default_region": "eu-west-1", "skip_signature": "true"}, {"region": "eu-west-1", "anonymous": True}),
        (
            {"region": "r", "access_key_id": "a", "secret_access_key": "s", "token": "t"},
            {"region": "r", "access_key": "a", "secret_key": "s", "session_token": "t"},
        ),
        (
            {"region": "r", "endpoint": "http://127.0.0.1:9", "virtual_hosted_style_request": "TRUE"},
            {"region": "r", "endpoint_override": "127.0.0.1:9", "scheme": "http", "force_virtual_addressing": True},
        ),
    ],
)
def test_options_of_s3_reach_files_by_every_name_that_commits_take_them_by(options, expected):
    lake = Lake(root="s3://box/lake", storage_options=options)
    assert lake._filesystem.equals(pafs.S3FileSystem(**expected, **HOW))


def test_options_are_stronger_than_the_environment(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    lake = Lake(root="s3://box/lake", storage_options={"default_region": "us-east-2"})
    assert lake.options == {"aws_region": "us-east-2"}
    assert lake._filesystem.region == "us-east-2"


@pytest.mark.parametrize(("region", "endpoint"), [("REGION", "ENDPOINT_URL"), ("DEFAULT_REGION", "ENDPOINT_URL_S3")])
def test_variables_of_aws_reach_files_and_commits_alike(s3, monkeypatch, region, endpoint):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    renamed = {"AWS_REGION": f"AWS_{region}", "AWS_ENDPOINT_URL": f"AWS_{endpoint}"}
    for name, value in s3.items():
        monkeypatch.setenv(renamed.get(name, name), value)
    lake = Lake(root=f"s3://lake/{endpoint}")

    lake.write("alike/file", b"file")
    write_deltalake(lake.uri("alike/table"), pa.table({"n": [1]}), storage_options=lake.patient_options)

    assert lake.read("alike/file") == b"file"
    assert {"_delta_log"} < set(lake.names("alike/table"))
    assert (lake.names("alike"), lake.folders("alike")) == (["file", "table"], ["table"])
    assert pl.read_delta(lake.uri("alike/table"), storage_options=lake.options).height == 1


def test_of_two_commits_of_one_version_the_second_is_refused(s3):
    table = Table(Lake(root="s3://lake/twice", storage_options=s3), "p", "t", pa.schema({"window": pa.string()}))
    table.ensure()
    with table.look() as handle, table.look() as other:
        table.swap(handle, "one", [])
        with pytest.raises(CommitConflictError):
            table.swap(other, "other", [])


@pytest.mark.parametrize("call", [Table.exists, Table.version, lambda table: table.lake.remove(table.path(""))])
def test_other_threads_run_while_a_store_does_not_answer_and_then_it_is_an_error(monkeypatch, call):
    """Other threads renew leases, and keep connections to a broker."""
    monkeypatch.setattr(storage, "AWAY_S", 2)
    monkeypatch.setattr(storage, "_BRIEF", {"max_retries": "0", "timeout": "1s"})
    errors = []

    def ask(table):
        try:
            call(table)
        except OSError as error:
            errors.append(error)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = {**sqs.ENVIRONMENT, "aws_region": sqs.REGION, "max_retries": "0", "timeout": "3s"}
        options["aws_endpoint_url"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        table = Table(Lake(root="s3://lake", storage_options=options), "p", "t", pa.schema([("a", pa.int64())]))
        asking = threading.Thread(target=ask, args=[table])
        asking.start()
        asking.join(0.1)
        assert asking.is_alive(), "this thread goes on before it has its answer"
        asking.join(20)
    assert len(errors) == 1


def test_a_folder_is_removed_into_which_another_process_still_writes(tmp_path):
    lake, delete = Lake(root=str(tmp_path)), pafs.LocalFileSystem().delete_dir
    lake.write("_receives/r1/steps.json", b"{}")

    def written_meanwhile(folder: str) -> None:
        calls.append(folder)
        if len(calls) == 1:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        delete(folder)

    calls: list[str] = []
    filesystem = mock.Mock(wraps=pafs.LocalFileSystem(), delete_dir=written_meanwhile)
    lake.__dict__["_filesystem"] = filesystem
    lake.remove("_receives/r1")
    assert (lake.names("_receives"), len(calls)) == ([], 2)
