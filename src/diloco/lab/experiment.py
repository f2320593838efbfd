"""An experiment: arms at each scale, claims with their published values, figures.

To add one: a file in `experiments/` that makes an `Experiment`, and a line in `experiments/__init__.py`. Outside the
package, `diloco lab new NAME` writes such a file, and `diloco lab run NAME.py` runs it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, final

from diloco.lab.arm import Arm
from diloco.lab.claims import Claim
from diloco.lab.scales import Scale

Arms = dict[str, Arm]
"""By name, the most important first."""


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
    """A figure: the final perplexity of arms over the value that differs between them, a line for each group."""

    title: str
    x_label: str
    lines: Mapping[str, Mapping[str, float]]
    """Line to arm to its place on the x axis."""
    x_log: bool = False


@final
@dataclass(frozen=True)
class Similarity:
    """A figure: the mean cosine similarity between the workers' outer gradients, round by round."""

    title: str
    arms: tuple[str, ...] = ()


Figure = Curves | Sweep | Similarity


@final
@dataclass(frozen=True)
class Fit:
    """A line to be fitted through arms: the logarithm of perplexity over the logarithms of some numbers."""

    names: tuple[str, ...]
    """Of the numbers, such as H."""
    places: Mapping[str, tuple[float, ...]]
    """Arm to its numbers."""


@final
@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper, or an idea of one's own."""

    name: str
    title: str
    source: str
    """The paper and its table or figure."""
    arms: Callable[[Scale], Arms]
    claims: Callable[[Scale], tuple[Claim, ...]]
    published: Mapping[str, float] = field(default_factory=dict)
    """The perplexity that the paper gives for an arm, by the arm's name."""
    figures: Callable[[Scale], tuple[Figure, ...]] = lambda scale: ()  # noqa: ARG005
    fit: Callable[[Scale], Fit] | None = None
    tuning: Callable[[Scale], Mapping[str, Arms]] | None = None
    """Candidates by group; the best of each group belongs into the file of the experiment."""
    text: Literal["text", "domains"] = "text"
    """domains: the text whose shards differ, for arms whose workers read different things."""
    note: str = ""
    """How it differs from the paper's, where the scale alone does not say it."""
