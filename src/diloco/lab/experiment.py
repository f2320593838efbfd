"""An experiment: arms at each scale, claims with their published values, figures.

To add one: a file in `experiments/` that makes an `Experiment`, and a line in `experiments/__init__.py`. Outside the
package, `diloco lab new NAME` writes such a file, and `diloco lab run NAME.py` runs it.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, final

from diloco.errors import ConfigError
from diloco.lab.arm import Arm
from diloco.lab.claims import PublishedClaim
from diloco.lab.code import code_of_file
from diloco.lab.fits import Results
from diloco.lab.report.pages import Block
from diloco.lab.scales import Scale
from diloco.lab.tuning import Search

Arms = dict[str, Arm]
"""Arms by name, the most important first."""


@final
@dataclass(frozen=True)
class Curves:
    """A figure: the perplexity of some arms over the inner steps."""

    title: str
    arms: tuple[str, ...] = ()
    """Empty: all."""


@final
@dataclass(frozen=True)
class Sweep:
    """A figure: the final perplexity of arms over the value that differs between them, a line for each group.

    It shows the change against the experiment's first arm, in per cent, seed by seed; the band is the 95 % interval of
    its mean.
    """

    title: str
    x_label: str
    lines: Mapping[str, Mapping[str, float]]
    """Line to arm to its place on the x axis."""
    x_log: bool = False
    relative: bool = True
    """False: the perplexity itself, and the band from the lowest to the highest seed."""


@final
@dataclass(frozen=True)
class Similarity:
    """A figure: the mean cosine similarity between the workers' outer gradients, round by round."""

    title: str
    arms: tuple[str, ...] = ()


Figure = Curves | Sweep | Similarity


@final
@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper, or an idea of the user's."""

    name: str
    title: str
    source: str
    """The paper and its table or figure."""
    arms: Callable[[Scale], Arms]
    claims: Callable[[Scale], tuple[PublishedClaim, ...]]
    published: Mapping[str, float] = field(default_factory=dict)
    """The perplexity that the paper gives for an arm, by the arm's name."""
    figures: Callable[[Scale], tuple[Figure, ...]] = lambda scale: ()  # noqa: ARG005
    analysis: Callable[[Scale, Results], Sequence[Block]] | None = None
    """What is computed from all arms together, such as a fitted law, for the report."""
    tuning: Callable[[Scale], list[Search]] | None = None
    """The searches for the numbers of its methods; what they find belongs into the scale (scales.py)."""
    text: Literal["text", "domains"] = "text"
    """domains: the text whose shards differ, for arms whose workers read different things."""
    note: str = ""
    """How it differs from the paper's, where the scale alone does not say it."""
    file: Path | None = None
    """The file of a user's experiment; None for those of the package."""
    code: str = ""
    """Hash of what that file adds to the package (code.py); empty if it adds nothing."""


def load(path: Path) -> Experiment:
    """Import a user's experiment, with the optimizers, codecs and merges that its file adds."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}: write one with diloco lab new {path.stem}")
    name = f"diloco_lab_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"{path} makes no EXPERIMENT (an Experiment of diloco.lab.experiment): see diloco lab new")
    functions = (experiment.arms, experiment.claims, experiment.figures, experiment.analysis, experiment.tuning)
    describing_functions = {function.__name__ for function in functions if function is not None}
    return replace(experiment, file=path.resolve(), code=code_of_file(path, describing_functions))
