"""Definitions of this deployment: pipelines, assets, sensors and resources. Add a new pipeline here."""

import dagster as dg

from assets.delays_per_carrier import delays_per_carrier
from assets.flights import flights
from pipeline_platform.orchestration import platform_definitions
from pipelines.flights import Flights
from resources.acknowledger import acknowledger
from resources.flights_queue import flights_queue
from resources.lake import control, lake
from resources.spark import spark
from sensors.automation import automation
from sensors.flights import flights_producer

RESOURCES = {
    "lake": lake,
    "control": control,
    "spark": spark,
    "acknowledger": acknowledger,
    "flights_queue": flights_queue(),
}

defs = dg.Definitions.merge(
    platform_definitions(
        [Flights],
        RESOURCES,
        assets=[flights, delays_per_carrier],
        sensors=[flights_producer, automation],
    ),
    # Spark starts once per run instead of once per step, also in runs that are started manually.
    dg.Definitions(executor=dg.in_process_executor),
)
