"""Sensors and schedules that request runs, and the sensor for alerts."""
