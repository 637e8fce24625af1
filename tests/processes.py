"""Processes of tests, forked from one that has loaded what most of them need: by itself each would take seconds.

They see the environment of the moment when the first was started: hand over what differs.
"""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["tests.fault_run", "pyspark.sql.connect.session", "deltalake", "resources.table_queue", "pytest"]
)
