"""Figures: the same bytes every time, nothing outside them, and names that mean nothing to matplotlib or a browser."""

import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.plots.axes import looks_of, shown_number
from diloco.plots.figures import as_html, as_svg, check_path, draw, save
from diloco.plots.panels import Panel, Series

STEPS = [1.0, 2.0, 3.0, 4.0]
LOSSES = [4.0, 3.0, None, 2.5]
SVG = "{http://www.w3.org/2000/svg}"


def loss_panel(*labels: str) -> Panel:
    return Panel("loss", "step", "loss", [Series(label, STEPS, LOSSES) for label in labels])


def every_kind() -> list[Panel]:
    names = ["fp32", "int8"]
    return [
        Panel("line", "x", "y", [Series("a", STEPS, LOSSES, LOSSES, LOSSES), Series("b", STEPS, LOSSES)], y_log=True),
        Panel("points", "x", "y", [Series("a", STEPS, LOSSES, LOSSES, LOSSES)], x_log=True, kind="scatter"),
        Panel("bars", "codec", "y", [Series("a", names, [1.0, None], [0.5, None], [2.0, None])], kind="bar"),
        Panel("spans", "s", "", [Series("a", [0.0, 1.0], [0, 1], until=[1.0, None])], kind="spans", rows=["v", "w"]),
        Panel("nothing", "x", "y", []),
        Panel("only gaps", "x", "y", [Series("a", STEPS, [None, math.nan, math.inf, None])], y_log=True),
    ]


def test_the_same_panels_give_the_same_bytes_in_every_kind_of_file(tmp_path: Path) -> None:
    figures = [draw([loss_panel("a", "b")]) for _ in range(2)]
    for suffix in ("svg", "png", "pdf", "html"):
        files = [tmp_path / f"{number}.{suffix}" for number in range(2)]
        for figure, file in zip(figures, files, strict=True):
            save(figure, file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert files[0].stat().st_size > 1000


def test_an_svg_needs_nothing_outside_itself() -> None:
    tree = ElementTree.fromstring(as_svg(draw(every_kind())))
    for element in tree.iter():
        for name, value in element.attrib.items():
            assert not name.endswith("href") or value.startswith("#")
            assert "url(" not in value or "url(#" in value
        assert element.tag not in (f"{SVG}script", f"{SVG}image", f"{SVG}text", f"{SVG}foreignObject")
    assert not list(tree.iter("{http://purl.org/dc/elements/1.1/}date"))


def test_a_name_is_drawn_as_it_is_given() -> None:
    hostile = "_$\\frac{1$ --><script>alert(1)</script>\x1b[2J\n"
    figure = draw([Panel(hostile, hostile, hostile, [Series(hostile, STEPS, LOSSES), Series("b", STEPS, LOSSES)])])
    page = as_html(figure, hostile)
    assert "<script" not in page and "\x1b" not in page
    ElementTree.fromstring(as_svg(figure))
    assert any(label.get_text().strip().startswith("_$") for label in figure.axes[0].get_legend().get_texts())


def test_a_legend_covers_no_data() -> None:
    for panels in ([loss_panel("a", "b")], [loss_panel("a", "b"), loss_panel("a", "b")]):
        figure = draw(panels)
        legends = figure.legends + [axes.get_legend() for axes in figure.axes if axes.get_legend()]
        assert legends
        for legend in legends:
            box = legend.get_window_extent()
            assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1


def test_a_label_keeps_its_colour_and_no_two_in_a_panel_look_alike() -> None:
    looks = looks_of([loss_panel(*"abc"), loss_panel("d", "a"), loss_panel(*(str(number) for number in range(30)))])
    assert looks["d"] != looks["a"]
    assert len({looks[str(number)] for number in range(30)}) == 30


def test_gaps_are_not_joined() -> None:
    line = draw([loss_panel("a")]).axes[0].lines[0]
    assert math.isnan(line.get_ydata()[2])


def test_a_long_legend_says_how_many_it_leaves_out() -> None:
    legend = draw([loss_panel(*(f"worker {number}" for number in range(64)))]).axes[0].get_legend()
    assert legend.get_texts()[-1].get_text() == "and 48 more"


def test_an_unknown_suffix_is_refused_with_those_that_exist() -> None:
    for name in ("loss.gif", "loss"):
        with pytest.raises(ConfigError, match=r"loss.*must be \.svg, \.png, \.pdf or \.html"):
            check_path(Path(name))


def test_without_matplotlib_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from diloco.plots.figures import draw\n"
        "from diloco.plots.panels import Panel\n"
        "draw([Panel('', '', '', [])])"
    )
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert end.returncode == 1 and "'.[plots]'" in end.stderr


def test_the_module_imports_without_the_packages_of_the_command_line_and_the_page() -> None:
    absent = ("pydantic", "starlette", "cyclopts", "plotly", "rich", "torch")
    code = f"import sys\nfor name in {absent}: sys.modules[name] = None\nimport diloco.plots.figures, diloco.plots.axes"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "0.25"), (1500, "1500"), (20000, "20k"), (1.5e6, "1.5M"), (3e9, "3G"), (0, "0"), (math.nan, "")],
)
def test_numbers_on_an_axis_are_short(value: float, text: str) -> None:
    assert shown_number(value) == text


def test_spans_have_a_row_of_the_figure_for_themselves() -> None:
    spans = Panel("spans", "s", "", [Series("a", [0.0], [0], until=[1.0])], kind="spans", rows=["v"])
    boxes = [axes.get_position() for axes in draw([loss_panel("a"), spans, loss_panel("a"), loss_panel("a")]).axes]
    assert boxes[1].width > 1.8 * boxes[0].width
    assert boxes[0].y0 > boxes[1].y1 > boxes[1].y0 > boxes[2].y1 and boxes[2].y0 == pytest.approx(boxes[3].y0)
