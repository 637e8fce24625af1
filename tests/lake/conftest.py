"""Fixtures: a new lake, and the tables of a small pipeline in it."""

import pytest

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from tests.fixtures.small_lake import Keeping


@pytest.fixture
def tables(lake: Lake) -> Tables:
    return Tables(lake, Keeping)
