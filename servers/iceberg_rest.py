"""An Iceberg REST catalog for tests: Apache Iceberg's own REST service, run by `IcebergRest.java`.

The service is the one of Iceberg's tests for clients. It checks each commit as the specification requires. It keeps the
metadata of tables in memory, and checks no credentials.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import maven
from servers.server import Program, free_ports

ICEBERG, JETTY, SLF4J = "1.11.0", "12.1.12", "2.0.17"
LIBRARIES = (
    f"org.apache.iceberg:iceberg-core:{ICEBERG}",
    f"org.apache.iceberg:iceberg-core:{ICEBERG}:tests",
    f"org.eclipse.jetty.ee10:jetty-ee10-servlet:{JETTY}",
    f"org.slf4j:slf4j-simple:{SLF4J}",
)

missing = maven.missing


@contextmanager
def serve(folder: Path) -> Iterator[Program]:
    """Run a server on loopback until the block or this process ends; yield it. Its warehouse is a temporary folder.

    Concurrent callers share `folder`, where the libraries are installed.

    Raises:
        ServerError: Java or Maven is missing, the libraries cannot be installed, or the server does not start.
    """
    java = install(folder)
    with tempfile.TemporaryDirectory(prefix="iceberg-rest-", ignore_cleanup_errors=True) as made:
        (port,) = free_ports(1)
        program = Path(__file__).with_name("IcebergRest.java").resolve()
        command = [*java, "-Xmx256m", str(program), str(port), made]
        server = Program(f"http://127.0.0.1:{port}", command, Path(made), "The catalog is ready", {})
        with server.running():
            yield server


def install(folder: Path) -> list[str]:
    """Install the libraries, once for all callers, and return a Java command that can use them.

    Raises:
        ServerError: Java or Maven is missing, or Maven fails.
    """
    return maven.install(folder / f"iceberg-rest-{ICEBERG}", LIBRARIES)
