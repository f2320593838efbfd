"""A causal language model of transformers trains, writes and is saved as itself; what cannot be trained is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM

from diloco.data.config import DataConfig
from diloco.data.preparation.corpus_cache import prepare
from diloco.errors import ConfigError
from diloco.models.generation import Sampling, generate
from diloco.models.hugging_face import HuggingFaceModel
from diloco.models.registry import build_model
from diloco.training.config.run import InnerConfig
from diloco.training.inner import inner_optimizer
from diloco.training.validation import evaluate
from support.pretrained_models import END, FAMILIES, VOCAB, logits, make_folder, make_tokenizer, some_tokens
from support.train_runs import write_text

GREEDY = Sampling(temperature=0)


def load(folder: Path) -> HuggingFaceModel:
    model = build_model(f"hf:{folder}", vocab_size=VOCAB - 10, sequence_length=16)
    assert isinstance(model, HuggingFaceModel)
    return model


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_one_that_transformers_computes(family: str, tmp_path: Path) -> None:
    model = load(make_folder(tmp_path, family)).eval()
    tokens = some_tokens()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours = model.loss(tokens[:, :-1], tokens[:, 1:])
        expected = theirs(tokens, labels=tokens).loss
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_and_saved_model_is_the_same_to_transformers(family: str, tmp_path: Path) -> None:
    model = load(make_folder(tmp_path / "before", family, **{"resid_pdrop": 0.0} if family == "gpt2" else {}))
    tokens = some_tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    model.save(tmp_path / "after", tokenizer_path=tmp_path / "before" / "tokenizer.json", end_of_text=END)
    with torch.no_grad():
        expected = model.eval()(tokens)
    torch.testing.assert_close(logits(tmp_path / "after", tokens), expected, atol=1e-5, rtol=0)
    assert not torch.allclose(logits(tmp_path / "before", tokens), expected, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cached_text_is_the_uncached_one_and_that_of_transformers(family: str, tmp_path: Path) -> None:
    model = load(make_folder(tmp_path, family))
    prompt = some_tokens(1, 7)[0].tolist()
    text = list(prompt)
    model.eval()
    for _ in range(20):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    model.train()
    written = generate(model, prompt, max_new_tokens=20, sampling=GREEDY)
    assert written == text[len(prompt) :]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    output = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=VOCAB + 1)
    assert written == output[0, len(prompt) :].tolist()


def test_text_goes_on_beyond_the_window(tmp_path: Path) -> None:
    model = load(make_folder(tmp_path, "gpt2"))
    assert model.max_sequence_length == 64
    assert len(generate(model, some_tokens(1, 60)[0].tolist(), max_new_tokens=50, sampling=GREEDY)) == 50


def test_dropout_acts_in_training_and_not_in_evaluation_or_writing(tmp_path: Path) -> None:
    model = load(make_folder(tmp_path, "gpt2", resid_pdrop=0.5))
    tokens = some_tokens()
    assert model.training
    assert model.loss(tokens, tokens) != model.loss(tokens, tokens)
    texts = [generate(model, [5, 6], max_new_tokens=12, sampling=GREEDY) for _ in range(2)]
    assert texts[0] == texts[1]
    assert all(module.training for module in model.modules())
    model.eval()
    assert model.loss(tokens, tokens) == model.loss(tokens, tokens)


def test_an_evaluation_is_without_dropout_and_training_goes_on_with_it(tmp_path: Path) -> None:
    model = load(make_folder(tmp_path / "m", "gpt2", resid_pdrop=0.5))
    text = write_text(tmp_path / "text.txt", lines=300)
    tokenizer = str(tmp_path / "m" / "tokenizer.json")
    corpus = prepare(DataConfig(source=str(text), tokenizer=tokenizer, cache_dir=str(tmp_path / "cache"), shards=2))
    losses = [evaluate(model, corpus, 16, 4, (0, 1, 8)).loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert all(module.training for module in model.modules())


def test_frozen_weights_stay_as_they_are(tmp_path: Path) -> None:
    model = load(make_folder(tmp_path, "gpt2"))
    model.inner.transformer.wpe.requires_grad_(False)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    tokens = some_tokens()
    optimizer = inner_optimizer(model, InnerConfig(lr=0.01))
    model.loss(tokens, tokens).backward()
    optimizer.step()
    same = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert same == {"inner.transformer.wpe.weight"}


def test_weights_stored_in_bf16_are_trained_and_saved_in_fp32(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "short")
    AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    model = load(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.save(tmp_path / "saved")
    assert {tensor.dtype for tensor in load_file(tmp_path / "saved" / "model.safetensors").values()} == {torch.float32}
    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")["model.norm.weight"], stored.float())


def test_fp32_weights_stay_fp32_where_config_json_says_bf16(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    edit_config(folder, dtype="bfloat16")
    stored = load_file(folder / "model.safetensors")
    model = load(folder)
    assert torch.equal(model.inner.state_dict()["lm_head.weight"], stored["lm_head.weight"])


def test_tied_weights_are_one_parameter_and_stay_tied_when_saved(tmp_path: Path) -> None:
    model = load(make_folder(tmp_path / "m", "llama, tied"))
    names = [name for name, _ in model.named_parameters()]
    assert "inner.model.embed_tokens.weight" in names
    assert "inner.lm_head.weight" not in names
    model.save(tmp_path / "saved")
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    make_folder(tmp_path)
    before = torch.get_rng_state()
    load(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_models_own_tokenizer_files_are_kept(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 7], "temperature": 0.3}')
    other_layout = tmp_path / "tokenizer.json"
    other_layout.write_text(Tokenizer.from_file(str(folder / "tokenizer.json")).to_str(pretty=False))
    load(folder).save(tmp_path / "saved", tokenizer_path=other_layout, end_of_text=END)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes()


def test_another_tokenizer_gets_its_own_files_and_its_own_end_of_text(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", bos_token_id=3, eos_token_id=9)
    other = Tokenizer.from_file(str(folder / "tokenizer.json"))
    other.add_special_tokens(["<|stop|>"])
    other.save(str(tmp_path / "other.json"))
    load(folder).save(tmp_path / "saved", tokenizer_path=tmp_path / "other.json", end_of_text="<|stop|>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.eos_token == "<|stop|>"
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config
    assert (config.bos_token_id, config.eos_token_id) == (None, tokenizer.eos_token_id)


def test_a_save_replaces_the_folder_whole(tmp_path: Path) -> None:
    model = load(make_folder(tmp_path / "m"))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "model-00001-of-00002.safetensors").write_bytes(b"of a former save")
    model.save(tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"m", "saved"}


def test_every_worker_can_save_and_not_only_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(make_folder(tmp_path / "m"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    model.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    assert (tmp_path / "saved" / "config.json").is_file()


def test_a_save_that_writes_no_weights_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(make_folder(tmp_path / "m"))
    monkeypatch.setattr(model.inner, "save_pretrained", lambda _: None)
    with pytest.raises(ConfigError, match="does not exist"):
        model.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_save_that_fails_leaves_the_former_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(make_folder(tmp_path / "m"))
    model.save(tmp_path / "saved")
    before = (tmp_path / "saved" / "model.safetensors").read_bytes()

    def dies(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(model.inner, "save_pretrained", dies)
    with pytest.raises(OSError, match="disk full"):
        model.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"m", "saved"}


def test_the_description_is_of_what_is_computed_and_not_of_where_it_lies(tmp_path: Path) -> None:
    first, second = make_folder(tmp_path / "here"), make_folder(tmp_path / "there", seed=5)
    assert load(first).description == load(second).description
    edit_config(second, rms_norm_eps=0.01)
    assert load(first).description != load(second).description


def test_missing_weights_are_refused_by_name_and_never_made_up(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "gpt2")
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("h.1.mlp.c_fc.weight"))
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"h\.1\.mlp\.c_fc\.weight is missing"):
        load(folder)


def test_what_is_no_causal_language_model_or_brings_code_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    edit_config(folder, model_type="vit", architectures=["ViTModel"])
    with pytest.raises(ConfigError, match=r"cannot be loaded .* as a causal language model"):
        load(folder)
    edit_config(folder, model_type="mine", auto_map={"AutoModelForCausalLM": "code.Mine", "AutoConfig": "code.C"})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(folder)


def test_a_model_that_sees_what_it_is_to_predict_is_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCAB, max_position_embeddings=64, **shape)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="is not causal: what it predicts depends on later tokens"):
        load(tmp_path)
    edit_config(tmp_path, is_decoder=True)
    assert load(tmp_path).training


def test_a_balancing_loss_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    edit_config(folder, output_router_logits=True)
    with pytest.raises(ConfigError, match=r"output_router_logits.*set it to false"):
        load(folder)


def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = load(make_folder(tmp_path / "m"))
    large = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    large.add_tokens([f"word{i}" for i in range(VOCAB)])
    large.save(str(tmp_path / "large.json"))
    with pytest.raises(ConfigError, match=f"0 to {VOCAB - 1}"):
        model.save(tmp_path / "saved", tokenizer_path=tmp_path / "large.json")
    assert not (tmp_path / "saved").exists()
    make_tokenizer(tmp_path / "t")
    with pytest.raises(ConfigError, match="no such token"):
        model.save(tmp_path / "saved", tokenizer_path=tmp_path / "t" / "tokenizer.json", end_of_text="<eos>")
