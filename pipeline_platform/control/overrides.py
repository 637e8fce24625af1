"""Options of a pipeline that are changed while it runs: how many tasks, how many messages each, how many runs."""

import sqlalchemy as sa

from pipeline_platform.control.database import Database, insert
from pipeline_platform.control.limits import TABLES
from pipeline_platform.model.options import Overrides, Processors, Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError

_OVERRIDES = sa.Table(
    "control_overrides",
    TABLES,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("concurrency", sa.BigInteger),
    sa.Column("max_demand", sa.BigInteger),
    sa.Column("max_runs", sa.BigInteger),
)
"""A row for each pipeline or producer of which something was changed."""


class Overriding(Database):
    """The part of the control store that knows what was changed of a pipeline's options.

    The next run goes by it, and the sensor at its next tick. Where a pipeline has several producers, each has a
    `max_runs` of its own.
    """

    def override(self, pipeline: type[Pipeline], changes: Overrides, producer: str = "") -> Overrides:
        """Change some options, by `check_overrides`; None leaves one as it is. Return all that are changed now."""
        check_overrides(pipeline, changes, producer)
        key = pipeline.limits_key(producer)
        with self.writing() as connection:
            if values := changes.model_dump(exclude_none=True):
                upsert = insert(connection, _OVERRIDES).values(key=key, **values)
                connection.execute(upsert.on_conflict_do_update(index_elements=["key"], set_=values))
            return _overrides(connection, key)

    def reset_overrides(self, pipeline: type[Pipeline], producer: str = "") -> None:
        """Have the class's own options hold again; of a pipeline, for its producers, too."""
        keys = [pipeline.limits_key(name) for name in {producer, *pipeline.producers_of(producer)}]
        with self.writing() as connection:
            connection.execute(sa.delete(_OVERRIDES).where(_OVERRIDES.c.key.in_(keys)))

    def overrides(self, key: str) -> Overrides:
        """Return what is changed of a pipeline or a producer, by what the control store knows it by."""
        with self.reading() as connection:
            return _overrides(connection, key)

    def processors_of(self, pipeline: type[Pipeline]) -> Processors:
        """Return the options that hold."""
        return self.overrides(pipeline.name).processors(pipeline.processors)

    def producer_of(self, pipeline: type[Pipeline], name: str = "") -> Producer:
        """Return the options of a producer that hold; a `PipelineError` if there is none of this name."""
        return self.overrides(pipeline.limits_key(name)).producer(pipeline.producers_of(name)[name])


def check_overrides(pipeline: type[Pipeline], changes: Overrides, producer: str) -> None:
    """Refuse by `PipelineError` options that are not of the producer that is named, or of no single producer."""
    if producer and (changes.concurrency is not None or changes.max_demand is not None):
        raise PipelineError(
            f"{pipeline.name}: concurrency and max_demand are of the whole pipeline: leave out producer {producer}"
        )
    if changes.max_runs is not None and producer not in pipeline.producers_of(producer):
        raise PipelineError(
            f"{pipeline.name}: max_runs is of one producer: choose one of {', '.join(pipeline.producers)}"
        )


def _overrides(connection: sa.Connection, key: str) -> Overrides:
    changed = [_OVERRIDES.c[name] for name in Overrides.model_fields]
    row = connection.execute(sa.select(*changed).where(_OVERRIDES.c.key == key)).first()
    return Overrides(**row._mapping) if row else Overrides()
