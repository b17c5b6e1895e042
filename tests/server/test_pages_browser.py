"""The pages in Chromium: live progress, keys, no faults, no sideways scrolling, contrast in both themes, screenshots.

LOSPMM_TEST_SCREENSHOTS names a folder for the screenshots.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from lospmm.artifact.artifact import Artifact
from lospmm.store import Store
from lospmm_server.faults import DatabaseFault
from lospmm_server.queries import JobRow
from tests.server.page_service import (
    NOON,
    FakeView,
    a_model,
    app_of,
    digest_of,
    listening,
    problem,
    timed,
    tuned,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
]

AUDIT = (Path(__file__).parent / "audit.js").read_text()

KERNEL, RUNNING, MODEL, FAILED = (digest_of(name) for name in ("kernel", "running", "model", "failed"))

PAGES = {
    "jobs": "/",
    "running": f"/jobs/{RUNNING}",
    "model": f"/jobs/{MODEL}",
    "failed": f"/jobs/{FAILED}",
    "kernel": f"/kernels/{KERNEL}",
    "two": f"/kernels/{KERNEL}/beside?other={RUNNING}",
    "nothing": "/nothing",
    "manual": "/manual/",
    "reference": "/manual/manifest.md",
    "figures": "/manual/decisions/0008-code-is-the-traffic.md",
}

WINDOWS = {"wide": {"width": 1280, "height": 900}, "narrow": {"width": 360, "height": 740}}
THEMES = ("light", "dark")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return timed(tuned(Store(tmp_path_factory.mktemp("store")), m=160, k=96, n=2000))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def view(kernel: Artifact) -> FakeView:
    running = JobRow(
        id=RUNNING,
        kind="kernel",
        state="running",
        created=NOON,
        started=NOON,
        stage="compile",
        progress={"reorder": (1, 1), "compile": (12, 64)},
        request={"m": 160, "k": 96, "nnz": 3072, "n": 2000, "device": {"name": "h200"}},
    )
    failed = replace(running, id=FAILED, state="failed", error=problem("W.npz: truncated"), ended=NOON)
    model = a_model(KERNEL)
    return FakeView({job.id: job for job in (running, model, failed)}, {KERNEL: kernel, RUNNING: kernel})


@pytest.fixture
def site(view: FakeView) -> Iterator[str]:
    with listening(app_of(view)) as url:
        yield url


@pytest.fixture
def context(browser: Browser, site: str) -> Iterator[BrowserContext]:
    context = browser.new_context(base_url=site)
    context.set_default_timeout(15_000)
    yield context
    context.close()


@pytest.fixture
def faults(context: BrowserContext) -> list[str]:
    """What the browser complains of; a page that is not there is one, too."""
    found: list[str] = []
    context.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    context.on("weberror", lambda error: found.append(str(error.error)))
    return found


@pytest.fixture
def page(context: BrowserContext, faults: list[str]) -> Iterator[Page]:
    yield context.new_page()
    assert faults == []


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("window", WINDOWS)
def test_pages_can_be_read_by_everybody(
    context: BrowserContext, faults: list[str], tmp_path: Path, window: str, theme: str
) -> None:
    folder = Path(os.environ.get("LOSPMM_TEST_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    page = context.new_page()
    page.set_viewport_size(WINDOWS[window])  # type: ignore[arg-type]
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    backgrounds = set()
    for name, path in PAGES.items():
        answer = page.goto(path)
        assert answer is not None and answer.status == (404 if name == "nothing" else 200)
        for details in page.locator("details").all():
            details.locator("summary").click()
        assert page.evaluate(AUDIT) == [], name
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        shot = folder / f"{name}-{window}-{theme}.png"
        page.screenshot(path=shot, full_page=True)
        assert shot.read_bytes().startswith(b"\x89PNG")
    assert backgrounds == {"rgb(255, 255, 255)" if theme == "light" else "rgb(20, 23, 26)"}
    assert [fault for fault in faults if "404 (Not Found)" not in fault] == []
    assert len(faults) == 1  # the page that is not there


def test_the_audit_finds_what_is_wrong(page: Page) -> None:
    page.goto("/")
    page.evaluate(
        """() => {
            const main = document.querySelector("main");
            const add = (tag, fields) => main.appendChild(Object.assign(document.createElement(tag), fields));
            add("h4", {textContent: "jump"});
            add("input", {});
            add("a", {href: "/"});
            add("div", {textContent: "wide"}).style.width = "5000px";
            add("p", {textContent: "pale"}).style.color = "#bbb";
        }"""
    )
    found = "\n".join(page.evaluate(AUDIT))
    for words in ("heading jumps to 4", "no label: <input>", 'no name: <a href="/">', "5", "contrast 1.9", "pixels in"):
        assert words in found


def test_progress_is_live_until_the_kernel_is_there(page: Page, view: FakeView) -> None:
    page.goto(f"/jobs/{RUNNING}")
    status, bar = page.get_by_role("status"), page.get_by_role("progressbar", name="compile")
    expect(status).to_have_text("Running: compile.")
    expect(bar).to_have_js_property("value", 12)
    until(lambda: view.listeners == 1)
    view.change(RUNNING, progress={"reorder": (1, 1), "compile": (40, 64)})
    expect(bar).to_have_js_property("value", 40)
    view.change(RUNNING, stage="verify", progress={"reorder": (1, 1), "compile": (64, 64), "verify": (0, 1)})
    expect(status).to_have_text("Running: verify.")
    view.change(RUNNING, state="succeeded", ended=NOON + timedelta(seconds=5))
    expect(status).to_have_text("Succeeded.")
    expect(page.get_by_role("img", name="The tiling space")).to_be_visible()
    expect(page).to_have_title(f"Kernel {RUNNING[:12]}: succeeded \u2013 lospmm")
    until(lambda: view.listeners == 0)
    assert page.evaluate(AUDIT) == []


def test_a_model_that_ends_can_be_downloaded_and_no_longer_cancelled(page: Page, view: FakeView) -> None:
    view.change(MODEL, state="running")
    page.goto(f"/jobs/{MODEL}")
    until(lambda: view.listeners == 1)
    cancel, download = page.get_by_role("button", name="Cancel"), page.get_by_role("link", name="Download all kernels")
    expect(cancel).to_be_visible()
    expect(download).to_be_hidden()
    view.change(MODEL, state="succeeded")
    expect(download).to_be_visible()
    expect(cancel).to_be_hidden()


def test_the_list_follows_too(page: Page, view: FakeView) -> None:
    page.goto("/")
    row = page.get_by_role("row").filter(has_text=RUNNING[:12])
    expect(row).to_contain_text("12 of 64")
    link = page.get_by_role("link", name=f"Kernel {RUNNING[:12]}")
    link.focus()
    view.change(RUNNING, progress={"compile": (50, 64)})
    expect(row).to_contain_text("50 of 64")
    expect(link).to_be_focused()
    view.change(RUNNING, state="cancelled")
    view.change(MODEL, state="succeeded")
    expect(page.get_by_role("status")).to_have_text("3 shown, 0 of them not done yet.")
    expect(page.locator("#live")).not_to_have_attribute("data-poll", "2000")


def test_the_list_follows_behind_a_refused_form(context: BrowserContext, view: FakeView, tmp_path: Path) -> None:
    page = context.new_page()
    page.goto("/")
    (tmp_path / "W.npy").write_bytes(b"a matrix")
    page.get_by_label("Pruned weight matrix").set_input_files(tmp_path / "W.npy")
    page.locator("#matrix-n").evaluate("box => { box.type = 'text'; box.value = 'many'; }")
    page.locator("#matrix-n").press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()
    view.change(RUNNING, progress={"compile": (50, 64)})
    expect(page.get_by_role("row").filter(has_text=RUNNING[:12])).to_contain_text("50 of 64")


def test_a_service_that_comes_back_is_found_again(context: BrowserContext, view: FakeView, faults: list[str]) -> None:
    page = context.new_page()
    page.goto(f"/jobs/{RUNNING}")
    until(lambda: view.listeners == 1)
    view.fault = DatabaseFault("the database is away")
    view.change(RUNNING, progress={"compile": (50, 64)})
    expect(page.get_by_role("status")).to_have_text("The service does not answer; trying again.")
    expect(page.get_by_role("progressbar", name="compile")).to_have_js_property("value", 12)
    view.fault = None
    expect(page.get_by_role("progressbar", name="compile")).to_have_js_property("value", 50)
    expect(page.get_by_role("status")).to_have_text("Running: compile.")
    assert all("503 (Service Unavailable)" in fault for fault in faults)


def test_without_the_script_a_link_refreshes(browser: Browser, site: str, view: FakeView) -> None:
    context = browser.new_context(base_url=site, java_script_enabled=False)
    page = context.new_page()
    page.goto(f"/jobs/{RUNNING}")
    view.change(RUNNING, progress={"compile": (50, 64)})
    page.get_by_role("link", name="Refresh").click()
    expect(page.locator("#live")).to_contain_text("50 of 64")
    assert view.listeners == 0
    context.close()


def test_a_matrix_is_posted_with_keys_alone(page: Page, view: FakeView, tmp_path: Path) -> None:
    matrix = tmp_path / "W.npy"
    matrix.write_bytes(b"a matrix")
    page.goto("/")
    page.get_by_label("Pruned weight matrix").set_input_files(matrix)
    page.get_by_label("Pruned weight matrix").focus()
    for text in ("", "64", "H200", "float16", "int8", "spmv", ""):  # tensor, columns, device, types, kernels, button
        page.keyboard.press("Tab")
        page.keyboard.type(text)
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_have_text("Queued.")
    [(name, content, query)] = view.submitted
    assert (name, content, query.n, query.device) == ("W.npy", b"a matrix", 64, "h200")
    assert (query.dtype, query.values, query.families) == ("float16", "int8", "spmv")
    assert page.url.endswith(f"/jobs/{next(iter(view.found))}")


@pytest.mark.parametrize("name", ["jobs", "model", "kernel"])
def test_keys_reach_everything_in_order_and_show_where_they_are(page: Page, name: str) -> None:
    page.goto(PAGES[name])
    for summary in page.locator("summary").all():
        summary.click()
    page.evaluate("document.activeElement.blur(); window.getSelection().removeAllRanges(); window.scrollTo(0, 0)")
    page.reload()
    expected = page.evaluate(
        """() => [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")]
            .filter((element) => element.checkVisibility())
            .map((element) => element.outerHTML)"""
    )
    reached = []
    for _ in expected:
        page.keyboard.press("Tab")
        html, outline = page.evaluate(
            """() => {
                const style = getComputedStyle(document.activeElement);
                return [document.activeElement.outerHTML, `${style.outlineStyle} ${style.outlineWidth}`];
            }"""
        )
        reached.append(html)
        assert outline == "solid 3px", html[:100]
    assert reached == expected


def test_the_skip_link_leads_past_the_navigation(page: Page) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "matrix"


def test_the_policy_stops_scripts_and_styles_in_a_page(context: BrowserContext, faults: list[str]) -> None:
    page = context.new_page()
    page.goto("/")
    page.evaluate(
        """() => {
            const add = (tag, text) =>
                document.body.appendChild(Object.assign(document.createElement(tag), {textContent: text}));
            add("script", "window.ran = true");
            add("style", "body { display: none }");
        }"""
    )
    assert page.evaluate("[window.ran, getComputedStyle(document.body).display]") == [None, "block"]
    assert len(faults) == 2 and all("Content Security Policy" in fault for fault in faults)


def test_swagger_ui_shows_the_routes_under_the_policy(page: Page) -> None:
    """A file of another site, or anything that the policy stops, would be a fault on the console."""
    page.goto("/docs")
    route = page.locator(".opblock-summary").filter(has_text="/v1/kernels/{digest}/cubin")
    expect(route).to_be_visible()
    route.click()
    page.get_by_role("button", name="Try it out").click()
    expect(page.get_by_role("button", name="Execute")).to_be_visible()
