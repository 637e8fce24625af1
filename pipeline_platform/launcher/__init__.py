"""Optional run launcher that starts runs in processes that have already loaded the project."""
