"""What asks for runs: the producer sensor and the schedules."""
