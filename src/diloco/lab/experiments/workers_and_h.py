"""OpenDiLoCo's open questions: more than eight workers, and the best H for a number of workers."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Experiment, Figure, Sweep
from diloco.lab.fits import Results, doubling_line
from diloco.lab.report.pages import Block
from diloco.lab.scales import Scale


def _counts(scale: Scale) -> tuple[int, ...]:
    return tuple(k for k in scale.replicas if 1 < k <= 16)


def _lengths(scale: Scale) -> tuple[int, ...]:
    return max(1, scale.H // 2), scale.H, round(2.5 * scale.H)


def _name(k: int, H: int) -> str:
    return f"k = {k}, H = {H}"


def arms(scale: Scale) -> Arms:
    return {
        _name(k, H): scale.diloco(workers=k, sync={"num_inner_steps": H}, steps=max(1, round(scale.steps / H)) * H)
        for k in _counts(scale)
        for H in _lengths(scale)
    }


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    short, _, long = _lengths(scale)
    fewest = min(_counts(scale))
    most = max(_counts(scale))
    return (
        PublishedClaim(
            f"A longer H costs more with more workers (H = {long} against {short}, k = {most} against {fewest})",
            "open",
            lambda m: (
                m.change(_name(most, long), _name(most, short)) - m.change(_name(fewest, long), _name(fewest, short))
            ),
            at_least=0.0,
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    lines = {f"k = {k}": {_name(k, H): float(H) for H in _lengths(scale)} for k in _counts(scale)}
    return (Sweep("Perplexity by H and workers", "H, inner steps between rounds", lines, x_log=True),)


def analysis(scale: Scale, results: Results) -> list[Block]:
    places = {_name(k, H): (float(k), float(H)) for k in _counts(scale) for H in _lengths(scale)}
    return doubling_line(("the workers", "H"), places, results)


EXPERIMENT = Experiment(
    name="workers_and_h",
    title="Workers and H together",
    source="OpenDiLoCo, open questions",
    arms=arms,
    claims=claims,
    figures=figures,
    analysis=analysis,
)
