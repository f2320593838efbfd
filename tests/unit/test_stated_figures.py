"""Every measured number in README.md and docs/ is in the result file that it names.

A table of figures, or a paragraph with some, has a comment above it that names its files below benchmarks/results:

    <!-- figures: sync-amd-epyc-2-cores.json -->
    <!-- figures: lab-speed-nvidia-h200.json; given: 30; unchecked: 1.07 -->

Each number of the block, but for those in code, in a table's head and in its first column, must be in one of the files
as it is stated: 0.252 is there if a value, or the mean of a list, rounds to it, in the file's unit, in thousands and so
on. A number with an interval (`+1.8 ± 0.5 %`) must have that interval there. One before × or % may also be the ratio of
two values with the same name, and one before % a share. `given` are numbers that were not measured: sizes, options,
what others publish. `unchecked` (numbers, or `all`) are measurements that no file has; the text says so.

LINES demands whole lines besides: where one differs, the test prints it as it has to be.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
COMMENT = re.compile(r"<!-- figures: ([^;]+?)(?:; given: ([^;]*?))?(?:; unchecked: ([^;]*?))? -->$")
NUMBER = re.compile(r"((?<![\w.,])[-+−]?\d+(?:,\d{3})*(?:\.\d+)?)(?![\w]*\.\d)( ?[×%])?")
INTERVAL = re.compile(r"([-+−]?\d+(?:\.\d+)?) ?%? ± (\d+(?:\.\d+)?)")
UNITS = (1.0, 1e3, 1e-3, 1e-6, 1e-9, 2.0**-20, 2.0**-30)
NOT_FIGURES = {
    ("docs/checkpoints.md", "key (`[checkpoint]`)"): "defaults",
    ("docs/checkpoints.md", "found"): "rules",
    ("docs/codecs.md", "codec"): "formats and error bounds, which tests/unit/test_codecs.py checks",
    ("docs/configuration.md", "name"): "defaults",
    ("docs/configuration.md", "key"): "defaults",
    ("docs/configuration.md", "`--recipe`"): "defaults",
    ("docs/figures.md", "file"): "the list of files, which LINES has",
    ("docs/lab.md", "name"): "experiments",
    ("docs/lab.md", "field of an arm"): "options",
    ("docs/swarm.md", "claim"): "claims and the tests that check them",
}
"""Tables with many numbers that are no measurements, by page and first word of the head."""


LAB = "lab-"
"""lab-1m stands for docs/results/1m/report.md, which `diloco lab report benchmarks/results/lab/1m` writes."""
LAB_REPORTS = {path.parent.name: path for path in ROOT.glob("docs/results/*/report.md")}


class Block(NamedTuple):
    page: Path
    line: int
    lines: list[str]
    comment: "re.Match[str] | None"

    @property
    def is_table(self) -> bool:
        return self.lines[0].startswith("|")

    def cells(self) -> Iterator[str]:
        """The text in which numbers count."""
        if not self.is_table:
            yield " ".join(self.lines)
            return
        for row in self.lines[2:]:
            yield from row.strip("|").split(" | ")[1:]

    def numbers(self) -> Iterator[tuple[str, str]]:
        """Each number, and the sign × or % behind it."""
        for cell in self.cells():
            plain = re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", " ", cell)
            yield from ((number, sign.strip()) for number, sign in NUMBER.findall(plain))


def blocks(page: Path) -> Iterator[Block]:
    """Paragraphs and tables, each with the comment of the line above it."""
    found: list[str] = []
    comment = None
    lines = [*page.read_text(encoding="utf-8").splitlines(), ""]
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("<!--") or (found and found[0][0] == "|" != line[:1]):
            if found:
                yield Block(page, number - len(found), found, comment)
                comment = None
            found = []
        if line.startswith("<!--"):
            comment = COMMENT.match(line)
            assert comment or "figures:" not in line, f"{page.name}:{number} has a comment that cannot be read: {line}"
        elif line.strip():
            found.append(line)


ALL = [block for page in PAGES for block in blocks(page)]
CHECKED = [block for block in ALL if block.comment]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, name)
        if value and all(isinstance(inner, float) for inner in value):
            yield f"{name}.mean", fmean(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name.rpartition(".")[2] if "seconds." not in name else name[-20:], float(value)


@cache
def values(file: str) -> tuple[frozenset[float], frozenset[float]]:
    """All numbers of a result file, and the ratios of those with the same name."""
    if (report := LAB_REPORTS.get(file.removeprefix(LAB))) is not None:
        text = report.read_text(encoding="utf-8")
        stated = frozenset(_number(one) for one, _ in NUMBER.findall(text))
        return stated, stated
    named: dict[str, set[float]] = defaultdict(set)
    for name, value in _leaves(json.loads((RESULTS / file).read_text())["results"]):
        named[name].add(value)
    ratios = {a / b for same in named.values() if len(same) <= 60 for a in same for b in same if b}
    return frozenset().union(*named.values()), frozenset(ratios)


@cache
def intervals(file: str) -> frozenset[tuple[float, float]]:
    """Of the laboratory's report."""
    text = LAB_REPORTS[file.removeprefix(LAB)].read_text(encoding="utf-8")
    return frozenset((_number(middle), _number(half)) for middle, half in INTERVAL.findall(text))


def has_interval(middle: str, half: str, files: list[str]) -> bool:
    return any(_rounds_to(m, middle) and _rounds_to(h, half) for file in files for m, h in intervals(file))


def _number(text: str) -> float:
    return abs(float(text.replace(",", "").replace("−", "-")))


def _rounds_to(value: float, text: str) -> bool:
    return abs(abs(value) - _number(text)) <= 0.5 * 10.0 ** -len(text.partition(".")[2]) * (1 + 1e-6)


