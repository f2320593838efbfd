"""`/metrics`: what Prometheus' own parser reads is what the page shows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diloco.dashboard.metrics import CONTENT_TYPE, METRICS, exposition
from diloco.dashboard.snapshot import snapshot
from diloco.history.events import ROUND_STATISTICS
from diloco.history.figures import RunFigures
from support.dashboard_runs import Event, calm_events, event, failed_round, step, write_run
from support.dashboard_server import serving
from support.event_log import history_of

HOSTILE = 'a"b\\c\nd{e="f"} 1\n# TYPE x counter'


def state(events: list[Event], run: str = "run", **options: object) -> dict[str, Any]:
    figures = RunFigures(history_of(events), elastic=options.get("engine") == "swarm")
    return {"run": run, **snapshot(figures, {"steps": 400, **options}, None, 0.0)}


def parsed(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """(sample name, its labels' values in the order of their names) -> value."""
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


EVENTS = [*calm_events(steps=100), *failed_round(5, 2, 20, "worker 1 was late"), step(0, 130) | {"rounds": 5}]


def test_the_samples_are_what_the_page_shows() -> None:
    shown = state(EVENTS)
    values = parsed(exposition([shown]))
    assert values["diloco_rounds_total", ("run",)] == shown["rounds"]["merged"] == 5
    assert values["diloco_rounds_failed_total", ("run",)] == shown["rounds"]["failed"] == 1
    assert values["diloco_tokens_total", ("run",)] == shown["tokens"] == 512 * (130 + 100)
    for name in ("step", "steps", "loss", "tokens_per_second"):
        assert values[f"diloco_{name}", ("run",)] == pytest.approx(shown[name])
    assert values["diloco_validation_perplexity", ("run",)] == pytest.approx(shown["validation"]["perplexity"])
    assert values["diloco_utilization_ratio", ("run",)] == pytest.approx(0.9)
    assert [values["diloco_worker_lag_steps", ("run", worker)] for worker in "01"] == [0, 10]
    assert values["diloco_bytes_sent_total", ("run", "0")] == shown["workers"][0]["bytes_sent"] > 0
    assert values["diloco_run_status", ("run", shown["status"])] == 1


def test_every_family_has_help_and_type_once_and_counters_end_in_total() -> None:
    text = exposition([state(EVENTS, "one"), state(EVENTS, "two")])
    for name, metric in METRICS.items():
        assert (metric.kind == "counter") == name.endswith("_total")
        assert text.count(f"# HELP {name} ") == text.count(f"# TYPE {name} {metric.kind}\n") == (f"\n{name}{{" in text)
    families = list(text_string_to_metric_families(text))
    assert len(families) == len({family.name for family in families})
    assert {sample.labels["run"] for family in families for sample in family.samples} == {"one", "two"}


def test_a_hostile_name_is_a_label_and_nothing_else() -> None:
    (values,) = {
        sample.labels["run"]
        for family in text_string_to_metric_families(exposition([state(EVENTS, HOSTILE)]))
        for sample in family.samples
    }
    assert values == HOSTILE


def test_what_is_not_known_has_no_sample() -> None:
    young = exposition([state([step(0, 10, loss=float("nan"))])])
    names = {name for name, _ in parsed(young)}
    assert "diloco_step" in names and not names & {"diloco_loss", "diloco_validation_loss", "diloco_round_seconds"}
    assert "nan" not in young.lower().replace("utilization", "")
    assert exposition([]) == ""
    parsed(exposition([state([])]))


def test_a_run_that_has_ended_has_no_speed() -> None:
    ended = state(EVENTS) | {"status": "complete"}
    names = {name for name, _ in parsed(exposition([ended]))}
    assert "diloco_tokens_total" in names and not any(name.endswith("per_second") for name in names)


def test_members_of_a_swarm_are_counted_by_state_and_those_that_are_gone_do_not_lag() -> None:
    present = [
        {"member": 0, "where": "here", "step": 50, "loss": 2.0, "contributed": 3, "state": "training"},
        {"member": 7, "where": "there", "step": 45, "loss": 2.0, "contributed": 3, "state": "training"},
    ]
    lost = event("member_lost", 60.0, member=3, peer="p", label="x", reason="silent")
    values = parsed(exposition([state([step(0, 50), event("members", 55.0, present=present), lost], engine="swarm")]))
    assert values["diloco_members", ("run", "training")] == 2 and values["diloco_members", ("run", "lost")] == 1
    assert values["diloco_worker_lag_steps", ("run", "7")] == 5
    assert ("diloco_worker_lag_steps", ("run", "3")) not in values
    arriving = event("state_arriving", 1.0, received_bytes=3, all_bytes=4)
    assert parsed(exposition([state([arriving], engine="swarm")]))["diloco_members", ("run", "joining")] == 1


def test_a_worker_elsewhere_that_is_lost_has_no_speed() -> None:
    events = [*calm_events(workers=2, steps=40), event("member_lost", 60.0, member=1, peer="p", reason="silent")]
    events = [entry for entry in events if entry["worker"] == 0]
    values = parsed(exposition([state(events, engine="swarm") | {"status": "training"}]))
    assert ("diloco_worker_tokens_per_second", ("run", "0")) in values
    assert ("diloco_worker_tokens_per_second", ("run", "1")) not in values
    assert values["diloco_tokens_per_second", ("run",)] == values["diloco_worker_tokens_per_second", ("run", "0")]


def test_the_server_answers_prometheus(tmp_path: Path) -> None:
    write_run(tmp_path / "one", calm_events(steps=40))
    write_run(tmp_path / "two", calm_events(steps=60))
    with serving(tmp_path) as served:
        status, headers, body = served.get("/metrics")
        assert (status, headers["content-type"]) == (200, CONTENT_TYPE)
        assert parsed(body.decode())["diloco_step", ("two",)] == 60
        _, _, body = served.get("/metrics?run=one")
        assert {labels[0] for _, labels in parsed(body.decode())} == {"one"}
        assert served.get("/metrics?run=none")[0] == 404


def test_the_grafana_dashboard_asks_for_metrics_that_exist() -> None:
    board = json.loads((Path(__file__).parents[3] / "examples/grafana/dashboard.json").read_text())
    queried = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"diloco_\w+", target["expr"])
    }
    assert queried <= METRICS.keys() and len(queried) > 12
    running = state([*EVENTS, event("member_joined", 131.0, member=5, peer="p")], engine="swarm") | {
        "status": "training"
    }
    answered = {name for name, _ in parsed(exposition([running]))}
    assert queried <= answered, "a query that no run can answer"
    documented = (Path(__file__).parents[3] / "docs/dashboard.md").read_text()
    of_a_round = {f"diloco_round_{name}" for name in ROUND_STATISTICS}  # by their names in docs/events.md
    assert "`diloco_round_`" in documented
    assert all(f"`{name}`" in documented for name in METRICS.keys() - of_a_round)
