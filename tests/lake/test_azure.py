"""A lake in Azure Blob Storage, on a real Azurite."""

import pickle
import subprocess
import sys
from uuid import uuid4

import polars as pl
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import CommitConflictError, Table
from pipeline_platform.run.outages import OutageError, naming_outages
from pipeline_platform.spark import environment
from tests.lake.test_root_names import go_all_the_way

ROOTS = ["abfss://lake@local.dfs.core.windows.net", "az://lake"]


@pytest.mark.parametrize("root", ROOTS)
def test_options_and_variables_reach_files_and_commits_alike(azure_lake, root, monkeypatch):
    for name, value in azure_lake.items():
        monkeypatch.setenv(name.upper(), value)
    folder = f"alike-{uuid4().hex[:8]}"
    by_variables, by_options = Lake(root=root), Lake(root=root, storage_options=azure_lake)

    by_variables.write(f"{folder}/file", b"file")
    write_deltalake(
        by_variables.uri(f"{folder}/table"), pa.table({"n": [1]}), storage_options=by_variables.patient_options
    )

    assert by_options.read(f"{folder}/file") == b"file"
    assert {"_delta_log"} < set(by_options.names(f"{folder}/table"))
    assert by_options.folders(folder) == ["table"]
    assert pl.read_delta(by_options.uri(f"{folder}/table"), storage_options=by_options.options).height == 1
    by_options.remove(f"{folder}/table", "_delta_log/00000000000000000000.json")
    assert by_options.files(folder) == ["file"]


def test_a_worker_has_the_variables_of_the_lake(azure_lake, monkeypatch):
    for name, value in azure_lake.items():
        monkeypatch.setenv(name.upper(), value)
    lake = Lake(root=f"az://lake/variables-{uuid4().hex[:8]}")
    lake.write("file", b"file")
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).read('file').decode())"
    of_worker = [sys.executable, "-I", environment.__file__, sys.executable, "-c", code, pickle.dumps(lake).hex()]

    worker = subprocess.run(of_worker, capture_output=True, text=True, check=False)

    assert worker.stdout == "file\n", worker.stderr


def test_of_two_commits_of_one_version_the_second_is_refused(azure_lake):
    lake = Lake(root="az://lake/twice", storage_options=azure_lake)
    table = Table(lake, "p", "t", pa.schema({"window": pa.string()}))
    table.ensure()
    with table.look() as handle, table.look() as other:
        table.swap(handle, "one", [])
        with pytest.raises(CommitConflictError):
            table.swap(other, "other", [])


@pytest.mark.parametrize(
    ("root", "given"),
    [
        ("az://lake/here", {}),
        ("az://user:hidden@lake/here", {"account_name": "a"}),
        ("abfss://lake@account.dfs.core.windows.net:hidden/here", {}),
    ],
)
def test_a_root_without_account_or_with_credentials_is_refused(root, given):
    with pytest.raises(ValueError, match=r"storage account|credentials in the environment") as refused:
        Lake(root=root, storage_options=given)
    assert "hidden" not in str(refused.value)


def test_a_pipeline_keeps_its_tables_there(azure_lake, tmp_path):
    go_all_the_way(Lake(root="abfss://lake@local.dfs.core.windows.net/run", storage_options=azure_lake), tmp_path)


def test_a_store_that_does_not_answer_is_named_in_one_sentence(azure_lake):
    lake = Lake(root="az://lake/away", storage_options=azure_lake)
    error = (
        "GetProperties failed. Azure Error: [] Fail to get a new connection for: http://127.0.0.1:1. Could not connect"
    )
    with pytest.raises(OutageError, match=r"^the lake az://lake/away did not answer"), naming_outages(lake, "warm"):
        raise OSError(error)
