"""run.json: the description of a swarm's run that joiners receive, and the checks that they make.

    {"version": "0.1.0", "model": "tiny", "corpus": "<sha256>", "config": {"steps": 800, "sync.codec": "fp16", …},
     "sample_prompt": "def ", "signature": "<hex>"}

It has the keys that must be the same on all machines (`RunConfig.shared`), each a number, a truth value or a short
word. It can name no file, no dataset, no address and nothing to execute: such keys are each machine's own, and a
description that has one is refused. The prompt of samples is the one text: a joiner that names none takes it, so that
the samples of all machines begin alike. A model is named only if it is a preset: a machine that joins a run of another
model names it itself (--model), and so decides what is loaded. The run's key signs all that cannot change on resume, on
the machine where the run began: no other member can say something else of the run. Torch-free.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.models.native.presets import PRESETS
from diloco.training.config.run import RunConfig, may_change
from diloco.version import __version__

RUN_JSON = "run.json"
MAX_BYTES = 1 << 16
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"([0-9a-f]{128})?")
_LONGEST_WORD = 64
_LONGEST_PROMPT = 1000


@dataclass(frozen=True)
class RunDescription:
    """The options that are the same on all machines, the model and the text."""

    model: str | None
    """A preset; None: a model that each machine names itself."""
    corpus: str
    """The digest of the text."""
    values: Mapping[str, Any]
    """The options by dotted key."""
    sample_prompt: str = ""
    """The founder's `training.sample_prompt`; empty if that is longer than 1,000 characters."""
    signature: str = ""
    """The signature of the run's key over `lasting_bytes`, in hex."""

    @classmethod
    def of(cls, config: RunConfig, corpus_digest: str) -> "RunDescription":
        prompt = config.training.sample_prompt
        return cls(
            config.model.name if config.model.name in PRESETS else None,
            corpus_digest,
            config.shared(),
            prompt if len(prompt) <= _LONGEST_PROMPT else "",
        )

    def text(self) -> str:
        values = {"version": __version__, "model": self.model, "corpus": self.corpus, "config": dict(self.values)}
        return json.dumps(values | {"sample_prompt": self.sample_prompt, "signature": self.signature}, indent=1) + "\n"

    def lasting_bytes(self) -> bytes:
        """Return all that cannot change when a run is resumed: what the run's key signs."""
        lasting = {key: value for key, value in self.values.items() if not may_change(key)}
        return json.dumps({"model": self.model, "corpus": self.corpus, "config": lasting}, sort_keys=True).encode()

    @classmethod
    def read(cls, path: Path) -> "RunDescription":
        """Read a description; raise ConfigError if it is not that of a run of this version."""
        try:
            raw = json.loads(path.read_bytes()[: MAX_BYTES + 1])
            version, model, corpus, values = (raw[name] for name in ("version", "model", "corpus", "config"))
            prompt = raw.get("sample_prompt", "")
            signature = raw.get("signature", "")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"the swarm's description of its run cannot be read ({error!r})") from error
        if version != __version__:
            raise ConfigError(
                f"the swarm runs diloco {str(version)[:20]!r}, this machine {__version__!r}: install the same version"
            )
        if not (model is None or model in PRESETS) or not isinstance(corpus, str) or not _DIGEST.fullmatch(corpus):
            raise ConfigError("the swarm's description names a model or a text that no member of this version names")
        if not isinstance(signature, str) or not _SIGNATURE.fullmatch(signature):
            raise ConfigError("the swarm's description of its run has a signature that is none")
        if not isinstance(prompt, str) or len(prompt) > _LONGEST_PROMPT:
            raise ConfigError(f"the swarm's prompt of samples is not a text of at most {_LONGEST_PROMPT} characters")
        _check(values)
        return cls(model, corpus, values, prompt, signature)

    def tokens(self) -> list[str]:
        """Return the values as options of `diloco train`."""
        given = {key: value for key, value in self.values.items() if value is not None or _default(key) is not None}
        return [f"--{key}={_word(value)}" for key, value in given.items()]


def _check(values: Any) -> None:
    expected = RunConfig().shared()
    if not isinstance(values, dict) or values.keys() != expected.keys():
        keys = values.keys() if isinstance(values, dict) else set()
        other = ", ".join(sorted(map(str, keys ^ expected.keys()))[:3])[:100]
        raise ConfigError(
            f"the swarm's configuration is not one of diloco {__version__}: what must be the same on all machines "
            f"differs in {other or 'its form'}"
        )
    for key, value in values.items():
        word = isinstance(value, str) and len(value) <= _LONGEST_WORD and value.isascii() and value.isprintable()
        if not (value is None or isinstance(value, bool | int | float) or word):
            raise ConfigError(f"the swarm's configuration has a {type(value).__name__} for {key}: it is not to be used")


def _default(key: str) -> object:
    return RunConfig().values()[key]


def _word(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
