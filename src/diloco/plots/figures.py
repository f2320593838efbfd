"""Draws panels as a figure for a paper, a report or a page: `draw`, then `save` or `as_svg`.

    figure = draw([Panel("loss", "inner step", "loss", [Series("DiLoCo", steps, losses)])])
    save(figure, Path("loss.pdf"))

The only module that uses matplotlib, which is in the extra `plots` and is imported with the first figure. It keeps no
global state of matplotlib's and opens no window. Text is drawn as it is given: `$` or `<` in a run's name mean nothing.
The same panels give the same bytes.
"""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.atomic_files import write_file
from diloco.errors import ConfigError, install_hint
from diloco.plots.panels import Panel, one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf", ".html")
COLUMN_INCHES = 3.5
"""The width of a panel, which is that of a column of a paper."""
_PANEL_INCHES = 2.35
_ROW_INCHES = 0.17
_INK = "#222222"
_STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "figure.facecolor": "white",
    "figure.dpi": 100,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.4,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "path.simplify": True,
    "savefig.dpi": 200,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "diloco",
    "pdf.fonttype": 42,
    "text.color": _INK,
    "text.parse_math": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
}


def check_installed(extra: str = "plots") -> None:
    """Refuse to draw without matplotlib, before anything is read or computed. `extra`: that of the user's command."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"plots need the package matplotlib ({error}): {install_hint(extra)}") from error


def check_path(path: Path) -> None:
    """Refuse a file name whose suffix names no kind of figure."""
    if path.suffix.lower() not in SUFFIXES:
        kinds = ", ".join(SUFFIXES[:-1]) + f" or {SUFFIXES[-1]}"
        raise ConfigError(f"{path}: the suffix of a figure says its kind, and must be {kinds}, not {path.suffix!r}")


def draw(panels: Sequence[Panel], columns: int = 2, title: str = "") -> "Figure":
    """Draw the panels beside and below each other, `columns` in a row, each as wide as the column of a paper.

    A panel of spans is as wide as the figure.
    """
    if columns < 1:
        raise ValueError(f"a figure has at least one column of panels, not {columns}")
    if not panels:
        raise ValueError("a figure has at least one panel")
    check_installed()
    from matplotlib.figure import Figure

    from diloco.plots.axes import add_legends, draw_panel, looks_of

    columns = min(columns, len(panels))
    lines = _lines(panels, columns)
    heights = [max(_height(panel) for panel in line) for line in lines]
    with _style():
        figure = Figure(figsize=(columns * COLUMN_INCHES, sum(heights)))
        figure.set_layout_engine("constrained", w_pad=0.07, h_pad=0.07)
        grid = figure.add_gridspec(len(lines), columns, height_ratios=heights)
        looks = looks_of(panels)
        axes = []
        for row, line in enumerate(lines):
            for column, panel in enumerate(line):
                place = grid[row, :] if panel.kind == "spans" else grid[row, column]
                axes.append(figure.add_subplot(place))
                draw_panel(axes[-1], panel, looks)
        add_legends(figure, axes, panels, looks)
        if title:
            figure.suptitle(one_line(title), fontsize=10, x=0.01, ha="left")
        layout = figure.get_layout_engine()
        assert layout is not None
        for _ in range(2):  # the layout depends on the style; its second pass knows the sizes of the first
            layout.execute(figure)
        figure.set_layout_engine("none")
    return figure


def _lines(panels: Sequence[Panel], columns: int) -> list[list[Panel]]:
    """Return the panels of each row of the figure."""
    lines: list[list[Panel]] = []
    for panel in panels:
        full = not lines or len(lines[-1]) == columns or "spans" in (panel.kind, lines[-1][-1].kind)
        if full:
            lines.append([panel])
        else:
            lines[-1].append(panel)
    return lines


def _height(panel: Panel) -> float:
    return _PANEL_INCHES if panel.kind != "spans" else max(1.8, 1.0 + _ROW_INCHES * len(panel.rows))


def as_svg(figure: "Figure") -> str:
    """Return the figure as SVG that needs nothing else: text as outlines, no date, the same bytes every time."""
    return _rendered(figure, "svg").decode()


def as_html(figure: "Figure", title: str) -> str:
    """Return a page with the figure inside: no script, nothing to load."""
    drawing = as_svg(figure)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(one_line(title))}</title>\n"
        "<style>body { margin: 1rem; background: #fff; } svg { max-width: 100%; height: auto; }</style>\n"
        f"</head>\n<body>\n{drawing[drawing.index('<svg') :]}</body>\n</html>\n"
    )


def save(figure: "Figure", path: Path, title: str = "diloco") -> None:
    """Write the figure: SVG, PNG, PDF or HTML, as the suffix says. `title` is that of the HTML page."""
    check_path(path)
    kind = path.suffix.lower()[1:]
    data = as_html(figure, title).encode() if kind == "html" else _rendered(figure, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data)


def _rendered(figure: "Figure", kind: str) -> bytes:
    timeless: dict[str, dict[str, Any]] = {
        "svg": {"Date": None, "Creator": "diloco"},
        "pdf": {"CreationDate": None, "Creator": "diloco", "Producer": "matplotlib"},
        "png": {"Software": "diloco"},
    }
    file = io.BytesIO()
    with _style():
        figure.savefig(file, format=kind, metadata=timeless[kind])
    return file.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    """Use matplotlib with our style, and without a warning for each letter that its font lacks."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # a matplotlibrc of the user's would change every figure
        matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type]  # typed by the name of each setting
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield
