"""`--estimate` of `diloco train` and `diloco join`: the sizes of a run, without starting it."""

import json
import os
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from diloco.cli.display.sizes import estimate_table, size_lines
from diloco.errors import ConfigError
from diloco.history.run_history import RunHistory, read_history
from diloco.training.compute import precision_name
from diloco.training.config.run import RunConfig
from diloco.training.processes.start import check_device
from diloco.training.sizes.estimate import bits_per_second, device_budget, estimate, vocabulary_of, warnings
from diloco.training.sizes.memory import Placement
from diloco.training.sizes.room import check_disk


def print_estimate(
    console: Console,
    config: RunConfig,
    *,
    resume: Path | None = None,
    bandwidth: str | None = None,
    as_json: bool = False,
    vocab_size: int | None = None,
    members: int = 0,
) -> None:
    """Print the sizes of a run. `resume`: the folder of a run that has measured its speed. `members`: of the swarm that
    is to be joined."""
    bits = None if bandwidth is None else bits_per_second(bandwidth)
    check_device(config)
    cuda = config.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    ranks_of_workers = config.ranks_of_workers()
    workers = max(2, members + config.workers) if config.elastic else config.workers
    place = Placement(workers, min(ranks_of_workers), cuda, precision_name(config.compute.precision, device))
    folder = resume or Path(config.out or "runs")
    history = RunHistory() if resume is None else read_history(resume)
    sizes = estimate(
        config,
        vocab_size or history.resolved.get("data.vocab_size") or vocabulary_of(config),
        place,
        processes=sum(ranks_of_workers),
        folder=folder,
        history=history,
        bandwidth_bits=bits,
        device_budget=device_budget(device, sum(ranks_of_workers)),
        threads=config.threads or max(1, (os.cpu_count() or 1) // sum(ranks_of_workers)),
    )
    notes = warnings(config, sizes, device)
    try:
        check_disk(config, sizes.parameters, folder, trainable=sizes.trainable_parameters)
    except ConfigError as error:
        notes.append(f"this run would be refused: {error}")
    values = sizes.as_json() | {"warnings": notes}
    if as_json:
        print(json.dumps(values, indent=2))
        return
    for line in size_lines(values):
        console.print(Text(line), soft_wrap=True, highlight=False)
    console.print()
    console.print(estimate_table(values), highlight=False)
    for text in notes:
        console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True, highlight=False)
