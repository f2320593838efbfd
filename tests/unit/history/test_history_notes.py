"""What the terminal and the page say of an event."""

import re
from pathlib import Path
from typing import Any

import pytest

import diloco
from diloco.dashboard.snapshot import snapshot
from diloco.history.events import ExcludedEvent, MemberLostEvent, read_event
from diloco.history.figures import RunFigures
from diloco.history.notes import _SENTENCES, RunNotes, reason_of
from support.event_log import history_of

PEER = "12D3KooWMHtALwWx5z884D4WSWdRG6CqdcdrFJCRy6rstou8Rdwk"
OTHER = "12D3KooWLkhZ83dY1LmFf5XnBgoMVSW3cXcPfqssj2o4hE8osbLE"


def event(type_: str, worker: int = 0, time: float = 10.0, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "time": time, "worker": worker, "type": type_, **fields}


HAPPENED = [
    event("worker_started", workers=2, parameters=1, unigram_perplexity=None),
    event("corpus", skipped={"unreadable rows": 3}, label_shards={"law": 0, "sea": 1}, shard_tokens=[30, 10]),
    event("resumed", step=20, rounds=2, workers=2, workers_before=2, notes=["a damaged file is left out"]),
    event("checkpoint_failed", step=15, reason="full"),
    event("checkpoint_skipped", step=15, reason="a round is in flight"),
    event("sample_skipped", step=3, reason="no tokenizer"),
    event("threads", threads=1, cores=2, workers=2),
    event("waiting", present=1, wanted=2),
    event("warm_start", step=30, steps=200),
    event("joined", step=40, rounds=2),
    event("member_joined", member=7, peer=PEER, label="far"),
    event("member_left", member=7, peer=PEER, label="far"),
    event("member_lost", member=7, peer=PEER, label="far", reason=f"{PEER} could not be reached a moment ago"),
    event("member_banned", member=8, peer=OTHER, label="", reason="its norm is 900"),
    event("member_expelled", member=9, peer=OTHER, label="", reason=f"revoked by {PEER}"),
    event("state_refused", member=9, peer=OTHER, label="", reason="0 of 2 have the same state"),
    event("excluded", member=0, reason="revoked"),
    event("renumbered", before=0, member=4),
    event("alone", member=0),
    event("minority", member=0, here=1, members=4),
    event("diverged", member=0, rounds=3, tokens=4096),
    event("resync", reason="it missed round 8", sequence=9, step=90),
    event("sidecar_restarted", restarts=1),
    event("shards_not_fetched", shards=[1, 2], reason="no member has them"),
    event("micro_batches", accumulation=4, rows=2, tried=True, budget_bytes=1e9),
]


def test_terminal_and_page_say_the_same_sentences() -> None:
    history = history_of(HAPPENED)
    page = snapshot(RunFigures(history), {"engine": "swarm"}, None, 0.0)
    assert history.refused_events == 0
    assert history.notes.lines == [note["text"] for note in page["notes"]]
    assert (
        len(history.notes.lines) == len(HAPPENED) - 1 + 4
    )  # two labels, a note of the resume, a second line of `diverged`


def rounds(*made: tuple[str, int], **more: Any) -> list[dict[str, Any]]:
    """`made`: of each round how its mean was made, and of how many contributions. Both local workers tell of each."""
    return [
        event(
            "round",
            worker,
            sequence=n,
            failure=None,
            mean_norm=1.0,
            merge=merge,
            contributors=list(range(count)),
            **more,
        )
        for n, (merge, count) in enumerate(made)
        for worker in (0, 1)
    ]


def test_a_plain_mean_instead_of_a_clipped_one_is_told_in_words_when_it_begins_and_ends() -> None:
    started = event("worker_started", workers=2, resolved={"sync.merge": "clipped"})
    notes = RunNotes()
    for one in [started, *rounds(("clipped", 4), ("mean", 3), ("mean", 2), ("clipped", 5))]:
        notes.update(read_event(one), ())
    assert notes.lines == [
        "round 1 has 3 contributions: its mean is a plain one, since sync.merge = clipped needs four; so are the next "
        "ones until there are four",
        "round 3 has 5 contributions: means are clipped again",
    ]
    notes = RunNotes()
    for one in [event("worker_started", workers=2, resolved={}), *rounds(("mean", 3), ("mean", 5))]:
        notes.update(read_event(one), ())
    assert notes.lines == []


def test_a_worker_that_begins_to_disagree_is_told_once() -> None:
    notes = RunNotes()
    for one in rounds(("mean", 4), ("mean", 4), disagreeing=[3], agreement={"3": -0.41}):
        notes.update(read_event(one), ())
    [line] = notes.lines
    assert line.startswith("worker 3: its outer gradients point elsewhere than the others' (cosine -0.41 in round 0;")


