"""Where a lake may lie, and what both of its clients are told of an object store."""

import pyarrow.fs as pafs
import pytest

from pipeline_platform.lake.storage import Lake


@pytest.mark.parametrize(
    ("root", "options", "said"),
    [
        ("abfss://box@account.dfs.core.windows.net/lake", {}, "root begins with abfss://: .* a folder .* or gs://"),
        ("az://box/lake", {"azure_storage_account_key": "hidden"}, "root begins with az://"),
        ("file:///tmp/lake", {}, "give its path"),
        ("gs://box", {"google_service_account": "hidden"}, "sets google_service_account, .*GOOGLE_APPLICATION_CRED"),
    ],
)
def test_a_store_that_both_clients_do_not_reach_alike_is_refused(root, options, said):
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
    assert Lake(root="s3://box/lake", storage_options=options)._filesystem.equals(pafs.S3FileSystem(**expected))
