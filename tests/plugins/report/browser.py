"""A headless Chromium, driven through its pipe by the DevTools protocol."""

import base64
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE = 120.0


class Browser:
    """One page of a browser.

    Args:
        commands: the end of a pipe that it reads from.
        answers: that of one that it writes to.

    Attributes:
        requests: the addresses that the page has asked for.
        complaints: what the browser had to say about it: errors, violations of its policy.
    """

    def __init__(self, commands: FileIO, answers: FileIO) -> None:
        self._input = commands
        self._output = answers
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._input.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def open(self, path: Path, address: str = "", width: int = 1400, theme: str = "light") -> None:
        """Open a file, and wait until its script has run.

        Args:
            path: of the file.
            address: what follows it in the address, such as `#y=log`.
            width: of the window, in pixels.
            theme: `light` or `dark`.
        """
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.absolute().as_uri() + address)
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _PATIENCE
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}; {self.complaints}")
            time.sleep(0.02)

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        event = {"key": key, "text": text or (key if len(key) == 1 else "")}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def take_screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the page.

        Args:
            path: a file with the suffix `.png`.
            whole: not only of what the window shows.
        """
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            chunk = self._output.read(1 << 16)
            if not chunk:
                raise EOFError("the browser has ended")
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        if event["method"] == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        if event["method"] == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            description = details.get("exception", {}).get("description", "")
            self.complaints.append(f"{details['text']} {description}")


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Yield a browser, which ends with the block.

    Args:
        profile: a folder for its files.
    """
    assert CHROMIUM is not None
    arguments = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]  # fmt: skip
    command_end, write_end = os.pipe()
    read_end, answer_end = os.pipe()
    with (
        open(write_end, "wb", buffering=0) as commands,
        open(read_end, "rb", buffering=0) as answers,
    ):
        # It reads from 3 and writes to 4, which may be ends of these pipes here.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (command_end, answer_end)]
        nowhere = os.open(os.devnull, os.O_WRONLY)
        actions = [(os.POSIX_SPAWN_DUP2, source, target)
                   for source, target in ((ends[0], 3), (ends[1], 4), (nowhere, 1), (nowhere, 2))]  # fmt: skip
        process = os.posix_spawn(CHROMIUM, arguments, os.environ, file_actions=actions)
        for end in (command_end, answer_end, nowhere, *ends):
            os.close(end)
        try:
            yield Browser(commands, answers)
        finally:
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)
