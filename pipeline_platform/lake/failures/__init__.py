"""Failed messages: their events, selections, display, manual closing, and partitions that they hold."""
