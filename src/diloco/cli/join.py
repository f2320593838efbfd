"""`diloco join INVITATION`: into a swarm, with nothing but the invitation.

What comes from the swarm is data: a description of the run (training/described.py says what it may hold), a tokenizer
and token shards, each held against its digest. Everything that concerns this machine (where files are, what is loaded
and executed, which devices and ports) is decided here, by this command line alone.
"""

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Protocol

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from diloco.cli.display.live import Display, PipeSafeConsole
from diloco.cli.swarm import SWARM_TEXT, Prepared, check_network, check_text, run_workers, with_text
from diloco.cli.train import check_out, new_run_folder
from diloco.data.corpus import TOKENIZER, CorpusMeta
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.preparation.received_corpus import (
    bytes_to_receive,
    find_corpus,
    receive_files,
    receive_metadata,
    received_corpus_folder,
)
from diloco.engines.swarm.installed import check_swarm
from diloco.engines.swarm.run_files import INVITATION_FILE, PEERS_FILE, SWARM_FOLDER, write_private
from diloco.errors import ConfigError, DataError
from diloco.models.native.presets import PRESETS, preset
from diloco.sinks.registry import check_installed
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig, is_shared, may_change
from diloco.training.config.run_file import known_keys, options
from diloco.training.processes.run_lock import run_lock
from diloco.training.records.run_description import MAX_BYTES, RUN_JSON, Described
from diloco.training.shard_claims import shards_of

if TYPE_CHECKING:
    from diloco.engines.swarm.node.guest import Guest
    from diloco.engines.swarm.trust.invitation import Invitation

CLOCK_SECONDS = 30.0
"""A clock that is off by more is refused: expiry and logs would make no sense."""
_MOST_DESCRIPTION_BYTES = 1 << 28
_STATES = 5
"""Parameters, two moments, anchor, outer momentum: what a checkpoint holds of each parameter, in fp32."""

_HELP = """\
[bold]diloco join[/] INVITATION \\[OPTIONS]

Join a run that was begun with `diloco train --engine swarm`, at any time. The
configuration, the tokenizer, a share of the text and the state of training come
from the others; only what concerns this machine is decided here:

  --workers N           workers on this machine (default 1)
  --device D            auto (default), cpu, cuda
  --threads N           CPU threads of each worker
  --out RUNDIR          the run folder (default runs/<date>-<model>)
  --data.source X       read this text instead of a share of the swarm's
  --model M             if the run is not of a preset: the same model, here
  --port N, --host A    where to listen (default: any free port, all addresses)
  --announce A          what others should call: HOST, HOST:PORT or a multiaddr
  --sinks S             also write to tensorboard, wandb, trackio (with commas)

and --compute.*, --checkpoint.*, --data.cache_dir, --training.accumulation. Ctrl-C
leaves; the others go on. To come back: diloco train --resume RUNDIR.

Example:  diloco join diloco1... --workers 2 --device cuda"""


class FetchBounded(Protocol):
    """As Guest.fetch."""

    def __call__(
        self, name: str, path: Path, most_bytes: int = ..., digest: str | None = ..., *, first: int = ...
    ) -> None: ...


def join(
    invitation: str = "",
    /,
    *given: Annotated[str, Parameter(allow_leading_hyphen=True)],
    help_join: Annotated[bool, Parameter(name="--help-join")] = False,
) -> None:
    """Join a run of a swarm."""
    console = PipeSafeConsole()
    if help_join:
        console.print(_HELP, highlight=False)
        return
    check_swarm()
    tokens = own_options(given)
    from diloco.engines.swarm.trust.invitation import Invitation

    come_in(Invitation.parse(invitation, time.time()), tokens, console)


def own_options(given: Sequence[str]) -> list[str]:
    """The options of this machine; others are the swarm's to say."""
    tokens, named = options(given)
    for name in named:
        if name not in known_keys():
            raise ConfigError(f"--{name} is not an option of diloco join: see diloco join --help")
        if is_shared(name):
            raise ConfigError(f"--{name} is the same for all members of a swarm, and comes from it: leave it out")
    return tokens


def come_in(invitation: "Invitation", tokens: list[str], console: Console) -> None:
    """Look at the swarm, take what is needed, and train."""
    from diloco.engines.swarm.node.guest import Guest

    with ExitStack() as held:
        with Guest(invitation) as guest:
            check_clock(guest.clock())
            described = _described(guest)
            config = configured(described, tokens)
            check_out(config)
            check_network(config)
            check_installed(config.sink_names)
            members = [one for one in guest.status()["members"] if one["live"] and one["number"] >= 0]
            _say_what(console, config, described, len(members))
            display = held.enter_context(Display(console, config))
            config, text = receive_text(config, described, guest.fetch, len(members), display, guest.hosts)
            check_text(config, text)
            folder = new_run_folder(config)
            held.enter_context(run_lock(folder))
            write_private(folder / SWARM_FOLDER / INVITATION_FILE, invitation.text() + "\n")
            write_private(folder / SWARM_FOLDER / RUN_JSON, described.text())
            guest.remember(folder / SWARM_FOLDER / PEERS_FILE)
        run_workers(config, console, display, folder, text, held, founder=False)


