"""The page held against the events: what Chromium shows is what the log says."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from support.dashboard_runs import append, calm_events, event, failed_round, round_events, started, step, write_run
from support.dashboard_server import Served, serving

HOSTILE = '<img src=x onerror="window.hacked=1">'
SECOND = "<b>second"
_WAIT = 30_000


def _events() -> list[dict[str, Any]]:
    """Two workers and 100 steps; then a failed round, a refusal, a member that is lost, and a sample."""
    return [
        *calm_events(workers=2, steps=100),
        *failed_round(5, 2, 20, f"worker 1 did not answer {HOSTILE}"),
        *round_events(6, 2, 20, refused={"1": "its norm is 900"}, contributors=[0]),
        event("member_joined", 150.0, member=7, peer="p7", label=HOSTILE),
        event("member_lost", 160.0, member=7, peer="p7", label=HOSTILE, reason="silent for 5 s"),
        event("sample", 170.0, prompt="def ", text=f"def {HOSTILE}</pre><script>window.hacked=1</script>"),
    ]


def _swarm() -> list[dict[str, Any]]:
    """One worker here and one elsewhere, three rounds; then the other one is lost."""
    rounds = [one for sequence in range(3) for one in round_events(sequence, 2, 20) if one["worker"] == 0]
    for one in rounds:
        for member in one.get("members", ())[1:]:
            member["report"]["last_round_seconds"] = [one["sequence"] - 1, 0.5, 0.0, 3.0, 0.5, 1.0, 1.5, 0.5]
    lost = event("member_lost", 80.0, member=1, peer="p1", label="", reason="p1 could not be reached")
    return [started(0, 1), *rounds, lost]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / SECOND, calm_events(workers=1, steps=60))
    write_run(root / "first", _events())
    write_run(root / HOSTILE, [])
    write_run(root / "swarm", _swarm(), engine="swarm")
    return root


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    with serving(runs) as one:
        yield one


@pytest.fixture(scope="module")
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """The page of the first run; it must neither raise nor be refused anything."""
    one = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme="light")
    one.set_default_timeout(_WAIT)
    problems: list[str] = []
    one.on("pageerror", lambda error: problems.append(str(error)))
    one.on("console", lambda told: problems.append(told.text) if told.type == "error" else None)
    one.goto(f"{served.address}#run=first")
    one.wait_for_selector("body[data-drawn]")
    yield one
    assert problems == []
    assert one.evaluate("window.hacked") is None, "text of a run was executed"
    one.close()


def _figures(page: Page) -> dict[str, str]:
    pairs = page.eval_on_selector_all(
        ".figure", "all => all.map(one => [one.children[0].textContent, one.children[1].textContent])"
    )
    return dict(pairs)


def _curve(page: Page, chart: str, name: str) -> dict[str, list[Any]]:
    curves = page.evaluate("id => document.getElementById(id).data.map(t => [t.name, t.x, t.y])", chart)
    return {"x": [], "y": []} | next(({"x": x, "y": y} for found, x, y in curves if found == name), {})


def _expect_figure(page: Page, name: str, value: str) -> None:
    figure = page.locator(".figure", has=page.locator(".label", has_text=re.compile(f"^{name}$")))
    expect(figure.locator(".value")).to_have_text(value, timeout=_WAIT)


def test_the_figures_are_those_of_the_log(page: Page, served: Served) -> None:
    state = served.json("/api/run/first/state")
    shown = _figures(page)
    assert shown["step"] == "140" and shown["rounds"] == "6"
    assert float(shown["perplexity"]) == pytest.approx(state["validation"]["perplexity"], rel=1e-3)
    assert float(shown["training loss"]) == pytest.approx(state["loss"], rel=1e-3)
    assert shown["utilisation"] == "90 %"
    expect(page.locator("#title")).to_have_text("first")


def test_the_loss_curve_is_that_of_the_events_over_every_axis(page: Page) -> None:
    page.locator("#smoothing").fill("0")
    validated = [one for one in _events() if one["type"] == "validation"]
    logged = [one for one in _events() if one["type"] == "step" and one["worker"] == 0]
    curve = _curve(page, "loss", "worker 0")
    assert curve["x"] == [one["step"] for one in logged]
    assert curve["y"] == pytest.approx([one["loss"] for one in logged], rel=1e-5)
    expected = {
        "1": [one["step"] for one in validated],
        "2": [2 * 512 * one["step"] for one in validated],
        "3": [1000 * (one["step"] // 20) for one in validated],
        "4": [one["time"] - 1_700_000_000 for one in validated],
    }
    for key, x in expected.items():
        page.keyboard.press(key)
        curve = _curve(page, "loss", "validation")
        assert curve["x"] == pytest.approx(x)
        assert curve["y"] == pytest.approx([one["loss"] for one in validated], rel=1e-5)
    page.keyboard.press("1")


def test_rounds_show_the_straggler_failures_and_refusals(page: Page) -> None:
    assert page.locator("#waterfall rect.compute").count() >= 14
    assert page.locator("#waterfall rect.failed").count() == 2
    expect(page.locator("#waterfall text.late")).to_have_text("worker 1")
    expect(page.locator("#failures")).to_contain_text(f"worker 1 did not answer {HOSTILE}")
    expect(page.locator("#failures")).to_contain_text("its norm is 900")


def test_the_phases_of_a_worker_elsewhere_are_drawn_and_one_that_is_lost_is_named(page: Page) -> None:
    page.get_by_role("button", name="swarm", exact=True).click()
    expect(page.locator("#title")).to_have_text("swarm")
    expect(page.locator("#waterfall .elsewhere.send")).to_have_count(2)  # of its last round it has not told yet
    assert page.locator("#waterfall .compute.elsewhere").count() == 2
    expect(page.locator("#notes")).to_contain_text("worker 1 is lost (it could not be reached); training continues")
    expect(page.locator(".member.gone")).to_have_attribute("data-worker", "1")
    page.get_by_role("button", name="first", exact=True).click()
    expect(page.locator("#title")).to_have_text("first")


def test_workers_that_are_lost_say_why_and_text_stays_text(page: Page) -> None:
    lost = page.locator('.member[data-worker="7"]')
    expect(lost).to_contain_text("silent for 5 s")
    expect(lost).to_contain_text(HOSTILE)
    expect(page.locator(".sample pre")).to_contain_text("<script>window.hacked=1</script>")
    expect(page.locator(".run button", has_text=HOSTILE)).to_have_count(1)
    assert page.locator("main img").count() == 0


def test_new_events_appear_by_themselves(page: Page, runs: Path) -> None:
    append(runs / "first", *(step(worker, 150) for worker in range(2)))
    _expect_figure(page, "step", "150")


def test_the_slider_replays_the_run(page: Page, served: Served) -> None:
    state = served.json("/api/run/first/state")
    length = state["last_time"] - state["first_time"]
    page.locator("#moment").fill(str(round(1000 * 45 / length)))
    expect(page.locator("#status")).to_have_text("replay")
    _expect_figure(page, "step", "40")
    assert max(_curve(page, "loss", "validation")["x"]) == 40
    page.keyboard.press("l")
    expect(page.locator("#status")).not_to_have_text("replay")


def test_runs_are_overlaid_and_chosen(page: Page) -> None:
    page.get_by_label(f"overlay {SECOND}").check()
    expect(page.locator("#loss .legendtext", has_text=f"{SECOND}, validation")).to_have_count(1, timeout=_WAIT)
    assert max(_curve(page, "loss", "&lt;b&gt;second")["x"]) == 60
    page.get_by_label(f"overlay {SECOND}").uncheck()
    page.get_by_role("button", name=SECOND, exact=True).click()
    expect(page.locator("#title")).to_have_text(SECOND)
    _expect_figure(page, "step", "60")
    page.get_by_role("button", name=re.compile("onerror")).click()
    expect(page.locator("#status")).to_have_text("not started")
    expect(page.locator("#loss")).to_contain_text("no step has been logged yet")
    page.get_by_role("button", name="first", exact=True).click()
    expect(page.locator("#title")).to_have_text("first")


def test_dark_and_light_are_switched_and_a_phone_needs_no_sideways_scrolling(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.keyboard.press("t")
    assert page.evaluate(ground) != light
    page.keyboard.press("t")
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    page.set_viewport_size({"width": 1300, "height": 900})


def test_json_links_give_what_the_page_shows(page: Page, served: Served) -> None:
    paths = page.eval_on_selector_all("#json a", "all => all.map(one => one.getAttribute('href'))")
    assert len(paths) == 5
    for path in paths:
        assert json.dumps(served.json(path))
