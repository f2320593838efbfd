"""Trains the runs of the README's picture of the page, and draws it: `make screenshots`.

    python tests/browser/screenshot.py build/screenshots docs/images/dashboard.png [--width 1440] [--dark]

The folder gets a data-parallel run, a DiLoCo run, and a swarm of three of which one is killed; runs that are there
already are not trained again. The picture shows the swarm while it trains, with the other two laid over it, over bytes.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.dashboard_server import serving

Found = TypeVar("Found")
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SHARED = ["--steps=400", "--training.batch_size=4", "--training.log_interval=4", "--training.eval_interval=40"]
_ENDED = {
    "data-parallel": ["--mode=data-parallel", "--workers=2"],
    "H20-int8": ["--workers=2", "--recipe=plain", "--H=20", "--codec=int8"],
}
_SWARM = "swarm"
_KILLED_AT = 100
_DRAWN_AT = 240
_LONGEST_SECONDS = 1800.0


def train(folder: Path) -> None:
    """The runs that have an end."""
    for name, options in _ENDED.items():
        if not (folder / name / "summary.json").exists():
            shutil.rmtree(folder / name, ignore_errors=True)
            if _run(["train", *_SHARED, *options, f"--out={folder / name}"]).wait():
                sys.exit(f"the run {name} failed")


def _run(arguments: list[str], output: Path | None = None) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).parent / "diloco"), *arguments]
    print(" ".join(command), flush=True)
    out = None if output is None else output.open("wb")
    return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


@contextmanager
def swarm(folder: Path, others: Path) -> Iterator[None]:
    """A swarm of three, one of them killed, from the moment at which it is to be drawn."""
    shutil.rmtree(folder / _SWARM, ignore_errors=True)
    shutil.rmtree(others, ignore_errors=True)
    others.mkdir(parents=True)
    options = ["--engine=swarm", "--workers=1", "--H=20", "--codec=int8", "--host=127.0.0.1"]
    run = folder / _SWARM
    started = [_run(["train", *_SHARED, *options, f"--out={run}"], others / "first.log")]
    try:
        _wait_for(lambda: _reached(run, 4))
        for name in ("second", "third"):
            word = others / f"{name}.word"
            if _run(["invite", str(run)], word).wait():
                raise SystemExit(f"no invitation: see {word}")
            started.append(
                _run(["join", f"@{word}", "--host=127.0.0.1", f"--out={others / name}"], others / f"{name}.log")
            )
        _wait_for(lambda: _reached(run, _KILLED_AT, members=3))
        os.killpg(started[2].pid, signal.SIGKILL)
        _wait_for(lambda: _reached(run, _DRAWN_AT, lost=1))
        yield
    finally:
        for process in reversed(started):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        for process in started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait_for(found: Callable[[], Found]) -> Found:
    ends = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < ends:
        if result := found():
            return result
        time.sleep(0.5)
    raise SystemExit("the swarm did not come so far in half an hour: see the logs beside the runs")


def _reached(run: Path, step: int, members: int = 0, lost: int = 0) -> bool:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines]
    at = max((entry["step"] for entry in events if entry["type"] == "step"), default=0)
    widest = max((len(entry["members"]) for entry in events if entry["type"] == "round"), default=0)
    return at >= step and widest >= members and sum(entry["type"] == "member_lost" for entry in events) >= lost


def draw(root: Path, picture: Path, address: list[tuple[str, str]], size: dict[str, int], *, dark: bool) -> None:
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        sys.exit(f"no browser: none of {', '.join(_NAMES)} is installed (Debian: apt-get install chromium)")
    picture.parent.mkdir(parents=True, exist_ok=True)
    with serving(root) as served, sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        page = browser.new_page(viewport=size, color_scheme="dark" if dark else "light", locale="en-GB")
        page.goto(f"{served.address}#{urlencode(address)}")
        page.wait_for_selector("body[data-drawn]", timeout=60_000)
        page.wait_for_timeout(1500)
        page.screenshot(path=picture)
        browser.close()
    print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description="A picture of the page.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=1180)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    runs = options.folder.absolute() / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    train(runs)
    address = [("run", _SWARM), *(("over", name) for name in _ENDED), ("axis", "bytes")]
    with swarm(runs, options.folder.absolute() / "others"):
        draw(runs, options.picture, address, {"width": options.width, "height": options.height}, dark=options.dark)


if __name__ == "__main__":
    main()
