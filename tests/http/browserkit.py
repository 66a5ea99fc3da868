"""Headless Chromium over the Chrome DevTools protocol: as much of it as tests of a page need."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # continuous integration is root, and the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--lang=en-GB",
    "--remote-debugging-port=0",
)

KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowUp": 38, "ArrowDown": 40}


def find_chromium() -> str | None:
    """The program, or None; LYNX_NET_CHROMIUM names another."""
    named = os.environ.get("LYNX_NET_CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def chromium(program: str, folder: Path) -> Iterator[str]:
    """Run it; the block gets the address of its debugger."""
    log = folder / "chromium.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        port_file = folder / "profile" / "DevToolsActivePort"
        deadline_s = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert process.poll() is None, f"{program} ended: {log.read_text(errors='replace')[-2000:]}"
            assert time.monotonic() < deadline_s, f"{program} does not start: {log.read_text(errors='replace')[-2000:]}"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Page:
    """One tab. `problems` holds what its console has against it. Use `open_page`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []

    async def read(self) -> None:
        """Take what the browser says, until it is closed."""
        async for message in self._socket:
            heard = json.loads(message.data)
            if "id" in heard:
                waiting = self._waiting.pop(heard["id"])
                if not waiting.done():
                    waiting.set_result(heard)
                continue
            values = heard.get("params", {})
            match heard["method"]:
                case "Runtime.exceptionThrown":
                    self.problems.append(json.dumps(values["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if values["type"] in ("error", "warning", "assert"):
                    self.problems.append(json.dumps(values["args"]))
                case "Log.entryAdded" if values["entry"]["level"] in ("error", "warning"):
                    self.problems.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(30):
            heard = await answer
        assert "error" not in heard, (method, heard["error"])
        result: dict[str, Any] = heard["result"]
        return result

    async def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        done = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, (expression, done["exceptionDetails"])
        return done["result"].get("value")

    async def until(self, expression: str, wanted: Any = True, timeout_s: float = 20.0) -> None:
        """Wait until an expression has a value."""
        deadline_s = time.monotonic() + timeout_s
        while (seen := await self.run(expression)) != wanted:
            assert time.monotonic() < deadline_s, f"{expression} is {seen!r}, not {wanted!r}; {self.problems}"
            await asyncio.sleep(0.03)

    async def go(self, url: str) -> None:
        """Load a page."""
        await self.call("Page.navigate", url=url)
        await self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    async def press(self, key: str, *, shift: bool = False) -> None:
        """A key, down and up."""
        about = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        about |= {"modifiers": 8 if shift else 0}
        text = {"text": "\r" if key == "Enter" else key} if key in ("Enter", " ") else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    async def look(self, width: int, height: int, *, dark: bool = False, still: bool = False) -> None:
        """The size of the window, and what the reader prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        listed = [{"name": name, "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=listed)


@contextlib.asynccontextmanager
async def open_page(debugger: str) -> AsyncIterator[Page]:
    """A new tab, closed with the block."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{debugger}/json/new?about:blank") as answer:
            target = await answer.json()
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
            page = Page(socket)
            reading = asyncio.create_task(page.read())
            for domain in ("Page", "Runtime", "Log"):
                await page.call(f"{domain}.enable")
            yield page
            async with session.get(f"{debugger}/json/close/{target['id']}") as answer:
                await answer.read()
            await reading
