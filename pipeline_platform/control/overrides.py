"""Options of a pipeline that can be changed at run time: `concurrency`, `max_demand` and `max_runs`."""

import sqlalchemy as sa

from pipeline_platform.control.limits import TABLES
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Overrides, Processors, Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.sql.database import Database, insert

_OVERRIDES = sa.Table(
    "control_overrides",
    TABLES,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("concurrency", sa.BigInteger),
    sa.Column("max_demand", sa.BigInteger),
    sa.Column("max_runs", sa.BigInteger),
)
"""A row for each pipeline or producer with changed options."""


class Overriding(Database):
    """Options changed at run time, as a part of the control store.

    They apply to the next run and to the sensor's next tick. If a pipeline has several producers, `max_runs` is set for
    each producer.
    """

    def override(self, pipeline: type[Pipeline], changes: Overrides, producer: str = "") -> Overrides:
        """Change options that `check_overrides` accepts, and return all changed options. None leaves one unchanged."""
        bound = BoundProducer(pipeline, producer)
        check_overrides(bound, changes)
        with self.writing() as connection:
            if values := changes.model_dump(exclude_none=True):
                upsert = insert(connection, _OVERRIDES).values(key=bound.key, **values)
                connection.execute(upsert.on_conflict_do_update(index_elements=["key"], set_=values))
            return _overrides(connection, bound.key)

    def reset_overrides(self, pipeline: type[Pipeline], producer: str = "") -> None:
        """Restore the options of the class; for a pipeline, those of its producers, too."""
        bound = BoundProducer(pipeline, producer)
        keys = [each.key for each in (bound, *bound.each)]
        with self.writing() as connection:
            connection.execute(sa.delete(_OVERRIDES).where(_OVERRIDES.c.key.in_(keys)))

    def overrides(self, key: str) -> Overrides:
        """Return the changed options of a pipeline or a producer, by its key in the control store."""
        with self.reading() as connection:
            return _overrides(connection, key)

    def processors_of(self, pipeline: type[Pipeline]) -> Processors:
        """Return the current options of a pipeline's processors."""
        return self.overrides(pipeline.name).processors(pipeline.processors)

    def options_of(self, producer: BoundProducer) -> Producer:
        """Return the current options of a producer."""
        return self.overrides(producer.key).producer(producer.options)


def check_overrides(producer: BoundProducer, changes: Overrides) -> None:
    """Check that options are changed at the level they belong to.

    Raises:
        PipelineError: `concurrency` or `max_demand` with a producer, or `max_runs` without the name of a producer.
    """
    name = producer.pipeline.name
    if producer.name and (changes.concurrency is not None or changes.max_demand is not None):
        raise PipelineError(
            f"{name}: concurrency and max_demand apply to the whole pipeline. Omit producer {producer.name}."
        )
    if changes.max_runs is not None and producer.is_whole_pipeline:
        names = ", ".join(producer.pipeline.producers)
        raise PipelineError(f"{name}: max_runs applies to a single producer. Name one of {names}.")


def _overrides(connection: sa.Connection, key: str) -> Overrides:
    changed = [_OVERRIDES.c[name] for name in Overrides.model_fields]
    row = connection.execute(sa.select(*changed).where(_OVERRIDES.c.key == key)).first()
    return Overrides(**row._mapping) if row else Overrides()
