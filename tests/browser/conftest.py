"""One browser for all tests here: Debian's chromium, headless, driven by playwright.

Without a browser these tests are skipped, and say so; with DILOCO_REQUIRE_BROWSER=1, as in CI, they fail instead.
"""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
REQUIRED = os.environ.get("DILOCO_REQUIRE_BROWSER") == "1"


@pytest.fixture(scope="module")  # playwright's event loop runs until its end, and no other one meanwhile
def browser() -> Iterator[Browser]:
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        reason = f"no browser: none of {', '.join(_NAMES)} is installed (Debian: apt-get install chromium)"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        try:
            found = playwright.chromium.launch(executable_path=path, args=[*arguments, "--disable-gpu"])
        except Error as error:
            if REQUIRED:
                raise
            pytest.skip(f"{path} cannot be started: {str(error).splitlines()[0]}")
        yield found
        found.close()
