"""How one worker of a run in a bucket behaves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BucketSettings:
    """Times are in seconds."""

    url: str
    """s3://BUCKET/RUN, gs://BUCKET/RUN, az://CONTAINER/RUN or file:///FOLDER/RUN."""
    folder: Path
    """On this machine: the worker's name is kept there, so that it comes back under its number."""
    name: str = "worker-0"
    """Tells this machine's workers apart."""
    label: str = ""
    """The machine's name in `diloco status`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to obstore: region, endpoint, credentials. Empty: the usual variables of the environment."""
    patience: float = 0.5
    """Once half of the workers have posted, a round waits for the others: this share of the usual time of a round."""
    timeout_seconds: float = 600.0
    """The longest time that a round waits for other workers, and a request for the store."""
    beat_seconds: float = 10.0
    """A worker tells the others so often how far it is."""
    lost_seconds: float = 40.0
    """A worker that has not told anything for so long is lost."""
    least_poll_seconds: float = 0.5
    most_poll_seconds: float = 10.0
    late_seconds: float = 15.0
    """A range of a mean that is not there this long after the others could have it is computed by another worker."""
    state_rounds: int = 10
    """A state for joiners is written every so many rounds."""
    kept_rounds: int = 2
    """Contributions of so many rounds stay in the bucket; means stay until two later states are there."""
