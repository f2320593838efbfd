"""A pre-trained model brings its tokenizer, its length and a recipe for fine-tuning; what the user asks for wins."""

from pathlib import Path

import pytest

from diloco.core.config import OuterConfig
from diloco.data.config import DataConfig
from diloco.data.preparation.corpus_cache import prepare
from diloco.errors import ConfigError
from diloco.models.choice import ModelChoice
from diloco.models.registry import build_model
from diloco.training.config.recipes import FINE_TUNING, FINE_TUNING_LENGTH, check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import merge
from diloco.training.processes.start import check_data, create_run_folder
from support.pretrained_models import LENGTH, make_folder
from support.train_runs import write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "small-llama")


def options(*tokens: str) -> dict[str, str]:
    """The options that are parsed in the end; the last of a name counts."""
    pairs = [token.removeprefix("--").split("=", 1) for token in merge(tokens)[0]]
    return dict(pairs)


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_a_pretrained_model_brings_its_tokenizer_its_length_and_the_recipe(folder: Path, prefix: str) -> None:
    given = options(f"--model={prefix}{folder}")
    assert given["data.tokenizer"] == str(folder)
    assert int(given["data.sequence_length"]) == LENGTH < FINE_TUNING_LENGTH
    assert "data.vocab_size" not in given
    assert {name: given[name] for name in FINE_TUNING} == {name: str(value) for name, value in FINE_TUNING.items()}


def test_a_model_that_takes_long_sequences_gets_the_length_of_the_recipe(tmp_path: Path) -> None:
    make_folder(tmp_path / "m", max_position_embeddings=8192)
    assert options(f"--model={tmp_path / 'm'}")["data.sequence_length"] == str(FINE_TUNING_LENGTH)


def test_what_is_asked_for_wins_over_the_model(folder: Path) -> None:
    given = options(f"--model={folder}", "--data.tokenizer=mine.json", "--data.sequence_length=9", "--inner.lr=1")
    assert (given["data.tokenizer"], given["data.sequence_length"], given["inner.lr"]) == ("mine.json", "9", "1")


def test_a_number_of_another_outer_optimizer_does_not_choose_it(folder: Path) -> None:
    for given in ("--outer.lr=0.9", "--outer.momentum=0.5"):
        assert options(f"--model={folder}", given)["outer.optimizer"] == "sgd"
    with pytest.raises(ConfigError, match=r"no effect on the outer optimizer 'sgd'.*--outer.optimizer"):
        OuterConfig(optimizer="sgd", momentum=0.5)
    assert "outer.optimizer" not in options(f"--model={folder}", "--recipe=paper")


def test_a_model_that_is_not_there_is_refused_before_anything_else() -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        merge(["--model=./absent"])


def test_a_pretrained_model_without_its_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.tokenizer is none.*give the model"):
        check_run_model(RunConfig(model=ModelChoice(str(folder))))


def test_sequences_that_are_too_long_are_refused_before_the_data_is_prepared(folder: Path) -> None:
    data = DataConfig(tokenizer=str(folder / "tokenizer.json"), sequence_length=LENGTH + 1)
    with pytest.raises(ConfigError, match=f"--data.sequence_length {LENGTH}"):
        check_run_model(RunConfig(model=ModelChoice(str(folder)), data=data))


def test_a_tokenizer_with_too_many_tokens_is_refused_before_a_worker_starts(folder: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    data = DataConfig(source=str(text), vocab_size=500, sequence_length=16, cache_dir=str(tmp_path / "cache"))
    config = RunConfig(model=ModelChoice(str(make_folder(tmp_path / "m", vocab_size=301))), data=data)
    with pytest.raises(ConfigError, match=r"tokens and model .* has vectors for 301"):
        check_data(config, prepare(data), workers=1)


def test_a_run_folder_is_named_after_the_last_part_of_the_models_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = create_run_folder(RunConfig(model=ModelChoice(f"hf:{folder}")))
    assert run.parent == Path("runs")
    assert run.name.endswith("-small-llama")


def test_workers_may_have_the_same_model_in_different_places(folder: Path, tmp_path: Path) -> None:
    copy = make_folder(tmp_path / "copy", seed=3)
    other = make_folder(tmp_path / "other", rms_norm_eps=0.1)

    def identity(path: Path, prefix: str) -> str:
        model = build_model(f"{prefix}{path}", vocab_size=9, sequence_length=9)
        return RunConfig(model=ModelChoice(f"{prefix}{path}")).identity("corpus", model.description)

    for prefix in ("", "hf:"):
        assert identity(folder, prefix) == identity(copy, prefix) != identity(other, prefix)
