"""Before a run starts: its folder is created or reopened, its text is prepared and checked. Torch-free."""

import platform
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile

from diloco.atomic_files import write_file
from diloco.data.corpus import Corpus
from diloco.data.order import WorkerBatches, check_disjoint, check_validation, worker_shards
from diloco.data.preparation.clusters import FeatureModel, LoadFeatures
from diloco.errors import ConfigError
from diloco.history.log import end_cut_line
from diloco.models.pretrained import check_model, short_name
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.records.run_folder import RUN_FILE
from diloco.training.records.summary import SUMMARY_FILE, read_summary
from diloco.training.sizes.disk import check_disk

NO_CUDA = "device = cuda, but this machine has no CUDA device that torch can use: use --device cpu"

# The run folder


def create_run_folder(config: RunConfig) -> Path:
    """A new folder with its config.toml; one that exists and is not empty is refused."""
    folder = Path(config.out or Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{short_name(config.model.name)}")
    try:
        if config.out is None:
            folder = _make_unused(folder)
        else:
            _check_unused(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / RUN_FILE, to_toml(config))
    except OSError as error:
        raise _not_writable(folder, error) from error
    return folder


def reopen_run_folder(folder: Path, config: RunConfig) -> None:
    """Before a resumed run starts: write its present configuration, and remove the summary of its earlier end."""
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    end_cut_line(folder)
    write_file(folder / RUN_FILE, to_toml(config))


def completed_steps(folder: Path, config: RunConfig) -> int | None:
    """The inner steps of a run that has nothing left to do; None if it can be resumed."""
    try:
        summary = read_summary(folder)
    except ConfigError:  # the run has not ended, or its summary is damaged and will be replaced
        return None
    steps: int = summary["inner_steps"]
    return steps if summary["status"] == "complete" and steps >= config.steps else None


def check_device(config: RunConfig) -> None:
    """Refuse a GPU that is not there before there is a run folder; torch is imported only if one is asked for."""
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(NO_CUDA)


def device_note(config: RunConfig) -> str | None:
    """What the user should know of a device that is here and is not used."""
    if config.device == "auto" and (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return "the workers compute on the CPU: Apple GPUs (MPS) are not supported"
    return None


def check_out(config: RunConfig) -> None:
    """Refuse an `out` that cannot become the run folder before anything is prepared or received; create nothing."""
    folder = Path(config.out or "runs")
    missing = [path for path in (folder, *folder.parents) if config.out is not None and not path.exists()]
    try:
        if config.out is not None:
            _check_unused(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(folder, error) from error
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _make_unused(folder: Path) -> Path:
    """Two runs started within a second get different folders."""
    number = 1
    while True:
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return candidate


def _check_unused(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out = {folder} exists and is not an empty folder: choose another, or remove it")


def _not_writable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the run folder {folder} cannot be written ({error.strerror}): choose another --out")


def check_room(config: RunConfig, vocab_size: int, folder: Path | None = None, workers: int | None = None) -> None:
    """Refuse a run whose checkpoints do not fit on the disk. `folder`: of a resumed run; `workers`: on this machine."""
    length = config.data.sequence_length
    parameters = config.model.num_parameters(vocab_size=vocab_size, sequence_length=length)
    trainable = None
    if config.lora.rank is not None:
        from diloco.models.registry import model_outline  # imports torch

        outline = model_outline(config.model, vocab_size=vocab_size, sequence_length=length, lora=config.lora)
        trainable = sum(parameter.numel() for parameter in outline.parameters() if parameter.requires_grad)
    check_disk(config, parameters, folder or Path(config.out or "runs"), workers, trainable=trainable)


# The text


def load_features(config: RunConfig) -> LoadFeatures:
    """Loads data.feature_model if the preparation needs it; only then torch is imported."""

    def load(folder: Path) -> FeatureModel:
        import torch

        from diloco.training.features import feature_model

        device = {"auto": "cuda" if torch.cuda.is_available() else "cpu"}.get(config.device, config.device)
        return feature_model(folder, device)

    return load


def check_data(config: RunConfig, corpus: Corpus, workers: int) -> None:
    """Refuse a corpus that is too small for these workers, or does not fit the model, before a worker is started."""
    check_disjoint(corpus, workers)
    length, batch = config.data.sequence_length, config.training.batch_size
    for worker in range(workers):
        WorkerBatches(corpus, length, batch, worker_shards(corpus.shards, worker, workers), config.seed)
    check_validation(corpus, length, config.training.eval_windows)
    check_vocabulary(config, corpus)


def check_vocabulary(config: RunConfig, corpus: Corpus) -> None:
    """Refuse a pre-trained model that has fewer token vectors than the corpus has tokens, or shorter sequences."""
    pretrained = check_model(config.model.name, weights=False)
    if pretrained is not None:
        pretrained.check(vocab_size=corpus.vocab_size, sequence_length=config.data.sequence_length)
