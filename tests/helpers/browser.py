"""Chromium without a display, through chromedriver's HTTP interface (W3C WebDriver): no package is needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ARGUMENTS = [
    *["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"],
    *["--disable-background-networking", "--disable-component-update", "--window-size=1300,1000"],
]


class Browser:
    """One window."""

    def __init__(self, url: str) -> None:
        self._url = url

    def call(self, path: str, **content: Any) -> Any:
        body = json.dumps(content).encode()
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self.call("/url", url=page.resolve().as_uri())

    def run(self, script: str) -> Any:
        """What ``script``, the body of a function, returns."""
        return self.call("/execute/sync", script=script, args=[])

    def until(self, script: str, seconds: float = 60) -> Any:
        """The first value of ``script`` that is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"still not true: {script}"
            time.sleep(0.1)
        return found

    def errors(self) -> list[str]:
        """Errors and warnings on the console since the last call."""
        return [entry["message"] for entry in self.call("/se/log", type="browser")]


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in ``folder``; ``CHROMIUM`` and ``DRIVER`` must be installed."""
    driver = subprocess.Popen([DRIVER or "", "--port=0"], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        line = next(line for line in driver.stdout if "successfully on port" in line)
        base = "http://127.0.0.1:" + line.split("on port")[1].strip(" .\n")
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        session = Browser(f"{base}/session").call("", capabilities=wanted)["sessionId"]
        try:
            yield Browser(f"{base}/session/{session}")
        finally:  # the browser outlives its driver
            urllib.request.urlopen(urllib.request.Request(f"{base}/session/{session}", method="DELETE"), timeout=60)
    finally:
        driver.terminate()
        driver.wait(30)
