"""The flights' pull producer: it looks at the queue, and asks for runs that the pipeline can bear."""

from pipeline_platform.orchestration import producer_sensor
from pipelines.flights import Flights

flights_producer = producer_sensor(Flights)
