"""Workers of several ranks, as far as one process can tell: options, places, and the model that is saved."""

from pathlib import Path

import pytest
import torch

from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import ConfigError
from diloco.models.native.model import NativeModel
from diloco.models.native.presets import preset
from diloco.training.config.run import ComputeConfig, RunConfig, TrainingConfig
from diloco.training.processes.local_process import LocalRank
from diloco.training.processes.worker import check_devices
from diloco.training.sharding import _filled, _without_parameters


def test_one_number_of_ranks_is_for_all_workers_and_several_are_for_one_each() -> None:
    assert RunConfig(workers=3, ranks="2").ranks_of_workers() == (2, 2, 2)
    assert RunConfig(workers=2, ranks="1,2").ranks_of_workers() == (1, 2)
    assert RunConfig(ranks="2").ranks_of_workers(processes=8) == (2, 2, 2, 2)
    assert RunConfig(ranks="1,2,1").ranks_of_workers(processes=4) == (1, 2, 1)
    assert RunConfig().ranks_of_workers(processes=3) == (1, 1, 1)


@pytest.mark.parametrize("ranks", ["0", "", "two", "1,", "2.5", "-1", "1,0"])
def test_ranks_that_are_no_numbers_are_refused(ranks: str) -> None:
    with pytest.raises(ConfigError, match="must be a number of at least 1, or one for each worker"):
        RunConfig(ranks=ranks)


def test_ranks_that_do_not_fit_workers_or_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks = 1,2,1 is for 3 workers, but workers = 2"):
        RunConfig(ranks="1,2,1").ranks_of_workers()
    with pytest.raises(ConfigError, match="ranks = 1,2 needs 3 processes, but there are 4"):
        RunConfig(ranks="1,2").ranks_of_workers(processes=4)
    with pytest.raises(ConfigError, match="3 processes cannot be workers of ranks = 2"):
        RunConfig(ranks="2").ranks_of_workers(processes=3)


def test_a_batch_that_ranks_cannot_share_evenly_is_refused_with_the_next_number_that_works() -> None:
    with pytest.raises(
        ConfigError, match="batch_size = 8 cannot be shared out evenly among 3 ranks: make it a multiple"
    ):
        RunConfig(ranks="1,3", training=TrainingConfig(batch_size=8))
    with pytest.raises(ConfigError, match="among 4 ranks in 4 micro-batches each: make it a multiple of 16"):
        RunConfig(ranks="4", training=TrainingConfig(batch_size=8, accumulation=4))


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="sharding = ddp has no effect on workers of one rank"):
        RunConfig(compute=ComputeConfig(sharding="ddp"))
    with pytest.raises(ConfigError, match="in mode data-parallel every rank averages with every other"):
        RunConfig(ranks="2", mode="data-parallel")


def test_consecutive_processes_are_the_ranks_of_a_worker_and_have_logs_of_their_own() -> None:
    places = [LocalRank(process, (1, 3, 2), Path("run"), Path("corpus"), 0) for process in range(6)]
    assert [(place.worker, place.rank) for place in places] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert [str(place) for place in places[:2]] == ["worker 0", "worker 1, rank 0,"]
    assert [place.log.name for place in places[:3]] == ["worker-0.log", "worker-1-rank-0.log", "worker-1-rank-1.log"]


class Told(WorkerRanks):
    """Two ranks of which the other one says what it is told to."""

    def __init__(self, other: tuple[float, ...]) -> None:
        super().__init__(ranks=(0, 1))
        self.other = other

    def gather_numbers(self, *values: float) -> list[tuple[float, ...]]:
        return [values, (values[0], *self.other)]


def test_ranks_of_a_worker_that_share_a_cuda_device_are_refused() -> None:
    check_devices(torch.device("cuda", 0), Told((1,)))
    check_devices(torch.device("cpu"), Told((-1,)))
    check_devices(torch.device("cuda", 0), WorkerRanks())
    with pytest.raises(ConfigError, match="2 ranks of a worker share 1 CUDA devices: each needs its own"):
        check_devices(torch.device("cuda", 0), Told((0,)))


def test_a_copy_without_parameters_takes_no_memory_and_filled_again_is_the_same_model() -> None:
    model = NativeModel(preset("tiny", vocab_size=300, max_sequence_length=16))
    shell = _without_parameters(model)
    assert {parameter.device.type for parameter in shell.parameters()} == {"meta"}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    whole = _filled(shell, dict(model.named_parameters()), dict(model.named_buffers()))
    tokens = torch.arange(32).view(2, 16)
    assert torch.equal(whole(tokens), model.eval()(tokens))
