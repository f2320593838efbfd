"""The dashboard's server: its JSON, its stream, its token, its headers; and that it only reads."""

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from diloco.dashboard.process import link, listen, new_token
from diloco.dashboard.runs import RunFolder
from diloco.errors import ConfigError
from support.dashboard_runs import append, calm_events, step, write_run
from support.dashboard_server import Served, serving

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "calm", calm_events(steps=100))
    write_run(root / HOSTILE, calm_events(steps=40))
    with serving(root) as server:
        yield server


def test_everything_is_json_and_runs_are_listed(served: Served) -> None:
    listed = served.json("/api/runs")["runs"]
    assert {entry["run"] for entry in listed} == {"calm", HOSTILE}
    assert {entry["run"]: entry["step"] for entry in listed} == {"calm": 100, HOSTILE: 40}, "though no run was opened"
    for name in ("calm", HOSTILE):
        path = f"/api/run/{quote(name)}"
        assert served.json(f"{path}/state")["run"] == name
        assert served.json(f"{path}/series?points=50")["loss"]["step"]
        assert served.json(f"{path}/config")["options"]["steps"] == 400
    assert served.json("/api/run/calm/state?until=1700000045.5")["step"] == 40
    assert [entry["sequence"] for entry in served.json("/api/run/calm/rounds?count=2&before=3")["rounds"]] == [1, 2]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/run/none/state", 404),
        ("/api/run/..%2Fcalm/state", 404),
        ("/api/run/%2E%2E/%2E%2E/etc/passwd", 404),
        ("/page/..%2Fserver.py", 404),
        ("/page/%2e%2e/server.py", 404),
        ("/api/run/calm/state?until=nan", 400),
        ("/api/run/calm/series?points=x", 400),
        ("/api/run/calm/series?points=1", 200),
        ("/api/run/calm/series?points=0", 200),
    ],
)
def test_what_is_not_there_is_refused_and_odd_numbers_are_no_fault_of_the_server(
    served: Served, path: str, status: int
) -> None:
    assert served.get(path)[0] == status


def test_the_policy_lets_the_page_load_its_own_files_only(served: Served) -> None:
    status, headers, body = served.get("/")
    policy = headers["content-security-policy"]
    assert status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(rb"https?://|<script>| style=| on[a-z]+=", body)
    for path in re.findall(r'(?:src|href)="(/[^"#]+)"', body.decode()):
        assert served.get(path)[0] == 200, path
    page = Path("src/diloco/dashboard/page")
    for module in page.glob("*.js"):
        text = module.read_text()
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|https?://(?!www\.w3\.org)", text)


def test_the_list_has_the_summary_of_an_ended_run_and_the_present_step_of_a_live_one(tmp_path: Path) -> None:
    ended = write_run(tmp_path / "ended", calm_events(steps=40))
    live = write_run(tmp_path / "live", calm_events(steps=40))
    with serving(tmp_path) as served:

        def listed() -> dict[str, tuple[object, ...]]:
            names = ("status", "step", "perplexity", "bytes")
            return {entry["run"]: tuple(entry[name] for name in names) for entry in served.json("/api/runs")["runs"]}

        assert served.json("/api/run/ended/state")["step"] == listed()["live"][1] == 40
        append(ended, *(step(worker, 50) for worker in range(2)))
        append(live, *(step(worker, 60) for worker in range(2)))
        summary = {"status": "complete", "inner_steps": 150, "validation_perplexity": 150.26,
                   "bytes_sent_per_worker": 7000}  # fmt: skip
        (ended / "summary.json").write_text(json.dumps(summary))
        assert listed()["ended"] == ("complete", 150, 150.26, 7000)
        assert listed()["live"][1] == 60


def test_only_loopback_names_are_answered_and_only_get(served: Served) -> None:
    assert served.get("/", host="evil.example")[0] == 421
    assert served.get("/", host="localhost:1")[0] == 200
    assert served.get("/", method="POST")[0] == 405


def test_a_token_is_needed_elsewhere_and_a_cookie_keeps_it(tmp_path: Path) -> None:
    token = new_token("0.0.0.0")
    assert token is not None and len(token) >= 32 and new_token("127.0.0.1") is None
    with serving(write_run(tmp_path / "run", calm_events()), token) as served:
        assert served.get("/api/runs")[0] == 403
        assert served.get("/api/runs?token=wrong")[0] == 403
        status, headers, _ = served.get(f"/?token={token}")
        assert (status, headers["location"]) == (303, "/")
        assert "HttpOnly" in headers["set-cookie"] and "samesite=lax" in headers["set-cookie"].lower()
        cookie = headers["set-cookie"].split(";")[0]
        assert served.get("/api/runs", cookie=cookie, host="evil.example")[0] == 200
        assert served.get("/api/runs", cookie="diloco_dashboard=wrong")[0] == 403
        assert served.get("/api/runs", authorization=f"Bearer {token}")[0] == 200
        assert served.get(f"//evil.example/?token={token}")[1]["location"] == "/evil.example/"


def test_the_stream_tells_of_new_events(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", calm_events(steps=40))
    with serving(run) as served, _stream(served, "/api/stream?run=run") as lines:
        first = next(line for line in lines if line.startswith("data:"))
        append(run, step(0, 50))
        second = next(line for line in lines if line.startswith("data:"))
    versions = [json.loads(line.removeprefix("data:"))["version"] for line in (first, second)]
    assert versions[1] > versions[0]


@contextmanager
def _stream(served: Served, path: str) -> Iterator[Iterator[str]]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("GET", path)
    response = connection.getresponse()
    assert response.headers["content-type"].startswith("text/event-stream")
    try:
        yield (line.decode().strip() for line in iter(response.readline, b""))
    finally:
        response.close()
        connection.close()


def test_the_run_is_never_written_to(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", calm_events())
    (run / "summary.json").write_text("{ not JSON")

    def content() -> dict[str, tuple[bytes, int]]:
        found = sorted(path for path in tmp_path.rglob("*"))
        return {str(p): (p.read_bytes() if p.is_file() else b"", p.stat().st_mtime_ns) for p in found}

    before = content()
    with serving(run) as served:
        for path in ("/", "/api/runs", *(f"/api/run/run/{what}" for what in ("state", "series", "rounds", "config"))):
            assert served.get(path)[0] == 200
    assert content() == before


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match=f"port {other.getsockname()[1]} is in use"):
            listen(other.getsockname()[1])
    with pytest.raises(ConfigError, match="must be from 1 to 65535"):
        listen(70_000)
    with pytest.raises(ConfigError, match="no address of this machine"):
        listen(0, "no such host")


def test_the_link_has_the_token_and_the_real_port() -> None:
    with listen(0) as listener:
        assert link(listener, "127.0.0.1", None) == f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert link(listener, "::1", "abc").endswith("/?token=abc")


def test_many_readers_at_once_get_the_same_answer(tmp_path: Path) -> None:
    run = RunFolder(write_run(tmp_path / "run", calm_events())).find()["run"]
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(run.state()["events"])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 1 and len(found) == 8
