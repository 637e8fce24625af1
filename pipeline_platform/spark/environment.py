"""Environment variables of Spark, its workers and callbacks.

The environment of a run contains passwords. Spark, its workers, the platform's tasks and callbacks get the variables of
this list only. `SparkResource.environment` adds variables of the run for callbacks.

`python -I environment.py PROGRAM ARGUMENT...` runs a program with these variables. This file imports nothing of the
platform: the daemon of Spark's workers and `deploy/start` load it by its path.
"""

import os
import sys
from collections.abc import Mapping

_PREFIXES = (
    "ARROW_",
    "AWS_",  # a lake on S3, and SQS
    "AZURE_",  # a lake in Azure Blob Storage
    "HADOOP_",
    "LC_",
    "LD_",
    "MALLOC_",
    "MIMALLOC_",
    "OTEL_",
    "POLARS_",
    "PYSPARK_",
    "PYTHON",
    "RUST_",
    "SPARK_",
)
_NAMES = frozenset(
    {
        # The system and its libraries
        *("HOME", "HOSTNAME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "PWD", "SHELL", "TEMP", "TMP", "TMPDIR", "TZ"),
        *("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "TZDIR", "USER"),
        *("CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "JAVA_HOME", "VIRTUAL_ENV"),
        *("MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"),
        # Folders of the deployment; not PIPELINE_PLATFORM_CONTROL, which contains a password
        *("DAGSTER_HOME", "PIPELINE_PLATFORM_HOME", "PIPELINE_PLATFORM_LAKE"),
        # Certificates and proxies
        *("CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE"),
        *("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"),
        *("all_proxy", "grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"),
        # A lake in Azure Blob Storage with a managed identity
        *("IDENTITY_ENDPOINT", "IDENTITY_HEADER", "MSI_ENDPOINT", "MSI_SECRET"),
        # A lake on Google Cloud Storage, and Pub/Sub
        *("CLOUDSDK_CONFIG", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "GOOGLE_CLOUD_QUOTA_PROJECT"),
        *("GCE_METADATA_HOST", "GCE_METADATA_IP", "PUBSUB_EMULATOR_HOST"),
        # PostgreSQL as the control store or a source
        *("PGAPPNAME", "PGCLIENTENCODING", "PGCONNECT_TIMEOUT", "PGDATABASE", "PGHOST", "PGHOSTADDR", "PGOPTIONS"),
        *("PGPASSFILE", "PGPASSWORD", "PGPORT", "PGSERVICE", "PGSERVICEFILE", "PGSSLCERT", "PGSSLCRL", "PGSSLKEY"),
        *("PGSSLMODE", "PGSSLROOTCERT", "PGUSER"),
        # Kafka with Kerberos
        *("KRB5CCNAME", "KRB5_CLIENT_KTNAME", "KRB5_CONFIG", "KRB5_KTNAME"),
    }
)


def allowed(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Spark and its workers may have."""
    return {name: value for name, value in variables.items() if name in _NAMES or name.startswith(_PREFIXES)}


def restrict(more: Mapping[str, str] | None = None) -> None:
    """Remove all other variables from this process, and add `more`."""
    kept = allowed(os.environ)
    for name in os.environ.keys() - kept.keys():
        del os.environ[name]
    os.environ.update(more or {})


if __name__ == "__main__":
    os.execve(sys.argv[1], sys.argv[1:], allowed(os.environ))  # noqa: S606 - the caller's own program
