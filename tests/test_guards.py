"""The table of guards names lines of the product and tests that exist."""

import pytest

from tests.guards import HOME, Guard, guards


@pytest.mark.parametrize("guard", [*guards()], ids=lambda guard: f"{guard.file}: {guard.text}")
def test_a_guard_can_be_removed_and_has_tests(guard: Guard):
    compile(guard.without((HOME / guard.file).read_text()), guard.file, "exec")
    assert [test for test in guard.tests if not (HOME / test).exists()] == []
