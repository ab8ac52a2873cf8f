"""The page at / in headless Chromium, against the scripted server of page_mock."""

import json
import re

import pytest

pytest.importorskip("playwright.sync_api", reason="the page's tests drive a browser through playwright")

from .browsing import CHROMIUM, TOKENS, ask, chromium, expect, histogram, pages
from .page_mock import MARKUP, TIDES, Mock, chunks, pieces, serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: install Debian's chromium")

# Of every visible element with a text of its own: contrast of its colour with what lies behind it, where below 4.5.
LOW_CONTRAST = """() => {
  const rgba = (css) => css.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgba(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")]
    .filter((node) => node.checkVisibility() && [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim()))
    .map((node) => {
      const [a, b] = [light(rgba(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), node.tagName, node.className, node.textContent.slice(0, 30)];
    })
    .filter(([ratio]) => ratio < 4.5);
}"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def mock():
    with serving(Mock()) as mock:
        yield mock


@pytest.fixture
def open_page(browser, mock):
    with pages(browser, mock) as open_page:
        yield open_page


@pytest.fixture
def page(open_page):
    return open_page()


def coloured(text, speculation):
    """The spans that an answer should have."""
    tokens = [token for chunk in chunks(text, speculation) for token in chunk]
    return [[t["text"].lstrip(), "drafted" if t["drafted"] else "own"] for t in tokens if t["text"].strip()]


def test_tokens_come_in_order_and_coloured(page, mock):
    turn = ask(page, "Why tides?")
    assert turn.evaluate(TOKENS) == [coloured(TIDES, True)]
    assert turn.locator(".tokens").evaluate("(t) => t.textContent") == TIDES
    body = mock.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "Why tides?"}]
    assert (body["model"], body["stream"], body["stream_options"]) == ("embedded-pair", True, {"include_usage": True})
    assert body["return_token_sources"]
    assert body["speculation"]
    assert not {"temperature", "top_p", "max_tokens", "seed", "chat_template_kwargs"} & set(body)


def test_the_readout_shows_speed_and_histogram(page):
    turn = ask(page, "Why tides?")
    rounds = [sum(t["drafted"] for t in chunk) for chunk in list(chunks(TIDES, True))[1:]]
    assert histogram(page) == [rounds.count(k) for k in range(8)]
    assert page.locator("#length-0").inner_text() == f"{1 + sum(rounds) / len(rounds):.2f}"
    assert page.locator("#first-0").inner_text() == "34 ms"
    assert page.locator("#count-0").inner_text() == str(len(pieces(TIDES)))
    for figure in ("#now", "#mean-0"):
        assert float(page.locator(figure).inner_text().replace(",", "")) > 0
    expect(turn.locator(".note")).to_contain_text(f"{len(pieces(TIDES))} tokens")
    expect(turn.locator(".note")).to_contain_text("ended at the token limit")
    widths = page.locator(".bar").evaluate_all("(bars) => bars.map((bar) => bar.getBoundingClientRect().width)")
    assert widths.index(max(widths)) == 7


def test_the_histogram_is_live(page):
    ask(page, "endless", wait=False)
    page.wait_for_function("() => document.querySelectorAll('#histogram tr').length > 6")
    assert page.locator("#go").inner_text() == "Stop"
    page.wait_for_function("() => parseFloat(document.getElementById('now').textContent) > 0")
    page.wait_for_function("() => parseFloat(document.getElementById('length-0').textContent) > 1")
    page.keyboard.press("Escape")
    expect(page.locator("#go")).to_have_text("Send")


@pytest.mark.parametrize("how", ["escape", "button", "new chat"])
def test_stopping_closes_the_connection(page, mock, how):
    turn = ask(page, "endless", wait=False)
    expect(turn.locator(".own").nth(2)).to_be_visible()
    if how == "escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop" if how == "button" else "New chat").click()
    assert mock.aborted.wait(10)
    expect(page.locator("#go")).to_have_text("Send")
    if how == "new chat":
        expect(page.locator(".turn")).to_have_count(0)
    else:
        expect(turn.locator(".note")).to_contain_text("stopped")
    ask(page, "Why tides?")
    kept = [] if how == "new chat" else ["user", "assistant"]
    assert [message["role"] for message in mock.bodies[-1]["messages"]] == [*kept, "user"]


def test_a_comparison_shows_both_beside_each_other(page, mock):
    page.locator("#compare").check()
    turn = ask(page, "Why tides?")
    assert turn.evaluate(TOKENS) == [coloured(TIDES, True), coloured(TIDES, False)]
    assert [body["speculation"] for body in mock.bodies] == [True, False]
    assert mock.bodies[0]["seed"] == mock.bodies[1]["seed"]
    first, second = (answer.bounding_box() for answer in turn.locator(".answer").all())
    assert first["x"] + first["width"] <= second["x"]
    expect(page.locator("#ratio")).to_have_text(re.compile(r"^[\d.,]+×$"))
    expect(page.locator("#same")).to_have_text("the speed, same text")
    for figure in ("#mean-0", "#mean-1"):
        assert float(page.locator(figure).inner_text().replace(",", "")) > 0
    page.locator("#compare").uncheck()
    ask(page, "And now?")
    expect(page.locator("#verdict")).to_be_hidden()
    expect(page.locator("#mean-1")).to_be_hidden()
    assert [message["role"] for message in mock.bodies[-1]["messages"]] == ["user", "assistant", "user"]


def test_a_stopped_comparison_does_not_run_its_second_half(page, mock):
    page.locator("#compare").check()
    turn = ask(page, "endless", wait=False)
    expect(turn.locator(".own").nth(2)).to_be_visible()
    page.keyboard.press("Escape")
    expect(turn.locator(".note").last).to_have_text("not run")
    assert len(mock.bodies) == 1


def test_shift_enter_breaks_the_line(page, mock):
    page.locator("#prompt").focus()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(page.locator(".prompt")).to_have_text("one\ntwo")
    expect(page.locator("#go")).to_have_text("Send")
    assert mock.bodies[0]["messages"][0]["content"] == "one\ntwo"


@pytest.mark.parametrize("text", ["markup", MARKUP])
def test_markup_stays_text(page, text):
    turn = ask(page, text)
    for colours in (True, False):
        page.locator("#colours").set_checked(colours)
        assert turn.locator("img, script, b").count() == 0
    if text == "markup":
        assert turn.locator(".plain").evaluate("(t) => t.textContent") == MARKUP
        assert turn.locator(".tokens").evaluate("(t) => t.textContent") == MARKUP


def test_without_colours_the_parsed_text_is_shown(page):
    turn = ask(page, "think")
    expect(turn.locator(".tokens")).to_have_text("<think> Hm, so. </think> Yes.")
    expect(turn.locator(".plain")).to_be_hidden()
    page.locator("#colours").uncheck()
    expect(turn.locator(".tokens")).to_be_hidden()
    expect(turn.locator(".plain > .text")).to_have_text("Yes.")
    expect(turn.locator(".reasoning .text")).to_be_hidden()
    turn.locator(".reasoning summary").click()
    expect(turn.locator(".reasoning .text")).to_have_text("Hm, so.")
    page.reload()
    expect(page.locator("#colours")).not_to_be_checked()


def test_long_answers_are_cut_into_blocks_and_followed(page):
    turn = ask(page, "long")
    assert turn.locator(".block").count() > 5
    assert turn.locator(".tokens").evaluate("(t) => t.textContent") == "\n".join(f"line {i}" for i in range(700)) + "\n"
    expect(turn.locator(".note")).to_be_in_viewport()


def test_an_error_is_shown_and_the_prompt_given_back(page, mock):
    turn = ask(page, "too hot")
    expect(turn.get_by_role("alert")).to_have_text("temperature is 9: give 0 to 2.")
    expect(page.locator("#prompt")).to_have_value("too hot")
    page.locator("#prompt").fill("")
    ask(page, "Why tides?")
    assert len(mock.bodies[-1]["messages"]) == 1


def test_an_error_inside_the_stream_is_shown_after_the_text(page):
    turn = ask(page, "broken")
    expect(turn.get_by_role("alert")).to_have_text("The engine stopped.")
    expect(turn.locator(".note")).to_contain_text("incomplete")
    assert turn.evaluate(TOKENS)[0] == coloured(TIDES, True)[: len(turn.evaluate(TOKENS)[0])] != []


def test_a_full_queue_is_an_error(page, mock):
    mock.queue_full = True
    expect(ask(page, "Why tides?").get_by_role("alert")).to_have_text("The queue is full.")


def test_a_loading_model_is_waited_for(page, mock):
    mock.loading = 3
    turn = ask(page, "Why tides?", wait=False)
    expect(page.locator("#status")).to_contain_text("The model is loading")
    expect(page.locator("#go")).to_have_text("Send", timeout=15_000)
    assert turn.evaluate(TOKENS) == [coloured(TIDES, True)]


def test_waiting_for_a_loading_model_can_be_stopped(page, mock):
    mock.loading = 10_000
    turn = ask(page, "Why tides?", wait=False)
    expect(page.locator("#status")).to_contain_text("The model is loading")
    page.keyboard.press("Escape")
    expect(turn.locator(".note")).to_have_text("stopped")
    assert len(mock.bodies) == 1


def test_a_key_is_asked_for_and_forgotten_with_the_tab(open_page, mock):
    mock.api_key = "open sesame"
    page = open_page()
    expect(page.locator("#settings")).to_be_visible()
    expect(page.locator("#key-needed")).to_contain_text("The key is missing")
    expect(page.locator("#api_key")).to_be_focused()
    page.keyboard.type("open sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#model-name")).to_have_text("embedded-pair")
    assert ask(page, "Why tides?").evaluate(TOKENS) == [coloured(TIDES, True)]
    stored = page.evaluate("() => [JSON.stringify({...localStorage}), sessionStorage.api_key]")
    assert "sesame" not in stored[0] + str(page.context.cookies())
    assert stored[1] == "open sesame"


def test_a_model_without_chat_template_completes_text(open_page, mock):
    mock.chat_template = False
    page = open_page()
    expect(page.get_by_label("Complete")).to_be_checked()
    turn = ask(page, "The tide")
    assert mock.bodies[0]["prompt"] == "The tide"
    assert mock.bodies[0]["max_tokens"] == 256
    assert turn.evaluate(TOKENS) == [coloured(TIDES, True)]
    page.locator("#colours").uncheck()
    expect(turn.locator(".plain > .text")).to_have_text(TIDES, use_inner_text=True)


def test_completing_is_offered_when_the_server_cannot_chat(open_page, mock):
    mock.chat_template = mock.says_chat_template = False
    page = open_page()
    turn = ask(page, "The tide")
    expect(turn.get_by_role("alert")).to_contain_text("no chat template")
    turn.get_by_role("button", name="Switch to Complete").press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".turn").nth(1).locator(".drafted").first).to_be_visible()
    expect(page.locator("#go")).to_have_text("Send")
    assert mock.bodies[-1]["prompt"] == "The tide"


def test_settings_reach_the_request_and_are_kept(page, mock):
    page.get_by_role("button", name="Settings").press("Enter")
    fields = {"temperature": "0.5", "top_p": "0.9", "max_tokens": "64", "seed": "7", "system": "Be kind."}
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)
    page.locator("#thinking").select_option("off")
    page.locator("#done").press("Enter")
    page.reload()
    ask(page, "Why tides?")
    body = mock.bodies[0]
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.5, 0.9, 64, 7)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["messages"][0] == {"role": "system", "content": "Be kind."}


def test_every_control_is_reached_by_tab_and_shows_its_focus(page):
    wanted = {"new", "open-settings", "theme", "talk", "colours", "prompt", "mode", "compare", "go"}
    expect(page.locator("#prompt")).to_be_focused()
    focus = """() => [document.activeElement.id || document.activeElement.name,
      getComputedStyle(document.activeElement).outlineStyle]"""
    reached = set()
    for _ in range(12):
        name, outline = page.evaluate(focus)
        reached.add(name)
        assert not name or outline == "solid", name
        page.keyboard.press("Tab")
    assert wanted <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_are_readable(open_page, scheme, tmp_path):
    page = open_page(color_scheme=scheme, viewport={"width": 1280, "height": 820})
    page.locator("#compare").check()
    ask(page, "Why tides?")
    page.screenshot(path=tmp_path / f"page_{scheme}.png")
    page.locator("#prompt").fill("")
    ask(page, "too hot")
    assert page.evaluate(LOW_CONTRAST) == []
    page.locator("#open-settings").click()
    assert page.evaluate(LOW_CONTRAST) == []


def test_the_theme_can_be_chosen(open_page):
    page = open_page(color_scheme="light")
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    button = page.get_by_role("button", name="Theme")
    button.click()
    assert (button.inner_text(), page.evaluate(ground)) == ("Theme: light", light)
    button.click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert (button.inner_text(), page.evaluate(ground)) == ("Theme: dark", dark)
    button.click()
    assert (button.inner_text(), page.evaluate(ground)) == ("Theme: auto", light)


def test_colour_is_not_the_only_sign(page):
    turn = ask(page, "Why tides?")
    line = "(span) => getComputedStyle(span).backgroundImage"
    assert "gradient" in turn.locator(".drafted").first.evaluate(line)
    assert turn.locator(".own").first.evaluate(line) == "none"
    page.emulate_media(forced_colors="active")
    assert "underline" in turn.locator(".drafted").first.evaluate("(span) => getComputedStyle(span).textDecorationLine")


@pytest.mark.parametrize("size", [(360, 720), (320, 256)])
def test_a_phone_scrolls_one_way_only(open_page, size, tmp_path):
    page = open_page(viewport={"width": size[0], "height": size[1]}, has_touch=True)
    page.locator("#compare").check()
    turn = ask(page, "x" * 200)
    page.screenshot(path=tmp_path / "page_narrow.png")
    wider = """() => [...document.querySelectorAll("html, main, aside")]
      .filter((node) => node.scrollWidth > node.clientWidth).length"""
    assert page.evaluate(wider) == 0
    page.locator("#more").evaluate("(more) => (more.open = true)")
    assert page.evaluate(wider) == 0
    first, second = (answer.bounding_box() for answer in turn.locator(".answer").all())
    assert second["y"] >= first["y"] + first["height"]
    page.locator("#open-settings").click()
    assert page.locator("#settings").evaluate("(d) => d.scrollWidth <= d.clientWidth")


def test_bars_stand_still_when_asked(page):
    page.emulate_media(reduced_motion="reduce")
    ask(page, "Why tides?")
    assert page.locator(".bar").first.evaluate("(bar) => getComputedStyle(bar).transitionDuration") == "0s"


def test_the_mock_keeps_the_contract(mock):
    """Sums agree, as they must in the server: see ecosystem.md 1.6."""
    import httpx

    body = {"model": "m", "prompt": "x", "stream": True, "speculation": True}
    lines = httpx.post(f"{mock.url}/v1/completions", json=body).text.split("\n\n")
    last = json.loads(lines[-3].removeprefix("data: "))
    spec = last["metrics"]["speculative_decoding"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    assert sum(j * n for j, n in enumerate(spec["acceptance_histogram"])) == spec["num_accepted_draft_tokens"]
