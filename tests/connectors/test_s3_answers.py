"""Payloads in S3: rare answers, from a server that gives a fixed answer."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipeline_platform.connectors.sqs import S3Payloads, s3_payloads
from pipeline_platform.connectors.sqs.s3_payloads import MissingPayloadError, S3AwayError
from servers.sqs import ENVIRONMENT
from tests.connectors.test_s3_payloads import SHORT, message_of, pointer


@pytest.fixture
def answering(monkeypatch):
    """Return a function that starts a server with a fixed answer; it returns payloads in this server."""
    servers = list[ThreadingHTTPServer]()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def start(status: int, body: bytes, **headers: str) -> S3Payloads:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(body)

        servers.append(server := ThreadingHTTPServer(("127.0.0.1", 0), Answer))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return S3Payloads(buckets=("a-bucket",), endpoint_url=f"http://127.0.0.1:{server.server_port}")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_an_archived_object_fails_its_message(answering):
    archived = answering(403, b"<Error><Code>InvalidObjectState</Code><Message>archived</Message></Error>")

    with pytest.raises(MissingPayloadError, match="cannot be read: InvalidObjectState"):
        archived.resolve(message_of(pointer("a-bucket", "key")))


def test_a_payload_with_a_wrong_checksum_is_not_used(answering, monkeypatch):
    monkeypatch.setattr(s3_payloads, "USUAL", SHORT)
    damaged = answering(200, b"damaged", x_amz_checksum_crc32="AAAAAA==")

    with pytest.raises(S3AwayError, match="FlexibleChecksumError"):
        damaged.resolve(message_of(pointer("a-bucket", "key")))
