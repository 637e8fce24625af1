"""Commands that launch runs, and the options, the launch and the progress of these runs."""
