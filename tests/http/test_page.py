"""The page to watch, in headless Chromium, fed by the events of made-up requests through the server's own /events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import types
from importlib import resources

import aiohttp
import openai
import pytest
from browserkit import chromium, find_chromium, open_page
from httpkit import changed, free_ports, local_pair
from stories import STREAMS, Teller, stored, story

from lynx_net.integrations.http.config import DecodeConfig
from lynx_net.integrations.http.decode_app import DecodeServer
from lynx_net.integrations.http.serving import serving

FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js", "/icon.svg": "icon.svg"}
STATE = "document.getElementById('connection').dataset.state"
TITLE = "document.getElementById('title').textContent"
SHOWN = "!document.getElementById('picture').hidden"
HOSTILE = '<img src=x onerror="window.hacked=1"></p><script>window.hacked=1</script>&lt;\u202e'

WORDS = """[...document.querySelectorAll('#text > *')].map((one) =>
  [one.textContent, one.className, one.tagName, getComputedStyle(one).textDecorationLine])"""

METERS = """Object.fromEntries([...document.querySelectorAll('[role=meter]')].map((one) =>
  [one.ariaLabel, Number(one.ariaValueNow)]))"""

LISTEN = """window.spoken = [];
new MutationObserver(() => spoken.push(document.getElementById('spoken').textContent))
  .observe(document.getElementById('spoken'), { childList: true });"""

TOO_WEAK = """(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!colour.endsWith(', 0)')) return light(colour);
    }
  };
  const selectors = ['body', '#text .committed', '.legend .draft', 'del', '#state', 'dt', 'dd', '.choice-about',
    '.row-name', '.row-value', '.meter-head', '#connection', '#axis span', 'summary', 'h3'];
  return selectors.flatMap((selector) => [...document.querySelectorAll(selector)].map((element) => {
    const [low, high] = [light(getComputedStyle(element).color), ground(element)].sort((a, b) => a - b);
    return [selector, (high + 0.05) / (low + 0.05)];
  })).filter(([, ratio]) => ratio < 4.5);
})()"""


@pytest.fixture(scope="session")
def debugger(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium), so nobody has looked at the page")
    with chromium(program, tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
async def page(debugger):
    async with open_page(debugger) as opened:
        await opened.look(1180, 900)
        yield opened


@contextlib.asynccontextmanager
async def watched(**sections):
    """A decode server that was never given a model, and the address of its page."""
    server = DecodeServer(changed(DecodeConfig(), {"http": {"port": 0}}, sections))
    server._engine = types.SimpleNamespace(model=types.SimpleNamespace(name="tiny", created=0))
    server.service.state = "ready"
    async with serving(server) as url:
        try:
            yield server, f"{url}/"
        finally:
            server.ended()


async def choose(page, request_id):
    selector = json.dumps(f"input[value='{request_id}']")
    await page.until(f"!!document.querySelector({selector})")
    await page.run(f"document.querySelector({selector}).click()")
    await page.until(TITLE, f"Request {request_id[-6:]}")


async def test_a_request_from_its_arrival_to_its_end(page):
    async with watched() as (server, url):
        await page.go(url)
        await page.until(STATE, "watching")
        await page.until("document.getElementById('empty').innerText.includes('No request yet')")
        await page.until("document.getElementById('example').textContent.includes('\"model\":\"tiny\"')")
        await page.run(LISTEN)
        telling = Teller(server.bus, "chatcmpl-aaaaaa", story(queued=True))
        telling.tell("queued")
        await page.until(SHOWN)
        await page.until("document.getElementById('state').textContent", "waiting for its turn, 2 before it")
        telling.tell("draft", 4)
        await page.until(f"({WORDS}).length", 4)
        assert await page.run(WORDS) == [[text, "draft", "SPAN", "none"] for text in ("The", " sky", " is", " blue")]
        meters = await page.run(METERS)
        assert meters["Anchor"] == 100
        assert 0 < meters["Residual"] < 100
        assert all(30 < meters[f"Lane {lane}"] < 100 for lane in range(4))
        assert await page.run("[...document.querySelectorAll('.layers')].map((one) => one.ariaLabel)") == [
            "30 of 30 layers",
            "15 of 30 layers",
            *[None] * 4,
        ]
        colours = "[...document.querySelectorAll('#text > *')].map((one) => getComputedStyle(one).color)"
        drafts = set(await page.run(colours))
        telling.tell("first")
        kept = [[text, "committed", "SPAN", "none"] for text in ("The", " sky", " is", " blue")]
        gone = [[text, "retracted", "DEL", "line-through"] for text in (" since", " of", " dust")]
        await page.until(WORDS, [*kept, *gone, [" because", "committed", "SPAN", "none"]])
        foreground = await page.run("getComputedStyle(document.body).color")
        await page.until(f"({colours})[0]", foreground)
        assert drafts.isdisjoint({foreground})
        telling.tell()
        await page.until("document.getElementById('state').textContent", "finished")
        rows = await page.run("[...document.querySelectorAll('.track')].map((one) => one.ariaLabel)")
        assert [row.split(":")[0] for row in rows] == [
            "Prefill",
            "Anchor",
            "Residual",
            "Drafts",
            "Verification",
            "Decoding",
        ]
        assert rows[1] == "Anchor: from 0.52 s to 1.06 s"
        figures = await page.run(FIGURES)
        assert "From the store" not in figures
        assert figures["Drafts accepted"] == "4 of 7"
        assert figures["Final tokens"] == "16 of 64"
        await page.until("document.getElementById('spoken').textContent.includes('16 tokens')")
        spoken = await page.run("spoken")
        words = " ".join(spoken)
        assert "shorter wavelengths of sunlight" in words
        assert "dust" not in words
        assert await page.run("document.getElementById('text').closest('[aria-live]')") is None
    assert page.problems == []


FIGURES = """Object.fromEntries([...document.querySelectorAll('#figures div')]
  .map((one) => [one.firstChild.textContent, one.lastChild.textContent]))"""
ROWS = "[...document.querySelectorAll('.track')].map((one) => one.ariaLabel.split(':')[0])"


async def test_a_prefix_from_the_store(page):
    async with watched() as (server, url):
        await page.go(url)
        telling = Teller(server.bus, "chatcmpl-aaaaaa", stored())
        telling.tell("progress")
        await page.until("document.getElementById('state').textContent", "the stored prefix is arriving")
        telling.tell("ready", 2)
        words = "the stored prefix is here, the rest is being computed"
        await page.until("document.getElementById('state').textContent", words)
        telling.tell()
        await page.until("document.getElementById('state').textContent", "finished")
        assert (await page.run(FIGURES))["From the store"] == "1100 tokens"
        assert (await page.run(ROWS))[:4] == ["Store", "Anchor", "Residual", "Rest"]

        telling = Teller(server.bus, "chatcmpl-bbbbbb", stored(fails=True))
        telling.tell("store", 2)
        await choose(page, "chatcmpl-bbbbbb")
        await page.until("document.getElementById('state').textContent", "the prompt is being computed")
        telling.tell()
        await page.until("document.getElementById('state').textContent", "finished")
        assert (await page.run(FIGURES))["From the store"] == "failed"
        assert (await page.run(ROWS))[:3] == ["Prefill", "Anchor", "Residual"]
        assert (await page.run(METERS))["Residual"] == 100
        await page.look(360, 740)
        assert await page.run("document.documentElement.scrollWidth") == 360
    assert page.problems == []


async def test_a_screen_reader_is_told_now_and_then(page):
    count = 12
    async with watched() as (server, url):
        await page.go(url)
        await page.until(STATE, "watching")
        await page.run(LISTEN)
        final = tuple(f" Sentence {number}." for number in range(count))
        telling = Teller(server.bus, "chatcmpl-aaaaaa", story(drafts=(), final=final))
        telling.tell("offer")
        await page.until(TITLE, "Request aaaaaa")
        for number in range(count):
            telling.tell("commit")
            await page.until("document.getElementById('text').children.length", number + 1)
        telling.tell()
        await page.until(f"document.getElementById('spoken').textContent.includes('{count} tokens')")
        words = await page.run("spoken")
        assert len(words) <= 3 + await page.run("performance.now()") / 4000
        assert "".join(words[1:]).startswith("".join(final))
    assert page.problems == []


async def test_what_comes_from_outside_is_text(page):
    async with watched() as (server, url):
        events = story(prompt=HOSTILE, drafts=(HOSTILE, HOSTILE), kept=1, final=(HOSTILE, "."))
        events[-1] = {"type": "error", "at_s": 3.0, "message": HOSTILE, "code": None, "status": 500}
        Teller(server.bus, "chatcmpl-aaaaaa", events).tell()
        await page.go(url)
        await page.until("document.getElementById('problem').hidden", wanted=False)
        assert await page.run("document.getElementById('problem').textContent") == HOSTILE
        assert await page.run("document.getElementById('prompt').textContent") == HOSTILE
        assert [word[0] for word in await page.run(WORDS)] == [HOSTILE, HOSTILE, HOSTILE, "."]
        assert await page.run("document.querySelectorAll('img, body script').length + (window.hacked ?? 0)") == 0
    assert page.problems == []


async def test_by_keyboard(page):
    focused = """(() => { const one = document.activeElement;
      return one.tagName + (one.id && '#' + one.id) + (one.name ? '=' + one.value : ''); })()"""
    outlined = """(() => { const one = document.activeElement.closest('.choice') ?? document.activeElement;
      return getComputedStyle(one).outlineStyle + parseInt(getComputedStyle(one).outlineWidth); })()"""

    async def tab(wanted, *, shift=False):
        await page.press("Tab", shift=shift)
        assert await page.run(focused) == wanted
        assert await page.run(outlined) in ("solid2", "solid3")

    async with watched() as (server, url):
        for name in ("aaaaaa", "bbbbbb"):
            Teller(server.bus, f"chatcmpl-{name}", story()).tell()
        await page.go(url)
        await page.until(TITLE, "Request bbbbbb")  # the newest by itself
        await tab("A")
        await tab("INPUT=")
        await page.press("ArrowDown")
        await page.press("ArrowDown")
        await page.until(TITLE, "Request aaaaaa")
        assert await page.run(focused) == "INPUT=chatcmpl-aaaaaa"
        assert await page.run(outlined) == "solid2"
        assert await page.run("location.hash") == "#chatcmpl-aaaaaa"
        await tab("P#text")
        await tab("SUMMARY")
        await page.press("Enter")
        await tab("P#prompt")
        await tab("SUMMARY", shift=True)
        await tab("P#text", shift=True)
        await tab("INPUT=chatcmpl-aaaaaa", shift=True)
        await tab("A", shift=True)
        await page.press("Enter")
        assert await page.run(focused) == "ARTICLE#picture"
        await page.run("location.hash = 'chatcmpl-bbbbbb'")  # as a link to a request does
        await page.until(TITLE, "Request bbbbbb")
        assert await page.run("document.querySelector(':checked').value") == "chatcmpl-bbbbbb"
    assert page.problems == []


async def test_the_newest_is_followed_but_nothing_jumps_away(page):
    async with watched() as (server, url):
        first = Teller(server.bus, "chatcmpl-aaaaaa", story())
        first.tell("draft")
        await page.go(url)
        await page.until(TITLE, "Request aaaaaa")
        second = Teller(server.bus, "chatcmpl-bbbbbb", story())
        second.tell("started")
        await page.until("document.querySelectorAll('.choice').length", 3)
        await asyncio.sleep(0.2)
        assert await page.run(TITLE) == "Request aaaaaa"
        await page.run(
            """window.seen = {};
            new MutationObserver(() => { seen[document.getElementById('picture').dataset.state] ??= performance.now();
              seen[document.getElementById('title').textContent] ??= performance.now(); })
              .observe(document.getElementById('picture'), { subtree: true, childList: true, attributes: true });"""
        )
        first.tell()
        await page.until(TITLE, "Request bbbbbb")
        assert await page.run("seen['Request bbbbbb'] - seen['done']") > 1000  # time to see how it ended
        await choose(page, "chatcmpl-aaaaaa")
        second.tell()
        assert await page.run(TITLE) == "Request aaaaaa"
    assert page.problems == []


@pytest.mark.parametrize("dark", [False, True])
async def test_in_both_colours_and_on_a_phone(page, dark):
    await page.look(360, 740, dark=dark, still=dark)
    async with watched() as (server, url):
        events = story(prompt="p" * 2000, final=("W" * 300, " end"), lanes=8, streams=(*STREAMS, ("exact", 9_000_000)))
        events[0]["model"] = "m" * 120
        telling = Teller(server.bus, "chatcmpl-aaaaaa", events)
        telling.tell("retract")
        await page.go(url)
        await page.until(SHOWN)
        await page.until("!!document.querySelector('.retracted')")
        await page.run("document.getElementById('prompt-details').open = true")
        problem = {"type": "error", "at_s": 3.0, "message": "e" * 300, "code": None, "status": 500}
        telling._left[-1] = problem
        for width in (360, 1180):
            await page.look(width, 740, dark=dark, still=dark)
            assert await page.run("document.documentElement.scrollWidth") == width
        telling.tell("commit", 2)
        await page.until(f"({WORDS}).length", 9)
        await page.until(TOO_WEAK, [])  # once colours have changed
        ground, text = await page.run(
            "[document.body, document.querySelector('.committed')].map((one, index) =>"
            " getComputedStyle(one)[index ? 'color' : 'backgroundColor'].match(/\\d+/g).reduce((a, b) => +a + +b, 0))"
        )
        assert (ground < 150 < 600 < text) if dark else (text < 150 < 600 < ground)
        assert (await page.run("getComputedStyle(document.querySelector('.bar i')).transitionDuration") == "0s") is dark
        telling.tell()
        await page.until("document.getElementById('problem').hidden", wanted=False)
        await page.look(360, 740, dark=dark)
        assert await page.run("document.documentElement.scrollWidth") == 360
    assert page.problems == []


async def test_a_server_that_goes_away_and_comes_back(page):
    [port] = free_ports(1)
    async with watched(http={"port": port}) as (server, url):
        Teller(server.bus, "chatcmpl-aaaaaa", story()).tell("draft")
        await page.go(url)
        await page.until(TITLE, "Request aaaaaa")
        assert page.problems == []
    await page.until(STATE, "gone")
    assert "does not answer; next try in" in await page.run("document.getElementById('connection').textContent")
    async with watched(http={"port": port}) as (server, url):
        await page.until(STATE, "watching")
        await page.until("document.getElementById('state').textContent", "the server no longer has this request")
        Teller(server.bus, "chatcmpl-bbbbbb", story()).tell()
        await page.until(TITLE, "Request bbbbbb")
    assert [one for one in page.problems if "Failed to load resource" not in one] == []  # the browser's own words


async def test_a_server_that_wants_a_key(page, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    async with watched(http={"api_key_file": str(keys)}) as (server, url):
        Teller(server.bus, "chatcmpl-aaaaaa", story()).tell()
        await page.go(url)
        for key, state in (("wrong", "key"), ("right", "watching")):
            await page.until("!document.getElementById('key-form').hidden")
            assert await page.run("document.activeElement.id") == "key"
            await page.run(f"document.getElementById('key').value = '{key}'")
            await page.press("Enter")
            await page.until(STATE, state)
            if state == "key":
                await page.until(
                    "document.getElementById('key-error').textContent", "The server does not know this key."
                )
        await page.until(TITLE, "Request aaaaaa")
        assert await page.run("location.href") == url
    assert [one for one in page.problems if "Failed to load resource" not in one] == []  # of the two refusals


async def test_a_real_answer_is_on_it(page, tiny_model):
    slow = {"link": {"rate": "8Mbit", "lanes": 2}}
    async with local_pair(tiny_model, prefill=slow) as running:
        await page.go(f"{running.url}/")
        await page.until(STATE, "watching")
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            answer = await client.completions.create(
                model="tiny", prompt="It was a bright cold day in April. " * 40, max_tokens=40, temperature=0
            )
        await page.until("document.getElementById('state').textContent", "finished, at the limit of its length")
        shown = "[...document.querySelectorAll('#text .committed')].map((one) => one.textContent).join('')"
        assert await page.run(shown) == answer.choices[0].text
        meters = await page.run(METERS)
        assert (meters["Anchor"], meters["Residual"]) == (100, 100)
        assert {"Lane 0", "Lane 1"} < set(meters)
    assert page.problems == []


async def test_its_files_and_their_policy():
    async with watched() as (_, url), aiohttp.ClientSession() as session:
        for path, name in FILES.items():
            async with session.get(url.rstrip("/") + path) as answer:
                assert (
                    await answer.read() == (resources.files("lynx_net.integrations.http") / "page" / name).read_bytes()
                )
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                tag = answer.headers["ETag"]
            async with session.get(url.rstrip("/") + path, headers={"If-None-Match": tag}) as answer:
                assert (answer.status, await answer.read()) == (304, b"")
    async with watched(watch={"enabled": False}) as (_, url), aiohttp.ClientSession() as session:
        for path in FILES:
            async with session.get(url.rstrip("/") + path) as answer:
                assert answer.status == 404


def test_it_needs_nothing_from_elsewhere_and_has_nothing_inline():
    folder = resources.files("lynx_net.integrations.http") / "page"
    texts = {name: (folder / name).read_text("utf-8") for name in FILES.values()}
    for name, text in texts.items():
        assert (
            re.findall(r"(?:https?:)?//[\w.]+", text.replace('xmlns="http://www.w3.org/2000/svg"', "")) in ([], None)
            or name == "page.js"
        )
    assert re.findall(r"https?://", texts["page.js"]) == []
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=|javascript:", texts["index.html"]) == []
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", texts["page.js"])
        == []
    )
