"""Build the documentation site from the repository's Markdown: `python docs/site/build.py` writes `.site/html`.

The pages keep their relative paths, so that links work on the site and in the repository. The table of docs/README.md
is the navigation. The pages of the Python API come from docstrings. The site loads nothing from a network.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".site"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)[^)]*\)")
API = {
    "pipelines and connectors": "pipeline_platform",
    "Dagster": "pipeline_platform.orchestration",
    "testing kit": "pipeline_platform.testing",
    "table queue": "pipeline_platform.connectors.table_queue",
    "SQS": "pipeline_platform.connectors.sqs",
    "Kafka": "pipeline_platform.connectors.kafka",
    "RabbitMQ": "pipeline_platform.connectors.rabbitmq",
    "Pub/Sub": "pipeline_platform.connectors.pubsub",
}


def copy_pages(to: Path) -> None:
    """Copy the pages, and each file that a page links to."""
    for page in PAGES:
        text = page.read_text()
        linked = [(page.parent / target).resolve() for _, target in LINK.findall(text) if "://" not in target]
        for file in [page, *(file for file in linked if file.is_file())]:
            copy = to / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def write_api(to: Path) -> dict[str, str]:
    """Write one page per public module; return the pages' paths by title."""
    written = {}
    for title, module in API.items():
        path = f"docs/reference/python/{module}.md"
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        (to / path).write_text(f"# `{module}`\n\n::: {module}\n")
        written[f"Python: {title}"] = path
    return written


def navigation(api: dict[str, str]) -> list[dict[str, Any]]:
    """Return the sections of docs/README.md as the site's navigation."""
    sections: list[dict[str, Any]] = [{"Pipeline Platform": "README.md"}, {"All pages": "docs/README.md"}]
    for name, cell in re.findall(r"^\| ([^|-]+) \| (.+) \|$", (ROOT / "docs/README.md").read_text(), re.M):
        pages = [{title: f"docs/{target}"} for title, target in LINK.findall(cell) if target.endswith(".md")]
        if "reference/options.md" in cell:
            pages += [{title: path} for title, path in api.items()]
        if pages:
            sections.append({name[0].upper() + name[1:]: pages})
    sections.append({"Benchmarks": "benchmarks/README.md"})
    sections += [{page.stem.capitalize(): page.name} for page in sorted(ROOT.glob("*.md")) if page.stem != "README"]
    return sections


def configuration(api: dict[str, str]) -> dict[str, Any]:
    """Return the configuration of the site generator."""
    python = {
        "docstring_style": "google",
        "show_source": False,
        "members_order": "source",
        "show_root_toc_entry": False,
    }
    return {
        "site_name": "Pipeline Platform",
        "docs_dir": "pages",
        "site_dir": "html",
        "use_directory_urls": False,  # the pages also open from the file system, without a web server
        "nav": navigation(api),
        "theme": {"font": False, "features": ["content.code.copy", "navigation.top", "search.highlight"]},
        "markdown_extensions": ["admonition", "tables", "pymdownx.highlight", "pymdownx.superfences", "toc"],
        "plugins": [
            {"search": {}},
            {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)], "options": python}}}},
        ],
    }


def main() -> int:
    """Build the site; fail on a warning, such as a broken link."""
    shutil.rmtree(SITE, ignore_errors=True)
    pages = SITE / "pages"
    copy_pages(pages)
    config = configuration(write_api(pages))
    (SITE / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(  # noqa: S603
        command, cwd=SITE, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        return done.returncode
    sys.stdout.write(f"The site is in {(SITE / 'html' / 'index.html').relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
