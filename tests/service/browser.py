"""A real Chromium, driven through the pipes of its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
WITHIN = 60.0
"""Seconds within which a page has to be as expected."""


class Browser:
    """One page of a headless browser; a context manager."""

    def __init__(self, profile: Path, *, width: int = 1000, dark: bool = False) -> None:
        assert PROGRAM is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def at_three_and_four() -> None:
            high = os.dup(from_browser)  # 4 may be one of both
            os.dup2(to_browser, 3)
            os.dup2(high, 4)

        line = [PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [*line, f"--user-data-dir={profile}", "about:blank"],
            stderr=subprocess.DEVNULL,
            preexec_fn=at_three_and_four,
            close_fds=False,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, ""
        self.console: list[str] = []
        """What pages have written to the console, and what the browser has complained of there."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Open a page and wait until it has loaded."""
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, program: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=program, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, program: str) -> Any:
        """Wait until a JavaScript expression is true; return its value."""
        deadline = time.monotonic() + WITHIN
        while not (found := self.run(program)):
            assert time.monotonic() < deadline, (program, self.run("document.body.innerText"))
            time.sleep(0.1)
        return found

    def write(self, selector: str, text: str) -> None:
        """Type text into a field."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self._call("Input.insertText", text=text)

    def choose(self, selector: str, file: Path) -> None:
        """Choose a file in a field of a form."""
        document = self._call("DOM.getDocument")["root"]["nodeId"]
        node = self._call("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self._call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def click(self, selector: str) -> None:
        """Click an element."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, *keys: str) -> None:
        """Press keys one after the other, such as ``"Tab"``; a longer text is typed."""
        codes = {"Tab": (9, ""), "Enter": (13, "\r"), "Space": (32, " ")}
        for key in keys:
            if key not in codes:
                self._call("Input.insertText", text=key)
                continue
            code, text = codes[key]
            name = " " if key == "Space" else key
            about = {"key": name, "code": key, "windowsVirtualKeyCode": code, "text": text}
            self._call("Input.dispatchKeyEvent", type="keyDown", **about)
            self._call("Input.dispatchKeyEvent", type="keyUp", **about)

    def tab_to(self, selector: str) -> None:
        """Press Tab until an element has the focus."""
        for _ in range(100):
            if self.run(f"document.activeElement.matches({json.dumps(selector)})"):
                return
            self.press("Tab")
        raise AssertionError(f"no key reaches {selector}")

    def picture(self, file: Path) -> None:
        """Write a picture of the whole page."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            self._note(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _note(self, message: Any) -> None:
        match message:
            case {"method": "Log.entryAdded", "params": {"entry": entry}}:
                self.console.append(f"{entry['text']} ({entry.get('url', '')})")
            case {"method": "Runtime.consoleAPICalled" | "Runtime.exceptionThrown"}:
                self.console.append(str(message["params"]))

    def _message(self) -> Any:
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        first, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