def _described(guest: "Guest") -> Described:
    """As all of those who let this machine in tell it: it is not signed by anybody."""
    told = []
    with TemporaryDirectory(prefix="diloco-") as temporary:
        path = Path(temporary) / RUN_JSON
        for first in range(guest.hosts):
            guest.fetch(RUN_JSON, path, MAX_BYTES, first=first)
            told.append(Described.read(path))
    return agreed(told)


def agreed(told: Sequence[Described]) -> Described:
    """The first one's; refused if it is of another run than another one's. Its end, say, may have been put off."""
    lasting = [
        {key: value for key, value in one.values.items() if not may_change(key)}
        | {"the model": one.model, "the text": one.corpus}
        for one in told
    ]
    for other in lasting[1:]:
        differs = sorted(key for key, value in lasting[0].items() if other[key] != value)
        if differs:
            raise ConfigError(
                f"two workers of this run describe it differently ({', '.join(differs[:3])}), so one of them is not to "
                "be trusted: ask the run's owner for a fresh invitation"
            )
    return told[0]


def configured(described: Described, tokens: list[str]) -> RunConfig:
    """One configuration of what the swarm says and what this machine decides, validated like a run file's."""
    from diloco.cli.main import parsed_config

    given = options(tokens)[1]
    if described.model is None and "model" not in given:
        raise ConfigError("this run is of a model that is not a preset: name the same model here, with --model")
    if described.model is not None and given.get("model", described.model) != described.model:
        raise ConfigError(f"--model {given['model']}: this run is of the model {described.model}; leave it out")
    default = [f"--{key}={value}" for key, value in _defaults(described).items() if key not in given]
    return parsed_config(options([*described.tokens(), *default, *tokens])[0])


def _defaults(described: Described) -> dict[str, str]:
    values = {"workers": "1", "data.source": SWARM_TEXT}
    return values if described.model is None else values | {"model": described.model}


def receive_text(
    config: RunConfig, described: Described, fetch: FetchBounded, members: int, display: Display, hosts: int = 1
) -> tuple[RunConfig, Prepared]:
    """The text, as far as this machine needs and lacks it; from any of the `hosts` that `fetch` knows."""
    digest, folder = described.corpus, received_corpus_folder(config.data, described.corpus)
    own_text = config.data.source != SWARM_TEXT
    try:
        shared = find_corpus(config.data, digest)
        if shared is None:
            meta = _describing_text(folder, digest, fetch, hosts)
        else:
            meta, folder = shared.meta, shared.folder
        _check_room(config, meta.vocab_size)
        shards = [] if own_text else _share(meta.shard_tokens, members, config.workers)
        check_space(folder, bytes_to_receive(folder, meta, shards), "the text")
        shared = receive_files(folder, meta, shards, fetch, display.show_preparation)
    except OSError as error:
        raise DataError(
            f"the text cannot be received into {folder}: {error}; nothing of it is left half written"
        ) from error
    if own_text or config.model not in PRESETS:
        config = with_text(config, tokenizer=str(folder / TOKENIZER))
    check_run_model(config)
    return config, Prepared(shared, prepare(config.data, display.show_preparation) if own_text else None)


def _describing_text(folder: Path, digest: str, fetch: FetchBounded, hosts: int) -> CorpusMeta:
    """From the first of the hosts that tells the truth."""
    problem: DataError | None = None
    for first in range(hosts):
        bounded = partial(fetch, most_bytes=_MOST_DESCRIPTION_BYTES, first=first)
        try:
            return receive_metadata(folder, digest, bounded)
        except DataError as error:
            problem = error
    assert problem is not None, "somebody has let this machine in"
    raise problem


def _share(shard_tokens: Sequence[int], members: int, workers: int) -> list[int]:
    """Of those who come last; what more is needed later comes beside training."""
    places = members + workers
    shares = [shards_of(len(shard_tokens), place, places) for place in range(members, places)]
    return sorted({shard for share in shares for shard in share})


def check_clock(theirs: float) -> None:
    off = time.time() - theirs
    if abs(off) > CLOCK_SECONDS:
        raise ConfigError(
            f"this machine's clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the swarm's: set it, with "
            "`timedatectl set-ntp true`, say, and try again"
        )


def _check_room(config: RunConfig, vocab_size: int) -> None:
    """For the checkpoints of this machine's workers; before any text is received."""
    if config.model in PRESETS and config.checkpoint.interval != 0:
        length = config.data.sequence_length
        shape = preset(config.model, vocab_size=vocab_size, max_sequence_length=length)
        size = 4 * _STATES * shape.num_parameters() * config.workers * (config.checkpoint.keep + 1)
        check_space(Path(config.out or "runs"), size, "checkpoints")


def check_space(folder: Path, needed: int, what: str) -> None:
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ConfigError(
            f"there is no room for {what} in {folder}: {_size(needed)} needed, {_size(free)} free; make room, or "
            "choose another place with --out or --data.cache_dir"
        )


def _size(count: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def _say_what(console: Console, config: RunConfig, described: Described, members: int) -> None:
    model = described.model or config.model
    console.print(
        Text(
            f"the swarm: {model}, {config.steps} inner steps, H = {config.sync.num_inner_steps}, {config.sync.codec}; "
            f"{members} {'worker is' if members == 1 else 'workers are'} there"
        ),
        soft_wrap=True,
    )
