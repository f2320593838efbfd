"""The dashboard's server in a thread of the test, on a free port."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.dashboard.process import listen, serve


@dataclass
class Served:
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, _, body = self.get(path)
        assert status == 200, (path, status, body)
        return json.loads(body)


@contextmanager
def serving(folder: Path, token: str | None = None) -> Iterator[Served]:
    listener, ended = listen(0), threading.Event()
    port = listener.getsockname()[1]
    thread = threading.Thread(target=serve, args=(folder, listener, token, ended.wait), daemon=True)
    thread.start()
    try:
        yield Served(port)
    finally:
        ended.set()
        thread.join(60)
        assert not thread.is_alive()
