"""Make pictures of docs/run: `python docs/site/pictures [MINUTES [FOLDER]]`.

Runs the deployment of `definitions.py` with Dagster's daemon and a trickle of messages, by default for three minutes,
and writes `docs/dashboard.png` with Chromium, the text of the page with 80 columns, and pictures of Dagster's pages
(`pages.py`). With 0 minutes, it writes only the pictures of Dagster's pages, into FOLDER if it is given. It uses no
network.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import dagster as dg
import pages
import psutil

from pipeline_platform.connectors.table_queue import TableQueue

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1]
PAGE = DOCS / "run" / "dashboard.md"
MESSAGES_PER_S = {"orders": 3, "payments": 1, "shipments": 0.05}
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1340,700")


def main(minutes: float, folder: Path = DOCS) -> None:
    """Make the pictures."""
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        environment = {**os.environ, "PICTURES_HOME": str(home), "DAGSTER_HOME": str(home / "dagster")}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        (home / "dagster").mkdir()
        shutil.copy(DOCS.parent / "dagster.yaml", home / "dagster")
        shutil.copy(HERE / "definitions.py", home)
        (home / "workspace.yaml").write_text("load_from: [{python_module: definitions}]\n")
        queues = {}
        for name in MESSAGES_PER_S:
            url = f"sqlite:///{home}/{name}.sqlite"
            queues[name] = TableQueue(name=f"{name}_queue", url=url, created_column="created_at")
            queues[name].create()

        def command(*arguments: str) -> str:
            tool = ["pipeline-platform", *arguments]
            return subprocess.run(tool, cwd=home, env=environment, check=True, capture_output=True, text=True).stdout

        if not minutes:
            dg.DagsterInstance.from_config(str(home / "dagster")).dispose()  # creates its storage
            pages.take(home, environment, folder)
            return
        command("pause", "shipments", "--reason", "stocktaking until noon")
        with (home / "daemon.log").open("w") as log:
            daemon = subprocess.Popen(
                ["dagster-daemon", "run"], cwd=home, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            send(queues, 5)
            while queues["orders"].backlog().messages or queues["payments"].backlog().messages:
                time.sleep(1)  # until the first runs have started, so that few messages wait for them
            send(queues, minutes * 60)
            page = home / "dashboard.html"
            command("dashboard", "--html", str(page))
            shown = "\n".join(line.rstrip() for line in command("dashboard", "orders", "--once").splitlines()).strip()
            text = re.sub(r"```text\n.*?```", lambda _: f"```text\n{shown}\n```", PAGE.read_text(), count=1, flags=re.S)
            PAGE.write_text(text)
            subprocess.run([*CHROMIUM, f"--screenshot={DOCS / 'dashboard.png'}", page.as_uri()], check=True)
            pages.take(home, environment, folder)
        finally:
            stop(daemon, home)


def stop(daemon: subprocess.Popen[bytes], home: Path) -> None:
    """End the daemon, its code server and the runs."""
    daemon.send_signal(signal.SIGINT)
    every = psutil.process_iter(["environ"])  # None for processes of other users
    mine = [each for each in every if (each.info["environ"] or {}).get("PICTURES_HOME") == str(home)]
    for process in mine:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(mine, 30)[1]:
        process.kill()


def send(queues: dict[str, TableQueue], seconds: float) -> None:
    """Send messages for some time."""
    until, number, owed = time.monotonic() + seconds, 0, dict.fromkeys(queues, 0.0)
    while time.monotonic() < until:
        for name, queue in queues.items():
            owed[name] += MESSAGES_PER_S[name] * random.uniform(0, 2)
            payloads = []
            for _ in range(int(owed[name])):
                number += 1
                total = round(random.uniform(-20, 1_000), 2)
                payloads.append(json.dumps({"number": number, "total": total}).encode())
            owed[name] -= len(payloads)
            queue.send(payloads)
        time.sleep(1)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 3, *map(Path, sys.argv[2:]))
