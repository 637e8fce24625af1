"""Assets of the pipeline `flights`, partitioned by window: `flights/messages`, one per batcher, `flights/failed`."""

from pipeline_platform.orchestration import pipeline_assets
from pipelines.flights import Flights

flights = pipeline_assets(Flights)
