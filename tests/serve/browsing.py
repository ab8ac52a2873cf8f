"""Headless Chromium, the server's page in it, and what tests of the page do with that."""

import contextlib
import shutil

from playwright import sync_api

expect = sync_api.expect
CHROMIUM = shutil.which("chromium")
# Nothing of the browser's own may leave the machine.
QUIET = ("quic", "gpu", "background-networking", "component-update", "sync")
ARGS = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]
# Of each answer of a turn: the text and the class of every token.
TOKENS = """(turn) => [...turn.querySelectorAll(".tokens")]
  .map((tokens) => [...tokens.querySelectorAll("span")].map((span) => [span.textContent, span.className]))"""


@contextlib.contextmanager
def chromium():
    """A browser. While it is open asyncio.run() does not work: playwright has a loop of its own in this thread."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@contextlib.contextmanager
def pages(browser, server):
    """What opens a server's page; at the end nothing may have left the origin or reached the console but refusals.

    `server` has a `url`, and `refused` is how many requests it has refused.
    """
    asked, said, contexts = [], [], []

    def open_page(**options):
        context = browser.new_context(**options)
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(server.url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not [url for url in asked if not url.startswith((server.url, "data:"))]
    refusals = [words for words in said if words.startswith("Failed to load resource: the server responded")]
    assert len(refusals) <= server.refused, refusals
    assert len(refusals) == len(said), said


def ask(page, text, wait=True):
    """Send a message by keyboard alone; returns the new turn."""
    turns = page.locator(".turn").count()
    page.locator("#prompt").focus()
    page.keyboard.insert_text(text)
    page.keyboard.press("Enter")
    turn = page.locator(".turn").nth(turns)
    expect(turn).to_be_visible()
    if wait:
        expect(page.locator("#go")).to_have_text("Send", timeout=60_000)
    return turn


def histogram(page):
    return [int(row.locator("td").last.inner_text()) for row in page.locator("#histogram tbody tr").all()]
