"""The board's pages in Debian's Chromium: accessibility in light and dark, the keyboard, live changes, 5,000 GPUs."""

import contextlib
import re
import shutil
from collections.abc import AsyncIterator

import pytest
from axe_playwright_python.async_playwright import Axe
from board_world import PAGES, running, small_cluster
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_e2e.bench.installation import full_nodes
from carpool_e2e.binaries import FOR_BROWSER, install_packages
from carpool_extender.testing import gpu_node, seed_node
from playwright.async_api import Page, Route, async_playwright, expect
from rich.console import Console

pytestmark = pytest.mark.e2e

LIMIT_MS = 30_000
HIDE = """isHidden => {
    Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""
LISTEN = """() => new Promise(isOpen => {
    const source = new EventSource(document.body.dataset.events);
    window.heard = new Promise(isHeard => { source.onmessage = () => isHeard(); });
    source.onopen = () => isOpen();
})"""


@contextlib.asynccontextmanager
async def browsing(scheme: str = "light") -> AsyncIterator[Page]:
    """A page of a browser that fails the test on errors of scripts and of the content security policy."""
    install_packages(FOR_BROWSER, Console())
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = await browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 800})
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "security" in message.text.lower() else None)
        yield page
        await browser.close()
        assert errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_page_has_faults_of_accessibility(scheme):
    async with running(small_cluster()) as world, browsing(scheme) as page:
        for path in (*PAGES, "/nothing"):
            await page.goto(world.url + path)
            found = await Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            widths = "[document.documentElement.scrollWidth, innerWidth]"
            wide, window = await page.evaluate(widths)
            assert wide <= window


async def test_plan_is_legible_on_a_narrow_screen_and_its_pictures_are_dark_in_the_dark():
    """Regression: a sentence above the table was cut, and the pictures stayed white."""
    async with running(small_cluster()) as world, browsing("dark") as page:
        await page.set_viewport_size({"width": 420, "height": 800})
        await page.goto(f"{world.url}/plan")
        found = await page.get_by_text("changes are against the first line").bounding_box()
        assert found["x"] + found["width"] <= 420
        picture = page.get_by_role("link", name="utilization").locator("img")
        assert "invert" in await picture.evaluate("image => getComputedStyle(image).filter")


async def test_tenants_are_legible_on_a_phone():
    """Regression: names of tenants were cut at the right edge."""
    async with running(small_cluster()) as world, browsing() as page:
        await page.set_viewport_size({"width": 390, "height": 800})
        await page.goto(world.url)
        table = page.get_by_role("region", name="Table of GPUs")
        wide, shown = await table.evaluate("one => [one.scrollWidth, one.clientWidth]")
        assert wide <= shown
        await page.goto(f"{world.url}/jobs/default/small-a")
        assert re.findall(r"\d\.\d{4,}", await page.locator("main").inner_text()) == [], "more digits than measured"


async def test_keyboard_reaches_jobs_and_keeps_its_place_while_the_page_changes():
    async with running(small_cluster()) as world, browsing() as page:
        await page.goto(world.url)
        await page.keyboard.press("Tab")
        await expect(page.get_by_text("Skip to content")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("main")).to_be_focused()
        link = page.get_by_role("link", name="default/small-b")
        for _ in range(9):
            await page.keyboard.press("Tab")
            if await link.evaluate("link => link === document.activeElement"):
                break
        await expect(link).to_be_focused()
        await expect(page.get_by_role("status")).to_have_text("live")
        seed_node(world.kube, gpu_node("appears", 1))
        await expect(page.get_by_text("appears")).to_be_visible(timeout=LIMIT_MS)
        await expect(link).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_have_text("default/small-b")


async def test_page_shows_a_change_that_came_while_it_was_fetched():
    async with running(small_cluster()) as world, browsing() as page:
        await page.goto(world.url)
        await expect(page.get_by_role("status")).to_have_text("live")

        async def change(route: Route) -> None:
            answer = await route.fetch()
            await page.evaluate(LISTEN)
            seed_node(world.kube, gpu_node("appears", 1))
            await page.evaluate("heard")
            await route.fulfill(response=answer)

        await page.route(f"{world.url}/", change, times=1)
        seed_node(world.kube, gpu_node("comes-first", 1))
        await expect(page.get_by_text("appears")).to_be_visible(timeout=LIMIT_MS)


async def test_seventh_tab_loads_and_a_hidden_one_is_current_once_shown():
    async with running(small_cluster()) as world, browsing() as page:
        await page.goto(world.url)
        first, tab = page, page
        for _ in range(6):
            await expect(tab.get_by_role("status")).to_have_text("live")
            await tab.evaluate(HIDE, True)
            async with first.expect_popup() as opened:
                await first.evaluate("() => { open('/'); }")
            tab = await opened.value
        await expect(tab.get_by_role("status")).to_have_text("live")
        seed_node(world.kube, gpu_node("appears", 1))
        await expect(tab.get_by_text("appears")).to_be_visible(timeout=LIMIT_MS)
        assert await first.get_by_text("appears").count() == 0
        await first.evaluate(HIDE, False)
        await expect(first.get_by_text("appears")).to_be_visible(timeout=LIMIT_MS)


async def test_5000_gpus_are_painted_page_by_page():
    kube = FakeKube(FakeClock())
    for node in full_nodes():
        seed_node(kube, node)
    async with running(kube) as world, browsing() as page:
        await page.goto(world.url)
        await expect(page.get_by_role("rowgroup").filter(has_text="node-024")).to_be_visible()
        assert await page.locator("svg.bar").count() == 25 * 8
        await page.get_by_role("link", name="Next").click()
        await expect(page.get_by_text("node-049")).to_be_visible()
        await page.get_by_label("Node, product or tenant").fill("default/j600-")
        await page.get_by_role("button", name="Show").click()
        await expect(page.get_by_text("8 GPUs, page 1 of 1")).to_be_visible()
