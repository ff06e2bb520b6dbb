"""A real headless browser: Chromium, driven through chromedriver's WebDriver protocol (JSON over HTTP)."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.ports import free_ports
from tests.support.processes import clean_environ

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    # Whatever a page would fetch from elsewhere fails at once: no test may reach the internet.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)


def why_no_browser() -> str | None:
    """The reason why no browser test can run here; None where one can."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found: apt-get install chromium chromium-driver" if missing else None


class Browser:
    """One window. Every wait is bounded; a failure says what the page showed."""

    def __init__(self, driver: str, session: str) -> None:
        self._session = f"{driver}/session/{session}"
        # By itself a page remembers its first 250 requests.
        remember = {"source": "performance.setResourceTimingBufferSize(10000)"}
        command = {"cmd": "Page.addScriptToEvaluateOnNewDocument", "params": remember}
        _call(f"{self._session}/goog/cdp/execute", command)

    def open(self, url: str) -> None:
        _call(f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a JavaScript function returns."""
        return _call(f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def text(self) -> str:
        """What a person could read on the page."""
        return str(self.run("return document.body.innerText"))

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_seconds:g} s: {what}; the page shows:\n{self.text()}")
            time.sleep(0.1)
        return found

    def requests(self) -> list[str]:
        """The address of everything that the page has asked for."""
        return [
            str(name) for name in self.run("return performance.getEntriesByType('resource').map(each => each.name)")
        ]


@contextmanager
def browser(folder: Path, width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """A browser with a profile of its own in `folder`; on leaving, none of its processes is left."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_ports(1)
    command = ["chromedriver", f"--port={port}", "--allowed-ips=127.0.0.1"]
    environ = clean_environ({"HOME": str(folder)})
    with (folder / "chromedriver.log").open("wb") as log:
        driver = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(address)
        flags = [*_FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}"]
        options = {"args": flags, "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": options}
        session = _call(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(address, session)
        finally:
            _call(f"{address}/session/{session}", method="DELETE")
    finally:
        driver.terminate()
        driver.wait(10)


def _wait_until_ready(address: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            if _call(f"{address}/status")["ready"]:
                return
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _call(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"the browser refused {url}: {error.read().decode(errors='replace')[:2000]}") from error