def is_in(text: str, sign: str, file: str) -> bool:
    plain, ratios = values(file)
    candidates = [abs(value) * unit for value in plain for unit in UNITS]
    if sign == "×":
        candidates += ratios
    elif sign == "%":
        candidates += [100 * abs(value) for value in plain]
        candidates += [100 * abs(ratio - 1) for ratio in ratios]
        candidates += [100 * ratio for ratio in ratios]
    return any(_rounds_to(candidate, text) for candidate in candidates)


@pytest.mark.parametrize("block", CHECKED, ids=lambda block: f"{block.page.name}:{block.line}")
def test_every_stated_number_is_in_the_file_that_it_names(block: Block) -> None:
    assert block.comment is not None
    files = block.comment[1].split()
    excused = {*(block.comment[2] or "").split(), *(block.comment[3] or "").split()}
    if "all" in excused:
        return
    stated = set(block.numbers())
    missing = {
        number
        for number, sign in stated
        if number not in excused and not any(is_in(number, sign, file) for file in files)
    }
    reports = [file for file in files if file.removeprefix(LAB) in LAB_REPORTS]
    if reports:
        missing |= {
            f"{middle} ± {half}"
            for cell in block.cells()
            for middle, half in INTERVAL.findall(cell)
            if middle not in excused and not has_interval(middle, half, reports)
        }
    assert not missing, f"{files} has no {', '.join(sorted(missing))}: correct the text, or rerun the benchmark"
    unused = excused - {number for number, _ in stated}
    assert not unused, f"the comment excuses {', '.join(unused)}, which the text does not state"


def test_every_table_of_figures_names_its_file() -> None:
    without = []
    for block in ALL:
        if not block.is_table or block.comment or len(block.lines) < 3:
            continue
        cells = list(block.cells())
        counted = sum(bool(NUMBER.search(re.sub(r"`[^`]*`", "", cell))) for cell in cells)
        heads = [head.strip() for head in block.lines[0].strip("|").split(" | ") if head.strip()]
        name = (str(block.page.relative_to(ROOT)), heads[0] if heads else "")
        if counted >= max(1, len(cells) / 2) and name not in NOT_FIGURES:
            without.append(f"{name[0]}:{block.line} {name[1]}")
    assert not without, "put <!-- figures: FILE --> above these tables (the head of this test says how)"


@pytest.mark.parametrize(
    "path", [*sorted(RESULTS.glob("*.json")), *sorted(RESULTS.glob("lab/**/machine.json"))], ids=lambda p: p.name
)
def test_every_result_file_names_its_code_date_and_machine(path: Path) -> None:
    told = json.loads(path.read_text())
    assert re.fullmatch(r"[0-9a-f]{7,40}", told["code"]["commit"]) and told["code"]["version"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", told["date"])
    assert told["machine"]["processor"] and told["machine"]["torch"]


def _results(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())["results"]


def _recipe() -> tuple[Any, Any, Any]:
    cases = _results("recipe-amd-epyc-2-cores.json")["cases"]
    return cases["default"], cases["classic"], cases["data-parallel"]


def _loss_row() -> str:
    default, classic, parallel = _recipe()
    gaps = [f"{100 * one['loss_above_data_parallel']:+.1f} %" for one in (default, classic)]
    return (
        f"{default['validation_loss']:.3f} ({gaps[0]}) | {classic['validation_loss']:.3f} ({gaps[1]}) | "
        f"{parallel['validation_loss']:.3f} |"
    )


def _bytes_row() -> str:
    default, classic, parallel = _recipe()
    return (
        f"| sent by a worker | {default['bytes_sent_by_a_worker'] / 1e6:.0f} MB | "
        f"{classic['bytes_sent_by_a_worker'] / 1e6:.1f} MB | {parallel['bytes_sent_by_a_worker'] / 1e9:.2f} GB, "
        f"{default['times_fewer_bytes']:.0f} and {classic['times_fewer_bytes']:.0f} times as much |"
    )


def _attack_rows(file: str) -> str:
    """As `python benchmarks/adversary_real.py --markdown` prints them."""
    lines = []
    for row in _results(file):
        named, out = ("" if row[key] is None else f"{row[key]} rounds" for key in ("named_after", "out_after"))
        usual = "" if row["usual_times"] is None else f"{row['usual_times']:.2f} "
        loss = "" if row["loss_change"] is None else f"{row['loss_change']:+.1%}"
        equal = "equal" if row["digests_equal"] else "**differ**"
        lines.append(f"| {row['row']} | {usual}({row['longest_times']:.2f}) | {equal} | {loss} | {named} | {out} |")
    return " ".join(" ".join(lines).split())


def _files_table() -> str:
    """The list of result files at the end of docs/figures.md."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        told = json.loads(path.read_text())
        changed = " with changes" if told["code"].get("changed") else ""
        rows.append(f"| {path.name} | {told['code']['commit'][:7]}{changed} | {told['date']} |")
    return " ".join(rows)


LINES: list[tuple[str, Callable[[], str]]] = [
    ("README.md", _loss_row),
    ("README.md", _bytes_row),
    ("docs/figures.md", _loss_row),
    ("docs/figures.md", _bytes_row),
    ("docs/figures.md", _files_table),
    ("docs/swarm.md", lambda: _attack_rows("adversary-real-amd-epyc-2-cores.json")),
    ("docs/swarm.md", lambda: _attack_rows("adversary-real-intel-xeon-16-cores.json")),
]


@pytest.mark.parametrize(("page", "line"), LINES)
def test_these_lines_are_as_the_result_files_say(page: str, line: Callable[[], str]) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    rows = line().replace(" | | ", " |\n| ")
    assert line() in text, f"{page} must have:\n{rows}"
