"""The sensor of the pipeline `flights`: it checks the backlog and requests runs within the pipeline's capacity."""

from pipeline_platform.orchestration import producer_sensor
from pipelines.flights import Flights

flights_producer = producer_sensor(Flights)
