"""The page at /: its files, and what a person does with it, in headless Chromium where that is installed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ANSWER
from fake import PATIENCE, fake_model, says
from harness import Server, serving_model

from edgert.server.service import Settings

# Kinds of messages in the console that tell of something wrong; what Chromium thinks of forms is for debugging.
TOLD = ("error", "warning", "debug")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_files(server: Server) -> None:
    for path, kind in (
        ("/", "html"),
        ("/page/app.js", "javascript"),
        ("/page/style.css", "css"),
        ("/favicon.ico", "svg"),
    ):
        status, headers, data = server.raw("GET", path)
        assert status == 200
        assert kind in headers["content-type"]
        assert data
    assert "default-src 'none'" in server.raw("GET", "/")[1]["content-security-policy"]


@pytest.mark.parametrize(
    "name", ["../app.py", "..%2fapp.py", "app.py", "%2e%2e/app.py", "/etc/passwd", "index.html%00"]
)
def test_nothing_else_is_served(server: Server, name: str) -> None:
    assert server.raw("GET", f"/page/{name}")[0] == 404


def test_every_field_has_a_label(server: Server) -> None:
    html = server.raw("GET", "/")[2].decode()
    fields = re.findall(r'<(?:input|textarea|select)[^>]*\bid="(\w+)"', html)
    assert len(fields) >= 8
    assert set(fields) <= set(re.findall(r'<label for="(\w+)"', html))
    assert set(re.findall(r'\$\("([\w-]+)"\)', server.raw("GET", "/page/app.js")[2].decode())) <= set(
        re.findall(r'id="([\w-]+)"', html)
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(
        viewport={"width": 1100, "height": 750}, bypass_csp=True
    )  # for the tests' own scripts
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type in TOLD else None)
    page.set_default_timeout(1e3 * PATIENCE)
    yield page
    context.close()
    assert not [problem for problem in problems if "Failed to load resource" not in problem]


def test_a_chat(server: Server, page: Any) -> None:
    page.goto(server.url)
    page.wait_for_function("document.getElementById('model').value === 'fake'")
    assert "fake on none" in page.inner_text("#verdict")
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("Hi")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    page.wait_for_function("document.getElementById('status').textContent === 'Answered.'")
    turns = page.locator(".turn div")
    assert turns.nth(0).inner_text() == "Hi\nthere"
    assert turns.nth(1).inner_text() == ANSWER
    assert "tokens" in page.inner_text("#f-rate")
    assert page.inner_text("#f-context").endswith("of 2048")
    page.keyboard.type("And again")  # the field has the focus again
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.turn').length === 4")
    page.wait_for_function("document.getElementById('status').textContent === 'Answered.'")
    if folder := os.environ.get("EDGERT_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/page.png")
    page.click("#clear")
    assert page.locator(".turn").count() == 0


def test_the_pages_own_policy_lets_it_work(server: Server, browser: Any) -> None:
    page = browser.new_page()
    page.set_default_timeout(1e3 * PATIENCE)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in TOLD else None)
    page.goto(server.url)
    page.wait_for_selector("#model option", state="attached")
    page.fill("#message", "Hi")
    page.click("#send")
    page.wait_for_selector("#status:has-text('Answered.')")
    assert page.locator(".turn.assistant div").inner_text() == ANSWER
    assert not problems
    page.close()


def test_settings_are_sent_and_kept(server: Server, page: Any) -> None:
    page.goto(server.url)
    page.click("summary:has-text('Settings')")
    page.fill("#max_tokens", "5")
    page.fill("#system", "Be brief.")
    page.fill("#message", "Hi")
    page.click("#send")
    page.wait_for_function("document.getElementById('status').textContent === 'The answer reached its limit.'")
    assert page.locator(".turn.assistant div").inner_text() == ANSWER[:5]
    page.reload()
    assert page.input_value("#max_tokens") == "5"


@pytest.mark.parametrize("how", ["button", "key"])
def test_stopping(browser: Any, page: Any, how: str) -> None:
    with serving_model(fake_model(lambda tokens: ord("a"), n_ctx=100_000, delay=0.01)) as server:
        page.goto(server.url)
        page.fill("#message", "Hi")
        page.click("#send")
        page.wait_for_function("document.querySelector('.turn.assistant')?.textContent.length > 20")
        if how == "button":
            page.click("#stop")
        else:
            page.keyboard.press("Escape")
        page.wait_for_function("document.getElementById('status').textContent === 'Stopped.'")
        from harness import wait_for

        wait_for(lambda: not server.service.admission.inside)
        assert page.is_enabled("#send")


def test_errors_are_shown(page: Any) -> None:
    with serving_model(fake_model(says("ok"), n_ctx=64)) as server:
        page.goto(server.url)
        page.fill("#message", "x" * 200)
        page.evaluate("document.getElementById('ask').requestSubmit()")
        page.wait_for_selector(".error")
        assert "context size of 64" in page.inner_text(".error")


def test_markup_stays_text(page: Any) -> None:
    with serving_model(fake_model(says("<img src=x onerror=alert(1)>&amp;"))) as server:
        page.goto(server.url)
        page.fill("#message", "<b>bold</b>")
        page.click("#send")
        page.wait_for_function("document.getElementById('status').textContent === 'Answered.'")
        assert page.locator(".turn.user div").inner_text() == "<b>bold</b>"
        assert page.locator(".turn.assistant div").inner_text() == "<img src=x onerror=alert(1)>&amp;"
        assert page.locator("#log img, #log b").count() == 0


def test_a_key_is_asked_for(page: Any) -> None:
    with serving_model(fake_model(says("ok")), Settings(api_keys=("secret",))) as server:
        page.goto(server.url)
        page.wait_for_function("document.getElementById('status').textContent.includes('API key')")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_function("document.getElementById('model').value === 'fake'")
        page.fill("#message", "Hi")
        page.click("#send")
        page.wait_for_function("document.getElementById('status').textContent === 'Answered.'")
        assert page.locator(".turn.assistant div").inner_text() == "ok"


def test_enter_in_a_setting_stays_on_the_page(page: Any, server: Server) -> None:
    """A form sends its fields where the page came from, and loads it anew, unless it is kept from that."""
    page.goto(server.url)
    page.click("summary:has-text('Settings')")
    page.evaluate("window.here = true")
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    page.fill("#seed", "5")
    page.press("#seed", "Enter")
    page.wait_for_function("localStorage.getItem('edgert.seed') === '5'")
    assert page.evaluate("window.here && sessionStorage.getItem('edgert.key') === 'secret'")
    assert page.url.rstrip("/") == server.url.rstrip("/")


def test_a_narrow_window_shows_all(page: Any, server: Server) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    page.goto(server.url)
    page.wait_for_function("document.getElementById('verdict').textContent")
    page.evaluate("document.getElementById('verdict').textContent = 'a long verdict '.repeat(9)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
