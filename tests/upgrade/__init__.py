"""What an earlier release left, opened by this one."""
