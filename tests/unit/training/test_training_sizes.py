"""The sizes that are told before a run are those that it has: exactly for disk, rounds and tensors."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.core.config import OuterConfig, SyncConfig
from diloco.core.outer_optimizers import OUTER_OPTIMIZERS
from diloco.data.corpus import Corpus
from diloco.engines.asynchronous import AsynchronousEngine
from diloco.errors import ConfigError
from diloco.history.events import JoinedEvent, RoundEndedEvent, StepEvent, WorkerStartedEvent
from diloco.history.run_history import RunHistory
from diloco.methods.error_feedback import Feedback
from diloco.models.native.config import ModelConfig
from diloco.models.native.model import NativeModel
from diloco.models.registry import model_outline
from diloco.outer.background import BackgroundReplica
from diloco.outer.loop import OuterLoop
from diloco.training.checkpoints.manifests import worker_folder
from diloco.training.checkpoints.tensor_files import saved_tensors
from diloco.training.config.run import (
    CheckpointConfig,
    ComputeConfig,
    InnerConfig,
    RunConfig,
    TrainingConfig,
    num_rounds,
    turns,
)
from diloco.training.loop import Training
from diloco.training.sizes import estimate, room
from diloco.training.sizes.estimate import (
    Estimate,
    bits_per_second,
    measured_bits_per_second,
    measured_step_seconds,
    memory_warning,
)
from diloco.training.sizes.memory import (
    ACTIVATIONS,
    ANCHOR_OF_WORKER_0,
    Placement,
    encoded_vectors,
    native_activations,
    network_memory,
    process_memory,
    traced_peak,
)
from diloco.training.sizes.room import OUTER_STATES, check_disk, disk_use, size_text
from support.methods import method_of
from support.pretrained_models import make_folder
from support.saved_runs import events_of, quick_runs, small_config, small_corpus, train


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quick_runs():
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Corpus]:
    data, corpus = small_corpus(tmp_path_factory.mktemp("text"))
    return small_config(data, SyncConfig(num_inner_steps=3), steps=6), corpus


def told(config: RunConfig, corpus: Corpus, folder: Path) -> Estimate:
    place = Placement(config.workers)
    return estimate.estimate(config, corpus.vocab_size, place, processes=config.workers, folder=folder)


CASES = {
    "as it is": {},
    "int8, sgd": {"sync": SyncConfig(3, codec="int8"), "outer": OuterConfig("sgd")},
    "2bit with error feedback": {"sync": SyncConfig(3, codec="2bit")},
    "fragments, adam": {"sync": SyncConfig(3, fragments=2), "outer": OuterConfig("adam")},
    "overlap": {"sync": SyncConfig(3, fragments=2, overlap_steps=1)},
    "eager": {"sync": SyncConfig(3, outer_overlap="eager")},
    "muon": {"inner": InnerConfig(optimizer="muon", lr=1e-3, warmup_steps=1)},
    "warm start, int4": {"sync": SyncConfig(3, codec="int4", warm_start=2)},
    "second moments": {"sync": SyncConfig(2, codec="int8", second_moment_every=2)},
    "data-parallel": {"mode": "data-parallel", "sync": SyncConfig(codec="fp32")},
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_told_is_what_a_run_of_two_workers_has(
    case: str, text: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    config, corpus = replace(text[0], **CASES[case]), text[1]
    sizes = told(config, corpus, tmp_path)
    worker = train(tmp_path / "run", config, corpus)[0]
    assert sizes.parameters == sum(p.numel() for p in worker.model.parameters())
    _check_tensors(sizes.memory, worker)
    saved = saved_tensors(worker_folder(tmp_path / "run", 6, 0))
    model_tensors = [one for name, one in saved.items() if not name.startswith(("rng.", "also.", "inner.step."))]
    assert any(name.startswith("in_flight.") for name in saved) == (case in ("overlap", "eager"))
    written = sum(4 * torch.Size(one.shape).numel() for one in model_tensors) * config.workers
    assert written <= sizes.disk.checkpoint_bytes
    assert case in ("muon", "overlap") or written == sizes.disk.checkpoint_bytes
    rounds = [event["bytes_sent"] for event in events_of(tmp_path / "run", "round") if event["worker"] == 0]
    if config.mode == "diloco":
        rest = worker.mode.averager.counters.bytes_sent - sum(rounds)
        assert sizes.warm_start_bytes <= rest < sizes.warm_start_bytes + 500  # and headers of the last round
        groups = len(worker.mode.averager.replica.groups)  # type: ignore[union-attr]
        assert sum(rounds[:groups]) == sizes.round_bytes
        assert sum(rounds[groups : 2 * groups]) == sizes.round_bytes + sizes.second_moment_bytes
    else:
        assert abs(worker.mode.averager.counters.bytes_sent / 6 - sizes.round_bytes) < 200


def test_what_is_told_of_asynchronous_workers_has_the_anchor_of_worker_0(
    text: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    config, corpus = replace(text[0], workers=3, sync=SyncConfig(3, codec="int8", asynchronous=True)), text[1]
    sizes = told(config, corpus, tmp_path)
    worker = train(tmp_path / "run", config, corpus)[0]
    written = sum(
        4 * torch.Size(one.shape).numel()
        for number in range(3)
        for name, one in saved_tensors(worker_folder(tmp_path / "run", 6, number)).items()
        if not name.startswith(("rng.", "also.", "inner.step."))
    )
    assert written == sizes.disk.checkpoint_bytes
    loop = worker.mode.averager
    assert isinstance(loop, OuterLoop) and isinstance(loop.engine, AsynchronousEngine)
    [fragment], server = loop.state.fragments, loop.engine.server
    assert server is not None
    held = [*fragment.state.values(), server._anchor, *server._state.values(), server._vector.data]
    assert sum(tensor.nbytes for tensor in held) <= sizes.memory[ANCHOR_OF_WORKER_0]
    sent = [event["bytes_sent"] for event in events_of(tmp_path / "run", "round") if event["worker"] == 1]
    assert sent[0] == sizes.round_bytes


def _check_tensors(memory: dict[str, int], worker: Training) -> None:
    """What a live worker holds, byte by byte."""
    assert memory["parameters"] == sum(p.nbytes for p in worker.model.parameters())
    states = [v for state in worker.inner.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()]
    assert memory["inner optimizer"] == sum(state.nbytes for state in states)
    outer = worker.mode.averager
    if not isinstance(outer, OuterLoop):
        return
    fragments = outer.state.fragments
    assert memory["anchor"] == sum(fragment.anchor.nbytes for fragment in fragments)
    momentum = sum(buffer.nbytes for fragment in fragments for buffer in fragment.state.values())
    assert memory.get("outer optimizer", 0) == momentum
    sending = outer.replica.lanes[0].sending
    vectors = {id(vector): vector for one in sending for vector in (one.vector, one.vector.mean)}
    encoded = sum(vector.num_bytes for vector in vectors.values())
    assert memory.get("encoded outer gradient", encoded) == encoded
    assert ("encoded outer gradient" in memory) == ("gradients" not in memory or not outer.sync.merges_at_once)
    assert all(p.grad is None for p in worker.model.parameters()), "gradients would be there beside what travels"
    spare = outer.replica._spare if isinstance(outer.replica, BackgroundReplica) else []
    assert memory.get("parameters and anchor of the round in flight", 0) >= sum(block.nbytes for block in spare)
    assert bool(spare) == ("parameters and anchor of the round in flight" in memory)
    feedback = method_of(outer, Feedback)
    errors = (
        sum(error.error.nbytes for index in range(len(sending)) for error in feedback.errors_of(index))
        if feedback
        else 0
    )
    assert memory.get("error feedback", 0) == errors


def test_ranks_share_the_model_out(text: tuple[RunConfig, Corpus]) -> None:
    config, corpus = text
    outline = model_outline(config.model, vocab_size=corpus.vocab_size, sequence_length=8)
    whole, _ = process_memory(config, outline, Placement(2, 1), 0, corpus.vocab_size)
    fsdp, _ = process_memory(replace(config, ranks="2"), outline, Placement(2, 2), 0, corpus.vocab_size)
    sharding = replace(config.compute, sharding="ddp")
    ddp, _ = process_memory(
        replace(config, ranks="2", compute=sharding), outline, Placement(2, 2), 0, corpus.vocab_size
    )
    assert 0.5 * whole["parameters"] <= fsdp["parameters"] < 0.55 * whole["parameters"]
    assert 0.5 * whole["anchor"] <= fsdp["anchor"] == ddp["anchor"] < 0.55 * whole["anchor"]
    assert ddp["parameters"] == whole["parameters"] and ddp["inner optimizer"] == whole["inner optimizer"]


def test_a_gpu_holds_the_model_and_with_offload_the_main_memory_holds_anchors(text: tuple[RunConfig, Corpus]) -> None:
    config, corpus = text
    outline = model_outline(config.model, vocab_size=corpus.vocab_size, sequence_length=8)
    place = Placement(2, cuda=True, precision="bf16")
    host, gpu = process_memory(config, outline, place, 7, corpus.vocab_size)
    assert "anchor" in gpu and "anchor" not in host and host["Python and its libraries"] == 7
    config = replace(config, device="cuda", sync=replace(config.sync, offload=True))
    host, gpu = process_memory(config, outline, place, 7, corpus.vocab_size)
    assert "anchor" in host and "anchor" not in gpu and "parameters" in gpu


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "kv_heads", "vocab_size"),
    [(64, 4, 4, 2, 512), (32, 8, 2, 1, 64), (48, 2, 6, 6, 2048)],
)
@pytest.mark.parametrize("short", [False, True])
def test_the_estimated_activations_are_those_of_a_traced_pass(
    hidden: int, layers: int, heads: int, kv_heads: int, vocab_size: int, short: bool
) -> None:
    shape = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=16,
        max_sequence_length=64,
        tie_embeddings=True,
    )
    traced = traced_peak(lambda: NativeModel(shape), 32, 64, precision=torch.bfloat16 if short else None)
    assert native_activations(shape, 32, 64, short=short) == pytest.approx(traced, rel=0.1)


def test_a_model_of_transformers_is_traced(text: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    config = replace(text[0], model=replace(text[0].model, name=f"hf:{make_folder(tmp_path / 'm', 'gpt2')}"))
    sizes = told(config, text[1], tmp_path)
    more = told(replace(config, training=replace(config.training, batch_size=64)), text[1], tmp_path)
    name = "activations, estimated"
    assert more.memory[name] > 8 * sizes.memory[name] > 0
    assert sizes.parameters == config.model.num_parameters(vocab_size=1, sequence_length=1)


def test_a_swarms_network_process_keeps_the_last_means_up_to_a_gibibyte(text: tuple[RunConfig, Corpus]) -> None:
    config = replace(text[0], engine="swarm")
    for rows, kept in ((1000, 8), (120_000, 3), (900_000, 1)):
        shapes = {"w": (rows, 1024)}
        mean = encoded_vectors(config, shapes)[0].num_bytes
        found = network_memory(config, shapes, 5)
        assert found["Python and its libraries"] == 5
        assert kept * mean <= found["means of the last rounds"] < (kept + 1.5) * mean
    assert network_memory(text[0], {"w": (9, 9)}, 5) == {}


def test_the_outer_states_are_those_of_the_outer_optimizers() -> None:
    assert {name: len(kind.state_names) for name, kind in OUTER_OPTIMIZERS.items()} == OUTER_STATES


# Checkpoints


@pytest.mark.parametrize(
    ("steps", "H", "more", "count", "at_once"),
    [
        (10, 5, {}, 1, 1),  # a short run saves at its end alone
        (500, 50, {}, 10, 3),
        (800, 30, {}, 9, 3),
        (120, 30, {"interval": 10}, 12, 3),
        (120, 30, {"interval": 100, "keep": 5}, 2, 2),
        (120, 30, {"interval": 0}, 0, 0),
    ],
)
def test_the_checkpoints_of_a_run_are_counted(
    steps: int, H: int, more: dict[str, int], count: int, at_once: int
) -> None:
    config = RunConfig(steps=steps, sync=SyncConfig(H), checkpoint=CheckpointConfig(**more))
    use = disk_use(config, 1000)
    assert (use.checkpoints, use.at_once) == (count, at_once)
    due = {step for step in range(1, steps + 1) if config.checkpoint_due(step)} | ({steps} if count else set())
    assert len(due) == count
    assert use.checkpoint_bytes == (4 * 1000 * 5 * 2 if count else 0)


def test_a_run_that_does_not_fit_on_the_disk_is_refused_with_the_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(steps=800, sync=SyncConfig(30))
    needed = disk_use(config, 10**6).peak_bytes
    monkeypatch.setattr(room, "free_disk", lambda _: needed)
    check_disk(config, 10**6, tmp_path)
    monkeypatch.setattr(room, "free_disk", lambda _: needed - 1)
    with pytest.raises(ConfigError, match=r"124 MB needed.*--out.*--checkpoint.keep 1.*--checkpoint.interval 0.*fewer"):
        check_disk(config, 10**6, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "one").write_bytes(b"x")  # what a resumed run has there makes room for the next
    check_disk(config, 10**6, tmp_path)


def test_too_little_memory_is_told_with_what_helps(text: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    config = replace(text[0], checkpoint=CheckpointConfig(), training=TrainingConfig(batch_size=4))
    sizes = replace(told(config, text[1], tmp_path), memory_available=1 << 40)
    assert memory_warning(config, sizes) is None
    said = memory_warning(config, replace(sizes, memory_available=1000))
    assert said is not None
    for part in (
        "1 kB",
        "2 processes",
        "fewer --workers",
        "--training.accumulation 4",
        "--checkpoint.asynchronous false",
    ):
        assert part in said


def test_where_no_option_would_need_less_a_smaller_model_is_told(
    text: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    config = replace(
        text[0],
        workers=1,
        checkpoint=CheckpointConfig(asynchronous=False),
        training=TrainingConfig(batch_size=1),
        compute=ComputeConfig(checkpoint_activations=True),
    )
    sizes = replace(told(config, text[1], tmp_path), memory_available=1000, processes=1)
    assert str(memory_warning(config, sizes)).endswith(": try a smaller model")


def test_the_accumulation_that_is_told_makes_the_run_fit(text: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    config = replace(text[0], training=TrainingConfig(batch_size=64))
    sizes = told(config, text[1], tmp_path)
    there = config.workers * (sizes.process_bytes - sizes.memory[ACTIVATIONS] // 2 - 1)
    said = memory_warning(config, replace(sizes, memory_available=there))
    assert said is not None and "--training.accumulation 4" in said  # 2 is just not enough
    smaller = told(replace(config, training=TrainingConfig(batch_size=64, accumulation=4)), text[1], tmp_path)
    assert (
        memory_warning(
            config,
            replace(smaller, memory=sizes.memory | {ACTIVATIONS: smaller.memory[ACTIVATIONS]}, memory_available=there),
        )
        is None
    )


# Rates


@pytest.mark.parametrize(("text_", "bits"), [("100mbit", 1e8), ("1 Gbit/s", 1e9), ("800kbit", 8e5), ("2.5mbit", 2.5e6)])
def test_a_rate_is_read(text_: str, bits: float) -> None:
    assert bits_per_second(text_) == bits


@pytest.mark.parametrize("text_", ["", "100", "fast", "0mbit", "-1mbit", "10 MB"])
def test_what_is_no_rate_is_refused(text_: str) -> None:
    with pytest.raises(ConfigError, match="100mbit"):
        bits_per_second(text_)


def test_the_steps_before_a_worker_joined_a_swarm_took_it_no_time() -> None:
    history = RunHistory(elastic=True)
    history.update(WorkerStartedEvent(worker=0, tokens_per_step=8))
    history.update(JoinedEvent(worker=0, step=400))
    history.update(StepEvent(worker=0, step=410, elapsed_seconds=5.0))
    assert measured_step_seconds(history) == 0.5


def test_speed_and_rate_come_from_the_events_of_the_run(text: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    history = RunHistory()
    history.update(RoundEndedEvent(sequence=0, mean_norm=1.0, bytes_sent=10**6, seconds=2.0))
    history.update(RoundEndedEvent(sequence=1))
    history.update(StepEvent(step=10, elapsed_seconds=5.0))
    assert measured_bits_per_second(history) == 4e6 and measured_step_seconds(history) == 0.5
    assert measured_bits_per_second(RunHistory()) is None and measured_step_seconds(RunHistory()) is None
    config, corpus = text
    sizes = estimate.estimate(config, corpus.vocab_size, Placement(2), processes=2, folder=tmp_path, history=history)
    assert sizes.round_seconds == {"4": pytest.approx(8 * sizes.round_bytes / 4e6)}
    assert sizes.bytes_per_day == pytest.approx(sizes.round_bytes * 86_400 / (3 * 0.5))


def test_sizes_are_readable() -> None:
    assert [size_text(n) for n in (7, 1500, 2.03e6, 99.7e6, 4.304e9, 1.2e12)] == [
        "7 bytes", "1.5 kB", "2.03 MB", "100 MB", "4.3 GB", "1.2 TB"
    ]  # fmt: skip


def test_rounds_that_grow_and_second_moments_are_in_the_bytes_of_a_day(
    text: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    rates = InnerConfig(lr=0.01, warmup_steps=0, final_lr_ratio=0.1)
    config = replace(text[0], steps=100, inner=rates, sync=SyncConfig(5, growth=0.03, second_moment_every=2))
    sizes = told(config, text[1], tmp_path)
    posts = [step for step in range(1, 101) if turns(config).posts_at(step)]
    assert posts[0] == sizes.round_steps == 9 and len(posts) < 9, "(0.03 / 0.01)² steps at first"
    assert sizes.mean_round_steps == 100 / num_rounds(config) and num_rounds(config) - len(posts) in (0, 1)
    a_day = replace(sizes, step_seconds=1.0).bytes_per_day
    assert a_day is not None
    each = (sizes.round_bytes + sizes.second_moment_bytes / 2) / sizes.mean_round_steps
    assert a_day == pytest.approx(86_400 * each)
