"""A saved folder is the same model to us and to transformers; a folder that is not one is refused by name."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco.errors import ConfigError
from diloco.models.native.config import ModelConfig
from diloco.models.native.model import load_model, save_model
from diloco.models.native.transformer import Transformer

GROUPED = ModelConfig(
    vocab_size=300,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_sequence_length=32,
    tie_embeddings=True,
)
SHAPES = {
    "grouped heads, free head size, tied": GROUPED,
    "grouped heads, free head size, untied": replace(GROUPED, tie_embeddings=False),
    "one key/value head, other theta and eps": replace(GROUPED, num_kv_heads=1, rope_theta=500.0, norm_eps=1e-3),
    "plain heads": replace(GROUPED, num_kv_heads=4, head_dim=12, tie_embeddings=False),
}
END = "<|end|>"


def make(config: ModelConfig, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(config)
    for parameter in model.parameters():
        # Larger than the initial weights, and norms that are not all ones, so that no part can be left out.
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def make_tokenizer(path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["one worker, two workers"], trainer)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_loads_the_folder_and_computes_the_same_logits(shape: str, tmp_path: Path) -> None:
    model = make(SHAPES[shape])
    save_model(model, tmp_path)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.dtype == torch.float32
    tokens = torch.randint(0, 300, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_that_transformers_saved_loads_with_the_same_logits(tied: bool, tmp_path: Path) -> None:
    save_model(make(replace(GROUPED, tie_embeddings=tied)), tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(0, 300, (2, 32))
    with torch.no_grad():
        logits = load_model(tmp_path / "theirs")(tokens)
        torch.testing.assert_close(logits, theirs(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_save_and_load_give_back_every_bit_and_the_shape(shape: str, tmp_path: Path) -> None:
    model = make(SHAPES[shape])
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    before, after = model.state_dict(), loaded.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens = torch.randint(0, 300, (2, 32))
    assert torch.equal(model(tokens), loaded(tokens))


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    save_model(make(GROUPED), tmp_path)
    before = torch.get_rng_state()
    load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loaded_model_trains_and_saves_over_its_own_folder(tmp_path: Path) -> None:
    save_model(make(GROUPED), tmp_path)
    model = load_model(tmp_path)
    tokens = torch.randint(0, 300, (2, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.loss(tokens, tokens)
    before.backward()
    optimizer.step()
    after = model.loss(tokens, tokens)
    assert after < before
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path).loss(tokens, tokens), after)


def test_a_model_in_bf16_is_saved_as_the_fp32_that_its_config_promises(tmp_path: Path) -> None:
    save_model(make(GROUPED).bfloat16(), tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


def test_a_second_copy_of_tied_embeddings_is_accepted_only_if_it_is_a_copy(tmp_path: Path) -> None:
    save_model(make(GROUPED), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": copy}, path)
    load_model(tmp_path)
    save_file({**tensors, "lm_head.weight": copy + 1}, path)
    with pytest.raises(ConfigError, match=r"lm_head.weight is unexpected"):
        load_model(tmp_path)


def test_missing_unexpected_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    save_model(make(GROUPED), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        load_model(tmp_path)
    for problem in (
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.0.self_attn.q_proj.bias is unexpected",
        "model.norm.weight has shape [3] instead of [48]",
    ):
        assert problem in str(error.value)


def test_another_family_is_refused_with_its_name(tmp_path: Path) -> None:
    save_model(make(GROUPED), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(ConfigError, match=r"'mamba'.*only 'llama'"):
        load_model(tmp_path)


def test_absent_and_broken_files_are_refused_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json does not exist"):
        load_model(tmp_path)
    save_model(make(GROUPED), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.safetensors does not exist.*save_pretrained"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json cannot be read as JSON"):
        load_model(tmp_path)


def test_a_save_leaves_only_the_files_it_promises(tmp_path: Path) -> None:
    save_model(make(GROUPED), tmp_path / "plain")
    assert {p.name for p in (tmp_path / "plain").iterdir()} == {"config.json", "model.safetensors"}
    tokenizer = make_tokenizer(tmp_path / "t.json")
    save_model(make(GROUPED), tmp_path / "with", tokenizer_path=tokenizer)
    assert {p.name for p in (tmp_path / "with").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_save_that_fails_midway_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(make(GROUPED), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def dies_halfway(tensors: object, metadata: object) -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("diloco.models.native.model.file_chunks", dies_halfway)
    with pytest.raises(OSError, match="disk full"):
        save_model(make(GROUPED, seed=1), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_whoever_reads_a_file_while_it_is_saved_again_reads_the_old_one_to_its_end(tmp_path: Path) -> None:
    save_model(make(GROUPED), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with (tmp_path / "model.safetensors").open("rb", buffering=0) as reader:
        save_model(make(GROUPED, seed=1), tmp_path)
        assert reader.read() == before
    assert (tmp_path / "model.safetensors").read_bytes() != before


def test_transformers_loads_the_tokenizer_and_knows_where_texts_end(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t.json")
    save_model(make(GROUPED), tmp_path / "model", tokenizer_path=path, end_of_text=END)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "two workers , one"
    assert tokenizer(text)["input_ids"] == Tokenizer.from_file(str(path)).encode(text).ids
    assert tokenizer.eos_token == END
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.eos_token_id == 0


def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t.json")
    out = tmp_path / "model"
    largest = Tokenizer.from_file(str(path)).get_vocab_size() - 1
    small = make(replace(GROUPED, vocab_size=100))
    with pytest.raises(ConfigError, match=f"has token {largest}.*0 to 99"):
        save_model(small, out, tokenizer_path=path)
    with pytest.raises(ConfigError, match=r"'<eos>'.*no such token"):
        save_model(make(GROUPED), out, tokenizer_path=path, end_of_text="<eos>")
    with pytest.raises(ConfigError, match="does not exist"):
        save_model(make(GROUPED), out, tokenizer_path=tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="without a tokenizer"):
        save_model(make(GROUPED), out, end_of_text=END)
    assert not out.exists()


def test_a_folder_that_cannot_be_made_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.model cannot be made"):
        save_model(make(GROUPED), tmp_path / "file" / "model")
