"""Serve moto's fake of AWS Glue on loopback until the standard input ends. Prints its port.

`moto.server` would need Flask. This program hands each call to moto as a call of AWS, in its own process.
"""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import requests
from moto import mock_aws

_HEADERS = ("Authorization", "Content-Type", "X-Amz-Target")


class Glue(BaseHTTPRequestHandler):
    """Answers calls of Glue's API."""

    def do_POST(self) -> None:
        """Answer one call."""
        headers = {name: self.headers[name] for name in _HEADERS}
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = requests.post("https://glue.us-east-1.amazonaws.com/", body, headers=headers, timeout=10)
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *_: object) -> None:
        """Log no calls."""


if __name__ == "__main__":
    with mock_aws():
        server = HTTPServer(("127.0.0.1", 0), Glue)  # one call at a time, because moto uses no locks
        sys.stdout.write(f"{server.server_port}\n")
        sys.stdout.flush()
        Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()
