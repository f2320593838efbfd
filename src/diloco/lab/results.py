"""Finished arms on disk: one JSON file for each arm and seed, with its configuration, code and machine.

    lab.json          the scale and the texts of this folder
    tuned.json        what `diloco lab tune` tried and chose
    results/KEY-CODE.json   a finished arm; KEY is made of the arm, the text and the seed, CODE of the code (code.py)
    beginnings/       shared pre-training, kept for the next process (pretraining.py)
    checkpoints/      arms in progress (simulation/checkpoint.py)

The key says nothing of the experiment: an arm that two experiments share is run once. An arm that other code has
finished is run again, unless `--any-code` says that it counts. The report takes the newest result of each arm and seed,
and names all versions of the code that it finds.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, final

from diloco.atomic_files import write_file
from diloco.errors import ConfigError
from diloco.lab.arm import Arm, ArmResult
from diloco.lab.code import code_version

SETTING = "lab.json"
RESULTS = "results"
TUNED = "tuned.json"
TUNING_SEED = 1000
"""The first seed of `diloco lab tune`: a seed that tunes judges nothing, so the report leaves these out."""
FIRST_ROUNDS = 10
"""Rounds at the start that are kept whatever their number."""
_MOST_ROUNDS = 40
"""Rounds whose statistics are kept: a file stays small."""
Item = TypeVar("Item")


@final
@dataclass(frozen=True)
class Setting:
    """The scale and the texts that all arms of a folder share."""

    scale: str
    texts: dict[str, str]
    """The digest of each text, by its role: `text`, `domains`."""
    described: dict[str, str]
    """The same in words."""


@final
@dataclass(frozen=True)
class SearchRecord:
    """What a search measured, on a seed that judges nothing."""

    chosen: dict[str, float]
    """The best, and what the scale has; a search that was cut short may know a better place than the scale's."""
    tried: list[dict[str, float]]
    """The best first, each with its `loss`."""
    at_the_end_of_its_ladder: list[str]
    unmeasured_neighbours: int = 0
    """Neighbours of the best place that were not measured: the walk was cut short."""


@final
@dataclass(frozen=True)
class FinishedArm:
    """The result of an arm with one seed, the code that gave it, and when."""

    code: str
    date: str
    """ISO 8601, UTC; empty for results from before dates were kept."""
    result: ArmResult


def key_of(arm: Arm, seed: int, text_digest: str) -> str:
    """Return the first part of a result's name, which its code follows. It says nothing of the experiment: equal arms
    have equal keys."""
    return f"{arm.key()}-{text_digest[:6]}-{seed}"


@final
class ResultFolder:
    """The folder of one `diloco lab run`; a second run with the same folder continues it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, setting: Setting) -> None:
        """Write the setting into the folder, or refuse a folder of another one."""
        path = self.folder / SETTING
        if path.is_file():
            existing = self.setting()
            if existing.scale != setting.scale:
                raise ConfigError(self._conflict("scale", existing.scale, setting.scale))
            for role in existing.texts.keys() & setting.texts.keys():
                if existing.texts[role] != setting.texts[role]:
                    raise ConfigError(self._conflict(role, existing.described[role], setting.described[role]))
            texts = existing.texts | setting.texts
            described = existing.described | setting.described
            setting = Setting(setting.scale, texts, described)
        (self.folder / RESULTS).mkdir(parents=True, exist_ok=True)
        write_file(path, (json.dumps(asdict(setting), indent=1) + "\n").encode())

    def _conflict(self, name: str, existing: str, requested: str) -> str:
        return (
            f"{self.folder} holds results with another {name} ({existing}, not {requested}): "
            "choose another folder with --out"
        )

    def add_search(self, name: str, search: SearchRecord) -> None:
        """Add what a search measured to tuned.json."""
        searches = {title: asdict(record) for title, record in self.searches().items()}
        searches[name] = asdict(search)
        write_file(self.folder / TUNED, (json.dumps(_rounded(searches), indent=1) + "\n").encode())

    def searches(self) -> dict[str, SearchRecord]:
        """Read all searches of this folder, by experiment and method."""
        path = self.folder / TUNED
        if not path.is_file():
            return {}
        return {name: SearchRecord(**values) for name, values in json.loads(path.read_text(encoding="utf-8")).items()}

    def setting(self) -> Setting:
        path = self.folder / SETTING
        try:
            return Setting(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.folder} is no folder of `diloco lab run`: {error}") from error

    def has(self, key: str, code: str | None) -> bool:
        """Return whether an arm is finished: with that code, or, if it is None, with any."""
        return bool(self._paths(key)) if code is None else self._path(key, code).is_file()

    def write(self, key: str, code: str, result: ArmResult) -> None:
        thinned = replace(result, statistics=tuple(_thinned(result.statistics)))
        record = {
            "code": code_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "result": _rounded(thinned.as_json()),
        }
        write_file(self._path(key, code), (json.dumps(record, separators=(",", ":")) + "\n").encode())

    def read(self, key: str) -> FinishedArm | None:
        """Read the newest result of an arm, whatever code gave it; None if it is not finished."""
        finished = [self._read(path) for path in self._paths(key)]
        return max(finished, key=lambda result: result.date, default=None)

    def _read(self, path: Path) -> FinishedArm:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return FinishedArm(record["code"], record.get("date", ""), ArmResult.from_json(record["result"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}): delete it to run the arm again") from error

    def seeds(self) -> list[int]:
        """List the seeds of which there is a result."""
        return sorted({int(path.stem.split("-")[2]) for path in (self.folder / RESULTS).glob("*-*-*.json")})

    def _path(self, key: str, code: str) -> Path:
        return self.folder / RESULTS / f"{key}-{code}.json"

    def _paths(self, key: str) -> list[Path]:
        """List an arm's files. The name of the oldest has no code."""
        without_code = self.folder / RESULTS / f"{key}.json"
        older = [without_code] if without_code.is_file() else []
        return older + sorted((self.folder / RESULTS).glob(f"{key}-*.json"))


def _thinned(items: Sequence[Item]) -> list[Item]:
    """Keep the first FIRST_ROUNDS items, and of the later ones some at even distances, the last one included."""
    if len(items) <= _MOST_ROUNDS:
        return list(items)
    later = items[FIRST_ROUNDS:]
    later_kept = _MOST_ROUNDS - FIRST_ROUNDS
    return [*items[:FIRST_ROUNDS], *(later[round(i * (len(later) - 1) / (later_kept - 1))] for i in range(later_kept))]


def _rounded(value: Any) -> Any:
    """Round all floats to six digits: the noise of a seed leaves fewer."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value
