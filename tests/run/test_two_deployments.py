"""Two deployments with separate control stores on one lake: neither fences receives of the other."""

from dataclasses import replace

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.run import finish as finishing
from pipeline_platform.run import steps
from tests.fixtures.flow import begun, finish, rows, run, worked
from tests.fixtures.flow_pipelines import Obedient


@pytest.fixture
def here(filled):
    return filled(Obedient, [b"one", b"two"])


@pytest.fixture
def there(here, tmp_path):
    """The same lake, with another queue and control store."""
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/other-queue.sqlite")
    queue.create()
    queue.enqueue([b"three"])
    return replace(here, source=queue, control=ControlStore(f"sqlite:///{tmp_path}/other-control.sqlite"))


def test_a_receive_of_another_deployment_is_left_to_it_and_named(here, there):
    mine, log = worked(here), []

    receive = begun(there, log=log.append)

    (said,) = log
    assert f"receive {mine.receive_id}" in said
    assert "it belongs to another deployment" in said
    assert "(control store sqlite:///" in said
    assert "run `pipeline-platform receives obedient --take-over`" in said
    steps.receive_messages(there, receive)
    steps.handle_messages(there, receive)
    steps.batch_messages(there, receive)
    assert (finish(here, mine).acknowledged, finish(there, receive).acknowledged) == (2, 1)
    assert rows(here, "outcomes").height == 3


def test_what_another_deployment_decided_is_published_here_and_acknowledged_there(here, there):
    mine = worked(here)
    steps.decide(here, mine)

    run(there)

    assert rows(here, "messages").height == 3
    assert steps.acknowledge(here, mine).acknowledged == 2


def test_after_a_lost_control_store_its_receives_are_taken_over_and_end(here, tmp_path):
    decided = worked(here)
    steps.decide(here, decided)
    here.source.enqueue([b"three"])
    undecided = worked(here)
    new = replace(here, control=ControlStore(f"sqlite:///{tmp_path}/new-control.sqlite"))
    run(new)
    assert set(new.ledger.unfinished()) == {decided.receive_id, undecided.receive_id}

    assert finishing.adopt(new) == 2
    run(new)

    assert new.ledger.unfinished() == []
    assert sorted(rows(new, "outcomes")["outcome"]) == ["handled"] * 3
    assert here.source.backlog().messages == 0
    assert finishing.adopt(new) == 0
