"""Names of the previous release: they work, and warn of the new name."""

import sys
import types
from abc import ABC, abstractmethod

import pytest
from pydantic import BaseModel

from pipeline_platform.model.deprecated import _log_once, rename_members, rename_options, renamed_names

pytestmark = pytest.mark.filterwarnings("error::DeprecationWarning")


class Base:
    """The options of a pipeline."""

    retry_schedule: str | None = None
    max_failed_share: float | None = None

    def __init_subclass__(cls) -> None:
        rename_options(cls, Base)


@pytest.mark.parametrize(("old", "new"), [("never", None), ("any", 0.0), (0.25, 0.25), (1, 1), ("always", "always")])
def test_the_share_of_failures_is_converted(old, new):
    with pytest.warns(DeprecationWarning, match=r"Strict\.fail_run_on is deprecated.* Use max_failed_share = "):

        class Strict(Base):
            fail_run_on = old

    assert Strict.max_failed_share == new
    assert not hasattr(Strict, "fail_run_on")


def test_the_warning_names_the_file_of_the_class_and_is_logged_once(caplog):
    _log_once.cache_clear()
    with pytest.warns(DeprecationWarning, match="is deprecated") as warned:

        class Nightly(Base):
            redrive = "0 3 * * *"

    assert Nightly.retry_schedule == "0 3 * * *"
    assert [warning.filename for warning in warned] == [__file__]
    assert len(caplog.messages) == 1


def test_subclasses_inherit_and_override_an_option_that_has_the_old_name():
    with pytest.warns(DeprecationWarning, match="is deprecated"):

        class Nightly(Base):
            redrive = "0 3 * * *"

    class Inherits(Nightly):
        pass

    class Never(Nightly):
        retry_schedule = None

    assert (Inherits.retry_schedule, Never.retry_schedule) == ("0 3 * * *", None)


def test_a_mixin_keeps_its_option_for_its_other_classes():
    class Mixin:
        redrive = "0 3 * * *"

    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="is deprecated"):

            class Mixed(Mixin, Base):
                pass

        assert Mixed.retry_schedule == "0 3 * * *"

    class Overridden(Mixin, Base):
        retry_schedule = "0 4 * * *"

    assert Overridden.retry_schedule == "0 4 * * *"


def test_both_names_are_rejected():
    with pytest.raises(ValueError, match="Torn has both redrive and retry_schedule"):

        class Torn(Base):
            redrive = "0 3 * * *"
            retry_schedule = None


class Source(BaseModel, ABC):
    """A source with renamed members."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        rename_members(cls)

    @property
    def ack_actions(self) -> dict[str, int]:
        return {"ack": 1}

    def location(self, message_id: str) -> str | None:
        return None

    @abstractmethod
    def plan(self) -> int: ...


rename_members(Source)


class Renewed(Source):
    """A source of this release."""

    @property
    def ack_actions(self) -> dict[str, int]:
        return {**super().ack_actions, "nack": 2}

    def location(self, message_id: str) -> str | None:
        return f"{message_id} is leased"

    def plan(self) -> int:
        return 1


def test_members_of_this_release_have_their_old_names():
    source = Renewed()
    assert source.ack_actions == {"ack": 1, "nack": 2}
    with pytest.warns(DeprecationWarning, match=r"Renewed\.words is deprecated.* Use ack_actions"):
        assert source.words == {"ack": 1, "nack": 2}
    with pytest.warns(DeprecationWarning, match=r"Renewed\.whereabouts is deprecated.* Use location"):
        assert source.whereabouts("7") == "7 is leased"


def test_a_source_that_overrides_old_names_is_called_by_the_new_names():
    with pytest.warns(DeprecationWarning, match="is deprecated") as warned:

        class Former(Renewed):
            @property
            def words(self) -> dict[str, int]:
                return {**super().words, "reject": 3}

            def whereabouts(self, message_id: str) -> str | None:
                return str(super().whereabouts(message_id)).upper()

    assert {str(warning.message).split()[0].rpartition(".")[2] for warning in warned} == {"words", "whereabouts"}
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        assert Former().ack_actions == {"ack": 1, "nack": 2, "reject": 3}
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        assert Former().location("7") == "7 IS LEASED"


def test_a_module_finds_a_renamed_name(monkeypatch):
    module = types.ModuleType("renamed_module")
    module.AckAction = int  # type: ignore[attr-defined]
    module.__getattr__ = renamed_names("renamed_module", {"Word": "AckAction"})  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "renamed_module", module)
    with pytest.warns(DeprecationWarning, match=r"renamed_module\.Word is deprecated.* Use renamed_module\.AckAction"):
        from renamed_module import Word

    assert Word is int
    with pytest.raises(ImportError):
        from renamed_module import Other  # noqa: F401
