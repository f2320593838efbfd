"""The documents name files and tests that exist and every option, and the README stays short."""

import re
from pathlib import Path

import pytest

import diloco
from diloco.swarm import timing
from diloco.swarm.network.transport import LEAST_RATE
from diloco.swarm.node.node import CALLS_AT_ONCE, CALLS_PER_SECOND
from diloco.swarm.protocol import attendance, following, quorum
from diloco.swarm.settings import Settings
from diloco.swarm.simulator import schedules
from diloco.training.config.run_file import known_keys

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = sorted(path.name for path in (ROOT / "src/diloco").iterdir() if path.is_dir() and path.name != "__pycache__")

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAMED_PATH = re.compile(
    rf"(?<![\w./-])(?:(?:src|docs|benchmarks|examples|tests)/[\w./-]*\w|(?:{'|'.join(FOLDERS)})/[\w/-]+\.py)"
)
MODULE = re.compile(r"\bdiloco(?:\.[a-z]\w*)+")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_path_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if "://" not in link and not (page.parent / link).exists()]
    for name in NAMED_PATH.findall(text):
        places = (ROOT, ROOT / "src/diloco", ROOT / "tests", page.parent)
        if not any((place / name).exists() for place in places):
            missing.append(name)
    missing += [name for name in MODULE.findall(text) if not _is_importable(name)]
    assert not missing, f"{page.name} names what does not exist: {missing}"


def _is_importable(name: str) -> bool:
    """A package or module, an attribute of a module, or one of the names that `import diloco` offers."""
    *parents, last = name.split(".")[1:]
    path = ROOT.joinpath("src/diloco", *parents, last)
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    return path.parent.with_suffix(".py").exists() if parents else last in dir(diloco) or last in diloco.__all__


def test_every_module_that_a_module_docstring_names_exists() -> None:
    modules = [f"/{path}" for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).glob("**/*.py")]
    missing = [
        f"{path.name}: {name}"
        for path in (ROOT / "src/diloco").glob("**/*.py")
        for name in re.findall(r"(?<![\w./-])[a-z_][\w/]*\.py\b", _docstring(path))
        if not any(module.endswith(f"/{name}") for module in modules)
    ]
    assert not missing


def _docstring(module: Path) -> str:
    text = module.read_text(encoding="utf-8")
    return text.split('"""')[1] if text.startswith('"""') else ""


def test_every_option_is_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES if "adr" not in path.parts)
    named = set(re.findall(r"[`-](?:\w+\.)?(\w+)", text))
    assert not [key for key in known_keys() if key.rpartition(".")[2] not in named]


@pytest.mark.parametrize("page", ["invariants.md", "swarm.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))
    assert named and not named - _defined_tests()


def test_every_claim_about_members_names_its_colluders_and_a_test() -> None:
    text = (ROOT / "docs/swarm.md").read_text(encoding="utf-8").partition("## What members can and cannot do")[2]
    rows = [line.split("|")[1:-1] for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    for claim, colluders, tests in rows:
        assert colluders.strip() in ("1", "2", "f < n/2", "f < n/3"), claim
        assert re.search(r"`test_\w+`", tests), claim


def _defined_tests() -> set[str]:
    files = ROOT.glob("tests/**/test_*.py")
    return {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))}


NODE = ROOT / "src/diloco/swarm"
PROTOCOL = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")


def test_every_file_and_message_that_the_protocol_names_exists() -> None:
    files = re.findall(r"`([\w/]+\.py)`", PROTOCOL)
    assert len(files) > 20 and not [name for name in files if not (NODE / name).exists()]
    steps = PROTOCOL.partition("## The steps")[2].partition("\n\n## ")[0]
    rows = [row.split(" | ") for row in steps.splitlines() if row.startswith("| ")][2:]
    named = {name for row in rows for name in re.findall(r"[A-Z]\w+", row[1])}
    defined = {
        name
        for path in ("protocol/messages.py", "protocol/plan.py")
        for name in re.findall(r"^class (\w+)\(", (NODE / path).read_text(), re.MULTILINE)
    }
    assert {"Ready", "Commit"} < named and not named - defined


@pytest.mark.parametrize(
    ("words", "constant", "value"),
    [
        ("A term may be 1,000 above the last", following._MOST_TERMS, 1000),
        ("passed over for a minute", timing.PASSED_OVER_SECONDS, 60.0),
        (
            "three rounds wait for it, then every second, fourth, eighth",
            (attendance.MISSES, attendance._RAREST),
            (3, 3),
        ),
        ("64 a second of a peer are answered, after 256 at once", (CALLS_PER_SECOND, CALLS_AT_ONCE), (64, 256)),
        ("a stream brings 4 KiB/s or breaks", LEAST_RATE, 4096),
        ("reduces nothing for ten minutes", timing.WITHHELD_SECONDS, 600.0),
        ("as long as three or more members count", quorum.FEWEST, 3),
        ("from what it has seen itself three times", Settings("", "").refusals_to_ban, 3),
        ("else `4 × lost_seconds`", Settings("", "", lost_seconds=1.0).stall_seconds, 4.0),
        ("one of five ways", len(schedules.LIES), 5),
        ("each in one of eighteen", len(schedules.ALL_LIES), 18),
    ],
)
def test_every_number_that_the_protocol_names_is_the_codes(words: str, constant: object, value: object) -> None:
    assert words in " ".join(PROTOCOL.split()), "the page says it in other words now: change them here too"
    assert constant == value


def test_the_readme_has_at_most_150_lines_and_says_where_the_mean_is_computed() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert "engines/reduction.py" in text and "core/merging.py" in text


def test_every_decision_record_has_a_number_of_its_own_which_is_that_of_its_title_and_a_status() -> None:
    records = sorted((ROOT / "docs/adr").glob("[0-9]*.md"))
    numbers = [path.name[:4] for path in records]
    assert len(numbers) == len(set(numbers))
    for path in records:
        title, _, status, *_ = path.read_text(encoding="utf-8").splitlines()
        assert title.startswith(f"# {int(path.name[:4])}. "), path.name
        assert status.startswith(("**Status.** Accepted.", "**Status.** Superseded by [ADR ")), path.name
