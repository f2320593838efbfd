"""The page held against the events: what Chromium shows is what the log says."""

import json
import re
import time
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
    rounds = [entry for sequence in range(3) for entry in round_events(sequence, 2, 20) if entry["worker"] == 0]
    for entry in rounds:
        for member in entry.get("members", ())[1:]:
            member["report"]["last_round_seconds"] = [entry["sequence"] - 1, 0.5, 0.0, 3.0, 0.5, 1.0, 1.5, 0.5]
    lost = event("member_lost", 80.0, member=1, peer="p1", label="", reason="p1 could not be reached")
    return [started(0, 1), *rounds, lost]


def _wait_until(page: Page, condition: str) -> None:
    """The page's security policy refuses `wait_for_function`, which evaluates a string in the page itself."""
    end = time.monotonic() + _WAIT / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


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
    with serving(runs) as server:
        yield server


@pytest.fixture(scope="module")
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """The page of the first run; it must neither raise nor be refused anything."""
    new_page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme="light")
    new_page.set_default_timeout(_WAIT)
    problems: list[str] = []
    new_page.on("pageerror", lambda error: problems.append(str(error)))
    new_page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    new_page.goto(f"{served.address}#run=first")
    new_page.wait_for_selector("body[data-drawn]")
    yield new_page
    assert problems == []
    assert new_page.evaluate("window.hacked") is None, "text of a run was executed"
    new_page.close()


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
    validated = [entry for entry in _events() if entry["type"] == "validation"]
    logged = [entry for entry in _events() if entry["type"] == "step" and entry["worker"] == 0]
    curve = _curve(page, "loss", "worker 0")
    assert curve["x"] == [entry["step"] for entry in logged]
    assert curve["y"] == pytest.approx([entry["loss"] for entry in logged], rel=1e-5)
    expected = {
        "1": [entry["step"] for entry in validated],
        "2": [2 * 512 * entry["step"] for entry in validated],
        "3": [1000 * (entry["step"] // 20) for entry in validated],
        "4": [entry["time"] - 1_700_000_000 for entry in validated],
    }
    for key, x in expected.items():
        page.keyboard.press(key)
        curve = _curve(page, "loss", "validation")
        assert curve["x"] == pytest.approx(x)
        assert curve["y"] == pytest.approx([entry["loss"] for entry in validated], rel=1e-5)
    page.keyboard.press("1")


def test_every_number_of_a_round_can_be_chosen_and_is_drawn(page: Page, served: Served) -> None:
    message = served.json("/api/run/first/series?points=1000")
    assert [entry["column"] for entry in message["statistics"]] == [
        "round_seconds",
        "similarity",
        "codec_error",
        "mean_norm",
    ]
    for statistic in message["statistics"]:
        page.locator("#statistic").select_option(label=statistic["meaning"])
        assert _curve(page, "statistics", statistic["label"])["y"] == message["rounds"][statistic["column"]]
    expect(page.locator("#digests")).to_contain_text(", similarity 0.50, codec error 0.0002, norm of the mean 1.5")


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
    expect(page.locator("#health .bad", has_text="lost")).to_have_text("lost or failed: 1")
    expect(page.locator("#health")).to_contain_text("1 of 2 workers here")
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
    assert page.locator('tr[data-run="first"] td').nth(7).inner_text() == "150 of 400", "the table says the same"


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
    expect(page.locator("#status")).to_have_text("starting")
    expect(page.locator("#health")).to_contain_text("starting the workers")
    expect(page.locator("#loss")).to_contain_text("no step has been logged yet")
    page.get_by_role("button", name="first", exact=True).click()
    expect(page.locator("#title")).to_have_text("first")


def test_what_is_shown_is_in_the_address_and_a_link_shows_it_again(
    page: Page, served: Served, browser: Browser
) -> None:
    page.get_by_label(f"overlay {SECOND}").check()
    page.keyboard.press("3")
    page.locator("#smoothing").fill("0.5")
    page.get_by_label(f"compare with {SECOND}").check()
    _expect_colours(page)
    address, colours = page.url, _colours(page)
    other = browser.new_page(viewport={"width": 1300, "height": 900})
    other.goto(address)
    other.wait_for_selector("body[data-drawn]")
    expect(other.locator("#loss .legendtext", has_text=f"{SECOND}, validation")).to_have_count(1, timeout=_WAIT)
    expect(other.get_by_role("radio", name="bytes")).to_have_attribute("aria-checked", "true")
    expect(other.locator("#smoothing-value")).to_have_text("0.50")
    expect(other.get_by_label(f"compare with {SECOND}")).to_be_checked()
    assert _colours(other) == colours
    other.get_by_role("button", name=SECOND, exact=True).click()
    other.get_by_label("overlay first").check()
    expect(other.locator("#loss .legendtext", has_text="first, validation")).to_have_count(1, timeout=_WAIT)
    assert _colours(other) == colours, "a colour belongs to a run, not to its place"
    other.close()
    page.get_by_label(f"overlay {SECOND}").uncheck()
    page.goto(f"{served.address}#run=first")
    expect(page.locator("#smoothing-value")).to_have_text("none")


def _colours(page: Page) -> dict[str, str]:
    named = page.evaluate("document.getElementById('loss').data.map(t => [t.name, t.line.color])")
    return {name: colour for name, colour in named if name in ("first", "&lt;b&gt;second")}


def _expect_colours(page: Page) -> None:
    expect(page.locator("#loss .legendtext", has_text=f"{SECOND}, validation")).to_have_count(1, timeout=_WAIT)
    assert len(set(_colours(page).values())) == 2


def test_a_smoothed_curve_has_the_measured_one_behind_it_and_both_values_in_the_tooltip(page: Page) -> None:
    measured = _curve(page, "loss", "training")["y"]
    page.locator("#smoothing").fill("0.8")
    traces = page.evaluate(
        "document.getElementById('loss').data.map(t => ({name: t.name, y: t.y, both: t.customdata, "
        "hover: t.hovertemplate, opacity: t.opacity}))"
    )
    smoothed = next(entry for entry in traces if entry["name"] == "training")
    assert smoothed["both"] == measured and smoothed["y"] != measured and "%{customdata" in smoothed["hover"]
    assert any(entry["y"] == measured and entry["opacity"] < 0.5 for entry in traces)
    page.locator("#smoothing").fill("0")


def test_the_table_of_runs_says_how_each_trained_and_cuts_nothing_off(page: Page) -> None:
    row = page.locator('tr[data-run="first"]')
    expect(row).to_contain_text("diloco")
    expect(row.locator("td").nth(7)).to_have_text("150 of 400")
    page.get_by_label("compare with first").check()
    expect(row).to_contain_text("reference")
    second = page.locator('tr[data-run="<b>second"] td')
    expect(second.nth(9)).to_contain_text("%")
    expect(second.nth(11)).to_contain_text("less")
    expect(second.nth(12)).to_have_text("other tokens")
    for width in (1100, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = page.evaluate(
            "[...document.querySelectorAll('.figure *, .runs td, .runs th, .runs .scroll, .fact')]"
            ".filter(one => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== 'inline')"
            ".map(one => one.textContent)"
        )
        assert cut == [], width
    page.set_viewport_size({"width": 1300, "height": 900})


def test_runs_whose_bytes_are_far_apart_are_overlaid_on_a_logarithmic_axis(browser: Browser, tmp_path: Path) -> None:
    few, many = calm_events(workers=2, steps=60), calm_events(workers=2, steps=60)
    for entry in many:
        if "bytes_sent" in entry:
            entry["bytes_sent"] *= 100
    write_run(tmp_path / "few", few)
    write_run(tmp_path / "many", many)
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    with serving(tmp_path) as served:
        page.goto(f"{served.address}#run=few&over=many&axis=bytes")
        page.wait_for_selector("body[data-drawn]")
        kind = "document.getElementById('loss').layout.xaxis.type ?? 'linear'"
        assert page.evaluate(kind) == "log"
        page.get_by_label("overlay many").uncheck()
        _wait_until(page, f"({kind}) !== 'log'")
        page.close()


def test_the_row_of_a_live_swarm_counts_the_tokens_of_its_means_as_the_other_rows_do(
    browser: Browser, tmp_path: Path
) -> None:
    rounds = [round_event for round_event in round_events(0, 2, 20) if round_event["worker"] == 0]
    members = event("members", 24.0, members=[], run_tokens=50_000)
    validation = event("validation", 25.0, step=20, loss=5.0, perplexity=148.0, tokens=1000)
    events = [started(0, 1), step(0, 20), *rounds, members, validation]
    for name in ("run", "twin"):
        write_run(tmp_path / name, events, engine="swarm")
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    with serving(tmp_path) as served:
        assert {run["tokens"] for run in served.json("/api/runs")["runs"]} == {50_000}
        page.goto(f"{served.address}#run=run&against=twin")
        page.wait_for_selector("body[data-drawn]")
        assert page.locator('tr[data-run="run"] td').nth(9).inner_text().strip() == "0 %"
        page.close()


def test_a_link_with_a_token_opens_the_page_from_another_site(browser: Browser, tmp_path: Path) -> None:
    """127.0.0.1 and localhost are two sites: what is clicked there is a navigation from elsewhere."""
    token = "a-token-of-a-test"
    context = browser.new_context()
    page = context.new_page()
    with serving(write_run(tmp_path / "run", calm_events()), token) as served:
        link = f"{served.address}?token={token}"
        page.route(
            "http://localhost:9/",
            lambda route: route.fulfill(content_type="text/html", body=f'<a href="{link}">it</a>'),
        )
        page.goto("http://localhost:9/")
        page.get_by_text("it").click()
        page.wait_for_selector("body[data-drawn]", timeout=_WAIT)
        assert page.url == served.address and "token" not in page.url
        context.close()


def test_the_age_of_the_last_event_grows_and_a_server_that_is_gone_is_told(browser: Browser, tmp_path: Path) -> None:
    events = calm_events(steps=40)
    last = max(entry["time"] for entry in events)

    def ended_before(seconds: float) -> list[dict[str, Any]]:
        return [entry | {"time": entry["time"] - last + time.time() - seconds} for entry in events]

    write_run(tmp_path / "old", ended_before(600.0))
    write_run(tmp_path / "new", ended_before(10.0))
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    with serving(tmp_path) as served:
        page.goto(f"{served.address}#run=old")
        expect(page.locator(".fact.bad", has_text="last event 10 min ago")).to_have_count(1, timeout=_WAIT)
        page.get_by_role("button", name="new", exact=True).click()
        age = page.locator(".fact", has_text=re.compile(r"^last event \d+ s ago"))
        expect(age).to_have_count(1, timeout=_WAIT)
        expect(age).not_to_have_text(age.inner_text(), timeout=_WAIT)
    expect(page.locator(".fact.bad", has_text="disconnected")).to_have_count(1, timeout=_WAIT)
    page.close()


def test_a_data_parallel_run_has_bytes_and_no_saving(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", calm_events())
    (run / "config.toml").write_text('steps = 400\nmode = "data-parallel"\n')
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    with serving(run) as served:
        page.goto(served.address)
        page.wait_for_selector("body[data-drawn]")
        assert _figures(page)["sent by a worker"] == "5 kB" and "fewer bytes" not in _figures(page)
        page.close()


def test_bytes_of_a_run_that_has_averaged_nothing_are_not_compared(browser: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "averaged", calm_events(steps=40))
    write_run(tmp_path / "stopped", [started(0, 1), step(0, 10) | {"bytes_sent": 246}])
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    with serving(tmp_path) as served:
        page.goto(f"{served.address}#run=averaged")
        page.wait_for_selector("body[data-drawn]")
        cells = page.locator('tr[data-run="stopped"] td')
        expect(cells.nth(10)).to_have_text("246 B", timeout=_WAIT)
        expect(cells.nth(11)).to_have_text("–")
        page.close()


def test_the_utilisation_is_that_of_the_workers_of_this_machine(page: Page) -> None:
    page.get_by_role("button", name="swarm", exact=True).click()
    expect(page.locator("#title")).to_have_text("swarm")
    tile = page.locator(".figure", has=page.locator(".label", has_text="utilisation"))
    expect(tile.locator(".more")).to_have_text("1 worker here", timeout=_WAIT)
    page.get_by_role("button", name="first", exact=True).click()
    expect(tile.locator(".more")).to_have_text("2 workers", timeout=_WAIT)


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
