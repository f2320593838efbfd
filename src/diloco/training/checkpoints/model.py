"""The model of a checkpoint: the parameters that the workers last agreed on, without resuming the run."""

from pathlib import Path

from diloco.data.corpus import Corpus
from diloco.data.preparation.received_corpus import find_corpus
from diloco.errors import CheckpointError, ConfigError
from diloco.models.base import LanguageModel
from diloco.models.registry import build_model
from diloco.outer.tensors import pieces_of
from diloco.training.checkpoints.manifests import Checkpoint, find_checkpoints
from diloco.training.checkpoints.resume import differing_parts
from diloco.training.checkpoints.tensor_files import read_tensors, saved_tensors
from diloco.training.checkpoints.worker_state import trained_tensors
from diloco.training.config.run import RunConfig


def find_checkpoint(run: Path, step: int | None) -> Checkpoint:
    """Return the newest undamaged checkpoint, or that of an inner step; of any worker, since their anchors are the
    same."""
    complete, _ = find_checkpoints(run)
    if not complete:
        raise ConfigError(f"{run} has no complete checkpoint: wait for the first one, or export the model at the end")
    wanted = [checkpoint for checkpoint in complete if step is None or checkpoint.step == step]
    if not wanted:
        steps = ", ".join(map(str, sorted({checkpoint.step for checkpoint in complete})))
        raise ConfigError(f"--checkpoint {step}: {run} has the checkpoints of steps {steps}")
    damage: list[str] = []
    for checkpoint in sorted(wanted, key=lambda checkpoint: (-checkpoint.step, checkpoint.worker)):
        damaged_files = checkpoint.damage()
        if not damaged_files:
            return checkpoint
        damage += map(str, damaged_files)
    raise CheckpointError(f"every checkpoint asked for is damaged ({'; '.join(damage)}): restore the files")


def check_model_of(checkpoint: Checkpoint, description: str) -> None:
    """Refuse a model that is not the one that the checkpoint's run began with: the frozen weights of LoRA may have been
    replaced in their folder."""
    saved = str(checkpoint.manifests[0].config["model"])
    if saved != description:
        raise ConfigError(
            f"the model's folder is no longer that of the run's start ({differing_parts(saved, description)} differ): "
            "restore it"
        )


def checkpoint_model(config: RunConfig, checkpoint: Checkpoint) -> tuple[LanguageModel, Corpus]:
    """Return the model with the checkpoint's anchor, and the prepared text, which has the tokenizer."""
    digest = str(checkpoint.manifests[0].config["corpus"])
    corpus = find_corpus(config.data, digest)
    if corpus is None:
        raise ConfigError(
            f"the prepared text of this run (digest {digest[:16]}), which has its tokenizer, is no longer in the "
            "cache: prepare it again with diloco data prepare and the run's options"
        )
    model = build_model(
        config.model, vocab_size=corpus.vocab_size, sequence_length=config.data.sequence_length, lora=config.lora
    )
    saved = saved_tensors(checkpoint.folder)
    memory = {}
    for name, tensor in trained_tensors(model).items():
        anchor = f"outer.anchor.{name}"  # in data-parallel training the parameters themselves are the agreed ones
        memory[anchor if anchor in saved else f"model.{name}"] = pieces_of(tensor)
    read_tensors(checkpoint.folder, memory)
    check_model_of(checkpoint, model.description)
    return model, corpus
