"""The chat page in headless Chromium, against the real server with a tiny pair."""

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_server import Running, printable_pair, serving
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

LIMIT_S = 60
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(printable_pair(tmp_path_factory.mktemp("page") / "pair"), api_key="secret", max_rows=2) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1200,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """The page, loaded anew, with the key and without the conversation of the test before."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        browser.get(url)
        browser.execute_script("window.removeEventListener('pagehide', store); sessionStorage.clear()")
        browser.refresh()
        self.until(lambda: "valid API key" in self.text("#alert"))  # refused without one
        self.one("#key").send_keys("secret", Keys.TAB)
        self.until(lambda: self.text("#model") == "tiny" and not self.text("#alert"))
        # The answers are random characters, among them marks of Markdown.
        browser.execute_script("document.getElementById('markdown').checked = false")

    def one(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.one(selector).get_property("textContent"))

    def until(self, condition: Callable[[], object]) -> None:
        WebDriverWait(self.browser, LIMIT_S, 0.02).until(lambda _: condition())

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.browser).send_keys(*keys).perform()

    def focused(self) -> Any:
        return self.browser.execute_script("const e = document.activeElement; return e.id || e.value || e.textContent")

    def ask(self, message: str, tokens: int = 40) -> None:
        self.browser.execute_script("document.getElementById('limit').value = arguments[0]", tokens)
        self.one("#message").send_keys(message, Keys.ENTER)

    def answered(self, count: int) -> None:
        self.until(lambda: len(self.all(".assistant .figures")) == count and self.one("#send").is_enabled())

    def converse(self, message: str, answers: int, tokens: int = 40) -> None:
        """Ask, and wait for the answer, after which there are `answers`."""
        self.ask(message, tokens)
        self.answered(answers)

    def counts(self) -> dict[str, int]:
        return {origin: int(self.text(f"#{origin}-count")) for origin in ("target", "draft", "lookup")}


@pytest.fixture
def page(browser: webdriver.Chrome, server: Running) -> Page:
    return Page(browser, server.url)


def test_tokens_are_marked_by_origin_and_the_last_tree_is_shown(page: Page, browser: webdriver.Chrome) -> None:
    page.converse("ab" * 20, answers=1)
    counts = page.counts()
    assert counts["draft"] > 0 and counts["lookup"] == 0 and sum(counts.values()) == 40
    marked = {origin: page.all(f".said .{origin}") for origin in counts}
    assert sum(len(str(e.get_property("textContent"))) for e in marked["draft"]) == counts["draft"]
    assert marked["draft"][0].value_of_css_property("text-decoration-line") == "underline"
    assert "none" in marked["target"][0].value_of_css_property("text-decoration-line")
    assert float(page.text("#acceptance")) > 1 and float(page.text("#speed")) > 0
    assert page.text("#status") == "Answer: " + page.text(".assistant .said")
    button = page.one(".tree")
    assert button.get_attribute("aria-expanded") == "false"
    button.click()
    assert button.get_attribute("aria-expanded") == "true" and page.one(".round").is_displayed()
    proposed, accepted = (int(word) for word in page.text(".round p").split() if word.isdigit())
    assert len(page.all(".round .node.on")) == accepted and len(page.all(".round .node")) >= proposed + 1
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert all("401" in error for error in errors), "something that the policy of the page forbids"


def test_the_switch_turns_speculation_off_and_the_answer_stays(page: Page) -> None:
    page.converse("ab" * 20, answers=1)
    first = page.text(".assistant .said")
    page.one("#reset").click()
    page.browser.execute_script("document.querySelector('[value=speculate]').focus()")
    page.press(Keys.LEFT)
    assert page.focused() == "vanilla"
    page.converse("ab" * 20, answers=1)
    assert page.text(".assistant .said") == first and page.counts() == {"target": 40, "draft": 0, "lookup": 0}
    assert float(page.text("#acceptance")) == 1 and not page.all(".tree")
    assert float(page.text("#ratio")) > 0  # of the answer before, with speculation
    page.one("#method").click()
    page.one(".retry").click()
    page.answered(1)
    assert len(page.all(".turn")) == 2 and page.counts()["draft"] > 0
    assert f"{page.text('#ratio')} × vanilla" in page.text(".figures")


def test_the_keyboard_reaches_everything_in_reading_order(page: Page) -> None:
    page.converse("hi", answers=1, tokens=6)
    page.browser.execute_script("document.querySelector('.skip').focus()")
    order = []
    for _ in range(7):
        page.press(Keys.TAB)
        order.append(page.focused())
    assert order == ["speculate", "log", "Copy", "Retry", "Last proposed tree", "message", "send"]
    named = page.all("input, textarea, button, section, aside, fieldset")
    assert all(element.accessible_name for element in named if element.is_displayed())
    live = {element.get_attribute("id"): element.aria_role for element in page.all("[role]")}
    assert live["alert"] == "alert" and live["status"] == "status"


def test_stop_ends_the_answer_and_the_conversation_goes_on(page: Page, server: Running) -> None:
    before = server.scheduler.snapshot().finished.get("cancelled", 0)
    page.ask("ab", tokens=4000)
    page.until(lambda: page.all(".assistant .said span"))
    page.press(Keys.ESCAPE)
    page.answered(1)
    page.until(lambda: server.scheduler.snapshot().finished.get("cancelled", 0) == before + 1)
    assert "stopped" in page.text(".assistant .figures") and page.focused() == "message"
    page.converse("more", answers=2, tokens=5)
    page.one("#reset").click()
    assert not page.all(".turn")


def test_a_failure_leaves_no_bubble_and_can_be_retried(page: Page) -> None:
    """An answer at the limit is marked; an example is sent."""
    page.ask("hello", tokens=100000)
    page.until(lambda: "more than the 4096 positions" in page.text("#alert"))
    assert page.one("#message").get_property("value") == "hello" and not page.all(".turn")
    assert page.one(".welcome").is_displayed()
    page.converse("", answers=1, tokens=5)  # what stands there is sent again
    assert [turn.text for turn in page.all(".user .said")] == ["hello"] and not page.text("#alert")
    assert page.text(".note") == "cut at 5 tokens" and not page.one(".welcome").is_displayed()
    page.one("#reset").click()
    text = page.one(".example").text
    page.one(".example").click()
    page.answered(1)
    assert page.one(".user .said").text == text


def test_a_reload_keeps_the_conversation(page: Page, browser: webdriver.Chrome) -> None:
    """Also an answer that was still arriving, and the key."""
    page.converse("ab" * 20, answers=1)
    page.ask("more", tokens=3000)
    page.until(lambda: len(page.all(".assistant")) == 2 and page.all(".assistant:last-child .said span"))
    before = [turn.get_attribute("class") for turn in page.all(".turn")]
    first = page.one(".assistant .said").get_attribute("innerHTML")
    browser.refresh()
    page.answered(2)
    assert [turn.get_attribute("class") for turn in page.all(".turn")] == before
    assert page.one(".assistant .said").get_attribute("innerHTML") == first
    assert [note.text for note in page.all(".note")] == ["cut at 40 tokens", "incomplete"]
    page.until(lambda: page.text("#model") == "tiny")
    page.converse("and more", answers=3, tokens=5)
    page.one("#reset").click()
    browser.refresh()
    assert not page.all(".turn")


MARKDOWN = """Some **bold**, *soft*, `a_b * c`, [a link](https://example.org/), [none](javascript:alert(1)).

1. one
   - two

```python
def f():

    return "<b>"
```
| a | b |
|---|---|
| 1 | <img src=x onerror=alert(1)> |
"""
RENDERED = (
    "<p>Some <strong>bold</strong>, <em>soft</em>, <code>a_b * c</code>, "
    '<a href="https://example.org/" target="_blank" rel="noopener noreferrer">a link</a>, '
    "[none](javascript:alert(1)).</p>"
    '<ol start="1"><li>one<ul><li>two</li></ul></li></ol>'
    '<div class="code"><div class="code-head">python<button class="link copy" type="button">Copy</button></div>'
    '<pre tabindex="0"><code>def f():\n\n    return "&lt;b&gt;"</code></pre></div>'
    '<div class="table"><table><tr><th>a</th><th>b</th></tr>'
    "<tr><td>1</td><td>&lt;img src=x onerror=alert(1)&gt;</td></tr></table></div>"
)


@pytest.mark.parametrize("size", [1, 1000])
def test_markdown_is_shown_and_nothing_in_it_is_html(page: Page, size: int) -> None:
    """However the text is cut into tokens, which keep their marks."""
    tokens = [MARKDOWN[start : start + size] for start in range(0, len(MARKDOWN), size)]
    html = page.browser.execute_script(
        """document.getElementById("markdown").checked = true;
        const answer = Answer.start("speculate");
        arguments[0].forEach((text, number) => {
          answer.add({ tokens: [{ text, origin: ["draft", "lookup"][number % 2] }] });
          answer.show();
        });
        return answer.said.innerHTML;""",
        tokens,
    )
    assert re.sub("</?span.*?>", "", html) == RENDERED
    assert 'class="draft"' in html and ('class="lookup"' in html or size == 1000)
    lines = [mark.value_of_css_property("text-decoration-style") for mark in page.all(".said .lookup")]
    assert set(lines) <= {"dashed"}
    copied = "window.copied = []; navigator.clipboard.writeText = async (text) => { copied.push(text); }"
    page.browser.execute_script(copied)
    page.one(".code .copy").click()
    assert page.browser.execute_script("return copied") == ['def f():\n\n    return "<b>"']
