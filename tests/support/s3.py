"""An S3 server of its own process on loopback: moto's."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class S3Server:
    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        """What obstore needs to know of it."""
        return {
            "aws_endpoint": self.endpoint,
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
            "aws_region": "us-east-1",
            "client_options": {"allow_http": True},
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same as variables of a process."""
        return {
            "AWS_ENDPOINT": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server with an empty bucket named `bucket`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = S3Server(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 100.0
        while not _made_bucket(server):
            assert process.poll() is None, "moto's server has ended: is it installed? (the extra dev)"
            assert time.monotonic() < deadline, "moto's server does not answer"
            time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()


def _made_bucket(server: S3Server) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(f"{server.endpoint}/bucket", method="PUT"), timeout=10).close()
    except urllib.error.URLError:
        return False
    return True
