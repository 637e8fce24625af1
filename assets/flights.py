"""The flights' assets, partitioned by window: `flights/messages`, one for each batcher, and `flights/failed`."""

from pipeline_platform.orchestration import pipeline_assets
from pipelines.flights import Flights

flights = pipeline_assets(Flights)
