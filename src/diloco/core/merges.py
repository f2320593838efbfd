"""The ways to merge contributions other than their weighted mean, by name (`sync.merge`).

Each takes the parts of all contributions at once and writes what counts as their mean. To add one: a function here or
in a file of its own, a line in MERGES, its name and the fewest contributions that it takes in core/config.py
(FEWEST_TO_MERGE), a row in docs/configuration.md. An experiment of the laboratory adds both lines in its own file.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from diloco.core.clipping import clipped_mean

MergeParts = Callable[[Sequence[Tensor], Sequence[float], Tensor, Sequence[float]], Tensor]
"""(values, weights, out, scales) -> replaced.

`values` has a tensor [rows, elements] for each contribution, which may be overwritten; `out`, which gets the merged
parts, may be one of them. `scales` is empty, or has a factor for each contribution. `replaced` has, for each
contribution, in how many of the rows it counted as the mean of the others: zeros where no contribution ever does. All
that reduce a part must get the same bits: no randomness, and sums in a fixed order.
"""

MERGES: dict[str, MergeParts] = {"clipped": clipped_mean}
