"""Roots whose names are quoted in URLs: all clients find the same files, in a folder and in an object store."""

import os
from contextlib import closing
from pathlib import Path

import polars as pl
import pyarrow.fs as pafs
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pipeline_platform.cli.lake.deliveries import deliveries_of
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.maintenance.maintenance import maintain
from pipeline_platform.lake.maintenance.repair import repair, unreadable
from pipeline_platform.lake.reader import scan
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Retention
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import no_spark
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Run, numbered, visible

NAMES = ["a=b", "e\N{COMBINING DIAERESIS}", "湖 & 'l\"ac' <1>, b=c+d: $e; f@g!(h)`~ Zoë"]


def texts(lake: Lake) -> list[str]:
    """Return the text of each row, the same for every reader."""
    options, uri = lake.patient_options, lake.uri("keeping", "kept")
    found = [
        pl.read_delta(uri, use_pyarrow=True, storage_options=options),
        scan(lake, DeltaTable(uri, storage_options=options)).collect(),
        scan(lake, DeltaTable(uri, storage_options=options)).filter(pl.col("window") == WINDOW).collect(),
        pl.from_dicts(visible(Tables(lake, Keeping), "kept"), schema=["text"]),
    ]
    (same,) = {tuple(sorted(frame["text"])) for frame in found}
    return list(same)


def go_all_the_way(lake: Lake, folder: Path) -> None:
    """Receive, handle, publish, compact, vacuum, trace and repair."""
    tables = Tables(lake, Keeping)
    Run(tables, Memory(deliveries_=numbered(b"one", b"fail", b"two")), "r1").finish()
    Run(tables, Memory(deliveries_=(("m9", b"three"),)), "r2").finish()
    assert texts(lake) == ["one", "three", "two"]

    lake.write("keeping/kept/window=x/left-over.parquet", b"of a task that was killed")
    assert maintain(tables, Retention())["kept"]["compacted"] == 2
    removed = tables["kept"].open().vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert len(removed) == 3, "two files that are part of a larger one, and the one that no commit names"
    assert texts(lake) == ["one", "three", "two"]

    with closing(ControlStore(f"sqlite:///{folder}/control.sqlite")) as control:
        flow = Flow(BoundProducer(Keeping), Memory(), lake, control, no_spark)
        (delivery,) = deliveries_of(flow, "m1")
        assert [event["reason"] for event in delivery.failures] == ["fail"]
        assert [row["text"] for (delivery,) in [deliveries_of(flow, "m9")] for row in delivery.rows] == ["three"]

    (file,) = tables["kept"].files(tables["kept"].open())
    lake.write(tables["kept"].path(file.path), b"cut")
    assert unreadable(tables) == [file]
    assert repair(tables) == 0
    assert scan(lake, tables["kept"].open()).collect().is_empty()


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_may_have_any_of_these_names(tmp_path, name):
    go_all_the_way(Lake(root=str(tmp_path / name / "lake")), tmp_path)
    assert os.listdir(tmp_path / name) == ["lake"]
    assert sorted(os.listdir(tmp_path)) == sorted([name, "control.sqlite"])


@pytest.mark.parametrize("name", NAMES[::2])
def test_a_prefix_may_have_any_of_these_names(tmp_path, s3, name):
    lake = Lake(root=f"s3://lake/names/{name}", storage_options=s3)
    go_all_the_way(lake, tmp_path)
    under = pafs.FileSelector("lake/names", recursive=False)
    assert name in [info.base_name for info in lake._filesystem.get_file_info(under)]
    lake.remove("keeping/_receives")
    assert lake.names("keeping/_receives") == []


@pytest.mark.parametrize("place", ["/data", "s3://lake", "gs://lake"])
def test_names_that_a_client_misreads_are_refused(place):
    for character in [*"%#?*[]{}|^\\", "\n", "\x7f"]:
        with pytest.raises(ValueError, match=r"root must not contain .* Choose a name without"):
            Lake(root=f"{place}/a{character}b/lake")


def test_the_folder_that_a_link_leads_to_is_judged(tmp_path):
    (tmp_path / "a%20b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a%20b")
    with pytest.raises(ValueError, match="'%'"):
        Lake(root=str(tmp_path / "link"))


def test_delta_rs_still_misreads_a_per_cent_sign(tmp_path):
    """Once delta-rs reads this table, the check can be removed."""
    (tmp_path / "a%20b").mkdir()
    lake = Lake.model_construct(root=str(tmp_path / "a%20b"), storage_options={})
    with pytest.raises(DeltaError, match=r"File not found: .*/a b/"):
        Tables(lake, Keeping).ensure()
