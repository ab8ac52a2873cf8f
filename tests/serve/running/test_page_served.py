"""The page of the real server, which has a model to talk to, in headless Chromium."""

import json
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("playwright.sync_api", reason="the page's tests drive a browser through playwright")

from tests.serve.browsing import CHROMIUM, TOKENS, ask, chromium, expect, histogram, pages
from tests.serve.live import NAME

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: install Debian's chromium")


# Keeps what the next answer says, which the page reads as it comes.
LISTEN = """() => {
  const plain = window.fetch;
  window.fetch = async (...request) => {
    const response = await plain(...request);
    window.heard = response.clone().text();
    return response;
  };
}"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def served(browser, live):
    """The page, which is to ask for 60 tokens."""
    with pages(browser, SimpleNamespace(url=live.base, refused=0)) as open_page:
        page = open_page()
        expect(page.locator("#model-name")).to_have_text(NAME)
        expect(page.get_by_label("Chat", exact=True)).to_be_checked()
        page.set_default_timeout(60_000)
        page.locator("#open-settings").click()
        page.locator("#max_tokens").fill("60")
        page.locator("#done").click()
        yield page


def finished(page, turn):
    """The spans of each answer of a turn that has ended."""
    expect(page.locator("#go")).to_have_text("Send", timeout=60_000)
    expect(turn.get_by_role("alert")).to_have_count(0)
    return turn.evaluate(TOKENS)


@pytest.mark.parametrize("mode", ["Chat", "Complete"])
def test_the_server_colours_what_the_drafter_made(served, live, mode, tmp_path):
    prompt = "You may reproduce and distribute copies of the"
    if mode == "Complete":
        served.get_by_label("Complete").check()
    served.evaluate(LISTEN)
    turn = ask(served, prompt, wait=False)
    (spans,) = finished(served, turn)
    *chunks, last = [json.loads(data) for data in re.findall(r"^data: (\{.*)$", served.evaluate("heard"), re.MULTILINE)]
    spec = last["metrics"]["speculative_decoding"]
    path, body = ("/v1/completions", {"prompt": prompt})
    if mode == "Chat":
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}
    choice = live.post(path, body | {"max_tokens": 60})[1]["choices"][0]
    text = choice["message"]["content"] if mode == "Chat" else choice["text"]
    assert turn.locator(".tokens").evaluate("(t) => t.textContent") == text
    assert histogram(served) == spec["acceptance_histogram"]
    assert sum(histogram(served)) == spec["num_spec_steps"]
    tokens = [token for chunk in chunks for token in chunk["choices"][0].get("tokens", [])]
    assert sum(token["drafted"] for token in tokens) == spec["num_accepted_draft_tokens"] > 0
    expected = [[t["text"].lstrip(), "drafted" if t["drafted"] else "own"] for t in tokens if t["text"].strip()]
    assert spans == expected
    assert served.locator("#count-0").inner_text() == "60"
    served.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_the_server_is_compared_with_itself(served):
    served.get_by_label("Complete").check()
    served.locator("#compare").check()
    turn = ask(served, "Unless required by applicable law", wait=False)
    drafted, alone = finished(served, turn)
    assert [words for words, _ in drafted] == [words for words, _ in alone]
    assert {kind for _, kind in alone} == {"own"}
    assert "drafted" in {kind for _, kind in drafted}
    expect(served.locator("#ratio")).to_have_text(re.compile(r"^[\d.,]+×$"))
    expect(served.locator("#same")).to_have_text("the speed, same text")


def test_an_answer_of_the_server_can_be_stopped(served, live):
    served.locator("#open-settings").click()
    served.locator("#max_tokens").fill("3500")
    served.locator("#done").click()
    turn = ask(served, "Hi", wait=False)
    expect(turn.locator(".tokens span").nth(5)).to_be_visible(timeout=60_000)
    served.keyboard.press("Escape")
    expect(turn.locator(".note")).to_contain_text("stopped")
    live.wait_until(live.is_idle)
