"""Draws the README's picture of the page from a run folder: `make screenshots`.

python tests/browser/screenshot.py RUN docs/images/dashboard.png [--width 1240] [--height 1160] [--dark]
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.dashboard_server import serving

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description="A picture of the page.")
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1240)
    parser.add_argument("--height", type=int, default=1160)
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        sys.exit(f"no browser: none of {', '.join(_NAMES)} is installed (Debian: apt-get install chromium)")
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    with serving(given.run) as served, sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        size = {"width": given.width, "height": given.height}
        page = browser.new_page(viewport=size, color_scheme="dark" if given.dark else "light", locale="en-GB")
        page.goto(served.address)
        page.wait_for_selector("body[data-drawn]", timeout=60_000)
        page.wait_for_timeout(500)
        page.screenshot(path=given.picture)
        browser.close()
    print(f"{given.picture}: {given.picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
