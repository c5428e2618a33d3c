"""A page in headless Chromium: what it asks of the network, what it complains about, how it is laid out."""

from __future__ import annotations

import functools
import html
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FRAME = """\
<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">
<iframe id="page" src="/page.html" style="width: {width}px; height: 1200px; border: 0"></iframe><pre id="answer"></pre>
<script>
page.onload = () => {{
  const document = page.contentDocument, window = page.contentWindow;
  answer.textContent = JSON.stringify((() => {{ {question} }})());
}};
</script>
"""


@dataclass(frozen=True)
class Look:
    """What a browser saw of a page."""

    answer: Any
    """What the question returned, by way of JSON."""
    requests: list[str]
    """Paths that were asked of the page's server, in order."""
    console: list[str]
    """Messages on the console: errors of scripts, breaches of the content policy."""


def look(page: str, question: str = "return null", *, width: int = 390) -> Look:
    """Show a page in a frame of that width, and ask a question: the body of a function that sees its `document`.

    Skips the test where there is no browser.
    """
    browser = chromium()
    requests: list[str] = []
    pages = {"/": _FRAME.format(width=width, question=question), "/page.html": page}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200 if self.path in pages else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(pages.get(self.path, "").encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            # Chromium's clock stands still while it waits for the network, so that the page is loaded by then.
            address = f"http://127.0.0.1:{server.server_address[1]}/"
            out, log = _run([browser, "--dump-dom", "--virtual-time-budget=10000", address])
        finally:
            server.shutdown()
            thread.join()
    found = re.search(r'<pre id="answer">(.+?)</pre>', out, re.DOTALL)
    assert found is not None, f"the page was not loaded:\n{out[-2000:]}\n{log[-2000:]}"
    console = [line for line in log.splitlines() if ":CONSOLE" in line]
    return Look(json.loads(html.unescape(found[1])), [path for path in requests if path != "/"], console)


def print_pdf(page: Path, pdf: Path) -> None:
    """Print a page into a file."""
    _run([chromium(), f"--print-to-pdf={pdf}", page.absolute().as_uri()])


def chromium() -> str:
    """The browser's path; it skips the test where there is none, and in CI installs it first."""
    found = _find() or _installed()
    if found is None:
        pytest.skip(f"none of {', '.join(_NAMES)} is installed; on Debian: apt-get install chromium")
    return found


def _find() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@functools.cache
def _installed() -> str | None:
    """Debian's chromium, where this is a CI machine's root; None where that cannot be had."""
    if not os.environ.get("CI") or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return None
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
        try:
            subprocess.run(["apt-get", "-qq", *command], env=environment, check=True, capture_output=True, timeout=240)
        except (subprocess.SubprocessError, OSError):
            return None
    return _find()


def _run(command: list[str], timeout: float = 90) -> tuple[str, str]:
    """A headless browser's output and log; it and all of its processes end with the time."""
    browser, *rest = command
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            "--headless",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
        ]
        # Nothing but this machine can be reached, and the browser asks for nothing of its own.
        flags += ["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        flags += ["--enable-logging=stderr", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        process = subprocess.Popen(
            [browser, *flags, *rest],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            return process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
