"""The two ways in which a machine's workers start in a bucket (start.py): begin a run there, or join the one that it
has. Torch-free.

What joiners read from the bucket is data only, as in a swarm (swarm_start.py). It is signed by no key: a machine that
can write into the bucket is a member of the run.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from diloco.bucket.visit import BucketVisit
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.preparation.received_corpus import corpus_files, find_corpus
from diloco.errors import ConfigError
from diloco.own_command import command
from diloco.swarm.run_files import SWARM_FOLDER, write_private
from diloco.training.batches import WorkerTexts
from diloco.training.checkpoints.manifests import find_checkpoints
from diloco.training.checkpoints.resume import check_same_run, check_steps
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.processes.start import (
    EndedRun,
    Observer,
    check_device,
    check_room,
    create_run_folder,
    start_run,
)
from diloco.training.processes.swarm_start import (
    SWARM_TEXT,
    SwarmWorkers,
    check_text,
    check_unfinished,
    receive_text,
)
from diloco.training.records.run_description import MAX_BYTES, RUN_JSON, RunDescription

if TYPE_CHECKING:
    from diloco.swarm.protocol.status import RunStatus


class BucketWorkers(SwarmWorkers):
    """Workers of a run in a bucket on this machine, from the run folder on."""

    def __init__(self, config: RunConfig, resume: Path | None) -> None:
        super().__init__(config, resume)
        assert config.bucket is not None
        self.visit = BucketVisit(config.bucket)

    def check(self) -> None:
        check_device(self.config)
        self.visit.check()

    def run(self, folder: Path, observer: Observer) -> EndedRun:
        return self.run_workers(folder, observer)


class BucketFounder(BucketWorkers):
    """The machine that begins a run; or any machine that continues its part of one."""

    founder = True

    def check(self) -> None:
        super().check()
        check_run_model(self.config)
        if self.resume is None and self.visit.has(RUN_JSON):
            assert self.config.bucket is not None
            raise ConfigError(
                f"{self.config.bucket} has a run already: join it ({command('join', self.config.bucket)}), or name "
                "another place for this one"
            )

    def prepare_text(self, observer: Observer) -> None:
        self.texts = self._prepared(observer)
        check_text(self.config, self.texts)
        check_room(self.config, self.texts.shared.vocab_size, self.resume)

    def _prepared(self, observer: Observer) -> WorkerTexts:
        data = self.config.data
        if self.resume is None:
            return WorkerTexts(prepare(data, observer.show_preparation))
        digest = RunDescription.read(self.resume / SWARM_FOLDER / RUN_JSON).corpus
        own = None if data.source == SWARM_TEXT else prepare(data, observer.show_preparation)
        if own is not None and own.digest == digest:
            return WorkerTexts(own)
        shared = find_corpus(data, digest)
        if shared is None:
            raise ConfigError(
                f"the text of this run (digest {digest[:16]}) is no longer in the cache of this machine: join again, "
                f"with {command('join', str(self.config.bucket))}"
            )
        return WorkerTexts(shared, own)

    def create_folder(self) -> Path:
        """Make the run folder, and put what joiners need into the bucket: the description last."""
        folder = create_run_folder(self.config)
        path = folder / SWARM_FOLDER / RUN_JSON
        write_private(path, RunDescription.of(self.config, self.texts.shared.digest).text())
        self.visit.put({**corpus_files(self.texts.shared), RUN_JSON: path})
        return folder

    def check_resumable(self, folder: Path) -> None:
        """Also renews the description for joiners: `steps` may have changed."""
        path = folder / SWARM_FOLDER / RUN_JSON
        digest = self.texts.shared.digest
        for checkpoint in find_checkpoints(folder)[0][-1:]:
            model = str(checkpoint.manifests[0].config["model"])  # no option can change it
            check_same_run(checkpoint, self.config.lasting(digest, model))
            check_steps(checkpoint, self.config.steps)
        write_private(path, RunDescription.of(self.config, digest).text())
        self.visit.put({RUN_JSON: path}, always=frozenset({RUN_JSON}))


class BucketJoiner(BucketWorkers):
    """A machine that joins a run, with nothing but access to its bucket."""

    founder = False

    def __init__(self, config: RunConfig, description: RunDescription, members: int) -> None:
        super().__init__(config, None)
        self._description = description
        self._members = members

    def prepare_text(self, observer: Observer) -> None:
        show = observer.show_preparation
        self.config, self.texts = receive_text(self.config, self._description, self.visit.fetch, self._members, show)
        check_text(self.config, self.texts)

    def create_folder(self) -> Path:
        folder = create_run_folder(self.config)
        write_private(folder / SWARM_FOLDER / RUN_JSON, self._description.text())
        return folder

    def check_resumable(self, folder: Path) -> None:
        del folder
        raise AssertionError("a run that was joined is resumed by its founder's way: diloco train --resume")


def join_bucket(
    url: str,
    configure: Callable[[RunDescription], RunConfig],
    observe: Callable[[RunConfig, int], AbstractContextManager[Observer]],
) -> EndedRun:
    """Read the run's description and text from its bucket, and train. `observe` also receives the number of members."""
    visit = BucketVisit(url)
    description = read_description(visit)
    members = check_unfinished(description, visit.status())
    way = BucketJoiner(configure(description), description, members)
    ended = start_run(way, lambda config: observe(config, members))
    assert ended is not None, "this process tells the end of its workers"
    return ended


def read_description(visit: BucketVisit) -> RunDescription:
    """Read what the run in a bucket trains; raises ConfigError if there is none."""
    if not visit.has(RUN_JSON):
        start = command("train", "--engine", "bucket", "--bucket", visit.url)
        raise ConfigError(f"{visit.url} has no run: begin one ({start}), or check the place")
    with TemporaryDirectory(prefix="diloco-") as temporary:
        path = Path(temporary) / RUN_JSON
        visit.fetch(RUN_JSON, path, MAX_BYTES)
        return RunDescription.read(path)


def read_run(url: str) -> "tuple[RunStatus, int]":
    """Read the workers of the run in a bucket, and its inner steps."""
    visit = BucketVisit(url)
    return visit.status(), int(read_description(visit).values["steps"])
