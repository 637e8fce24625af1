"""Materialises assets by their automation conditions. Dagster's default sensor for this is off until it is enabled."""

import dagster as dg

automation = dg.AutomationConditionSensorDefinition(
    "default_automation_condition_sensor",
    target=dg.AssetSelection.all(),
    default_status=dg.DefaultSensorStatus.RUNNING,
    minimum_interval_seconds=5,
)
