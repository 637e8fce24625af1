"""What asks for runs: the producers' sensors, retries, schedules; and the sensor that alerts."""