def test_a_worker_whose_contribution_counts_as_the_others_mean_is_told_when_that_begins() -> None:
    notes = RunNotes()
    shares = [0.04, 0.94, 0.06, 0.94, 0.01, 0.5]
    for n, share in enumerate(shares):
        one = {"sequence": n, "mean_norm": 1.0, "merge": "mean", "contributors": [0, 1, 2, 3], "failure": None}
        notes.update(read_event(event("round", **one, replaced={"0": 0.0, "3": share})), ())
    first, again = notes.lines
    assert first.startswith("worker 3: in 94% of the parts of round 1 its outer gradient points against the others'")
    assert again.startswith("worker 3: in 50% of the parts of round 5 ")


def test_what_the_terminal_shows_elsewhere_has_a_line_on_the_page_only() -> None:
    notes = RunNotes()
    notes.update(read_event(event("round", sequence=3, failure="worker 1 did not answer", refused={})), ())
    notes.update(read_event(event("worker_failed", inner_steps=3, error="out of memory")), ())
    assert [note.text for note in notes.notes] == [
        "round 3 failed: worker 1 did not answer",
        "worker 0 failed: out of memory",
    ]
    assert notes.lines == []


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (event("renumbered", before=2, member=5), "worker 2 is worker 5 from now on"),
        (event("minority", here=1, members=4), "1 of 4 members are here"),
        (
            event("check_failed", round=7, reason="ValueError: no"),
            "could not check the mean of round 7: ValueError: no",
        ),
        (
            event("internal_error", what="leading a round", reason="KeyError: 7"),
            "has a fault in its program, in leading a round: KeyError: 7",
        ),
        (
            event("reducer_passed_over", member=3, peer="p", label="box", round=7),
            "worker 3 (box) did not send its means in round 7",
        ),
        (
            event("rounds_lost", member=3, peer="p", label="box", rounds=3, tokens=4096),
            "worker 3 (box) went on without the others and has taken over their state: 3 rounds and 4,096 tokens",
        ),
        (
            event("tokens_doubted", member=3, round=7, tokens=1 << 53, most=4096),
            "worker 3 says that it has trained on 9,007,199,254,740,992 tokens, and all steps so far have 4,096",
        ),
        (event("two_means", round=7, leaders=[0, 2]), "round 7 has ended in two ways, led by worker 0 and 2"),
        (event("diverged", worker=1, rounds=3, tokens=4096), "3 rounds and 4,096 tokens of worker 1 are lost"),
    ],
)
def test_a_split_is_told(told: dict[str, Any], words: str) -> None:
    notes = RunNotes()
    notes.update(read_event(told), ())
    assert any(words in line for line in notes.lines)


def test_no_line_has_the_id_of_a_peer() -> None:
    notes = RunNotes()
    for one in HAPPENED:
        notes.update(read_event(one), ())
    assert not any("12D3Koo" in note.text for note in notes.notes)
    lost = read_event(HAPPENED[12])
    assert isinstance(lost, MemberLostEvent) and reason_of(lost) == "it could not be reached"
    assert reason_of(ExcludedEvent(reason=f"revoked by {PEER}")) == "revoked by peer …u8Rdwk"


def test_a_member_that_comes_and_goes_is_told_every_time_and_by_one_worker() -> None:
    notes = RunNotes()
    for time in (10.0, 20.0):
        for type_ in ("member_joined", "member_lost"):
            for worker in (0, 1):
                notes.update(
                    read_event(event(type_, worker, time, member=5, peer=PEER, label="", reason=f"told by {worker}")),
                    (),
                )
    assert [line.split()[3] for line in notes.lines] == ["joined", "lost", "joined", "lost"]
    notes.update(read_event(event("member_left", member=5, peer=PEER)), local_workers=[5])
    assert len(notes.lines) == 4, "a worker of this machine is in the table"


def test_every_event_of_the_documentation_has_a_sentence_or_is_shown_elsewhere() -> None:
    """A new type of event is not forgotten."""
    text = (Path(diloco.__file__).parents[2] / "docs" / "events.md").read_text()
    rows = re.findall(r"^\| (`[a-z_`, ]+) \|", text, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    elsewhere = {
        "sizes", "worker_started", "starting", "first_step", "step", "round_posted", "evaluation", "validation",
        "sample", "state_arriving", "members", "shards", "shard_fetched",
    }  # fmt: skip
    assert documented - elsewhere == {kind.type for kind in _SENTENCES} | {"corpus", "resumed", "round", "diverged"}
