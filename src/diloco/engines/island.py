"""A worker as an island: what runs the loop sees one process with one device, and the engine keeps the world.

Frameworks (Hugging Face Trainer, Accelerate, Lightning, torchmetrics) look for torchrun's variables and for an
initialised torch.distributed. Where they find either, they wrap the model in DDP, share out the data, reduce metrics
and save on rank 0 only: gradients would be averaged at every step, and a worker that evaluates alone would wait for
ever. So both are taken out of their sight before they look. It refuses to do so once it is too late.
"""

import os
from collections.abc import MutableMapping

import torch

from diloco.errors import ConfigError

_OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_OF_ITS_AGENT = "TORCHELASTIC_"
_KEPT = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for the traceback of a process that failed
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def hide_place(environment: MutableMapping[str, str] = os.environ) -> None:
    """Take what torchrun set out of the environment."""
    for name in list(environment):
        if name in _OF_TORCHRUN or (name.startswith(_OF_ITS_AGENT) and name != _KEPT):
            del environment[name]


def keep_one_device(environment: MutableMapping[str, str] = os.environ) -> None:
    """Leave this process the CUDA device of its local rank, as its only one; Trainer would use them all.

    More workers than devices share them in turn. Without CUDA nothing changes.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "island = True chooses this worker's CUDA device, but CUDA is in use already: call "
            "diloco.connect(island=True) before anything is put on a GPU"
        )
    count = torch.cuda.device_count()  # asks NVML, which leaves the choice open
    if not count:
        return
    named = environment.get(_VISIBLE)
    devices = [str(number) for number in range(count)] if named is None else named.split(",")[:count]
    environment[_VISIBLE] = devices[int(environment.get("LOCAL_RANK", 0)) % count].strip()
