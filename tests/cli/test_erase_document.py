"""The recipe in docs/run/erase.md, run as it is shown."""

import json
import re
import shlex
from typing import Any

from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, Producer, TableBatcher
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from tests.fixtures.documents import DOCS
from tests.fixtures.failures import event, record
from tests.fixtures.small_lake import WINDOW, Memory, Run

RECIPE = (DOCS / "run" / "erase.md").read_text().partition("## Choose messages")[0]


class Order(BaseModel):
    email: str
    number: int


class Orders(Pipeline):
    """Stores orders; without a number they fail."""

    name = "orders"
    producer = Producer(source="memory")
    batchers = {"lake": TableBatcher(schema=Order)}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put(message.json(Order), batcher="lake")


def order(email: str, **more: Any) -> bytes:
    return json.dumps({"email": email, **more}).encode()


def test_the_recipe_prints_what_the_page_shows(beside, tmp_path):
    anna, ben = "anna@example.com", "ben@example.com"
    tables = Tables(Lake(root=str(tmp_path / "lake")), Orders)
    deliveries = [("1", order(anna, number=1)), ("2", order(ben, number=2)), ("3", order(anna))]
    Run(tables, Memory(deliveries_=tuple(deliveries)), "r1").finish()
    Run(tables, Memory(deliveries_=(("4", order(anna, number=4)),)), "r2", windows=("2026-01-01T0100",)).finish()
    record(tables.lake, "r3", event("3", 2, data=order(anna)), pipeline="orders", window=WINDOW)
    call = beside(Orders, memory=Memory())
    shown = re.findall(r"^ +\$ pipeline-platform (.*)\n((?: +[^ `$].*\n)+)", RECIPE, re.M)

    assert len(shown) == 3
    for command, output in shown:
        answer = call(*shlex.split(command))
        assert answer.exit_code == 0, answer.output
        assert answer.stdout.splitlines() == [line.strip() for line in output.splitlines()]
