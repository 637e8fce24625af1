"""The pictures of the documents, made again by their script."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults
ROOT = Path(__file__).parents[2]


def test_the_script_makes_each_picture_of_dagsters_pages(tmp_path):
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("no chromium with its chromedriver")
    script = [sys.executable, ROOT / "docs" / "site" / "pictures", "0", tmp_path]

    made = subprocess.run(script, capture_output=True, text=True, check=False)

    assert made.returncode == 0, made.stderr[-4_000:]
    pictures = {file.name: file for file in tmp_path.iterdir()}
    assert pictures.keys() == {"history.png", "limits.png", "retry.png", "failed.png", "red-run.png"}
    for name, picture in pictures.items():
        width, height = struct.unpack(">II", picture.read_bytes()[16:24])
        assert (width, height) >= (1_440, 700), name
        assert picture.stat().st_size > 30_000, f"{name}: an empty page is smaller"
        assert (ROOT / "docs" / name).exists()
