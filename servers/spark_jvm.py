"""Spark on the JVM with Delta and Iceberg, which have no release yet for the Spark that the platform uses."""

from __future__ import annotations

from pathlib import Path

from servers import maven

SPARK, DELTA, ICEBERG = "4.1.1", "4.3.1", "1.12.0"
LIBRARIES = (
    f"org.apache.spark:spark-sql_2.13:{SPARK}",
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{SPARK}",
    f"io.delta:delta-spark_2.13:{DELTA}",
    f"org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:{ICEBERG}",
)
_OPENED = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.util"),
    *("java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref"),
    *("sun.nio.ch", "sun.nio.cs", "sun.security.action", "sun.util.calendar"),
)
"""Packages of Java that Spark uses. `spark-submit` opens them."""
missing = maven.missing


def command(servers: Path, program: Path, *arguments: str) -> list[str]:
    """Return a command that compiles and runs a Java program with the libraries, which are installed first.

    Args:
        servers: Folder of installed servers.
        program: File of the program.
        arguments: Arguments of the program.

    Raises:
        ServerError: Java is missing, or Maven fails.
    """
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
    java = maven.install(servers / f"spark-jvm-{SPARK}", LIBRARIES)
    return [*java, "-Xmx1g", *opened, str(program), *arguments]
