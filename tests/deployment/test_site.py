"""The navigation of the documentation site, which docs/README.md defines."""

import importlib.util
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs/site/build.py")
assert spec is not None
assert spec.loader is not None
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


def test_each_page_has_one_place_in_the_navigation(tmp_path):
    api = build.write_api(tmp_path)
    entries = [entry for section in build.navigation(api) for entry in section.values()]
    places = Counter(
        path
        for entry in entries
        for path in ([entry] if isinstance(entry, str) else [p for page in entry for p in page.values()])
    )

    assert places == Counter([*(str(page.relative_to(ROOT)) for page in build.PAGES), *api.values()])
