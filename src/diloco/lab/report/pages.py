"""A page as a list of blocks, written as HTML or Markdown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import final

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
.grid { overflow-x: auto; } table { border-collapse: collapse; font-size: 13.5px; margin: .8rem 0; }
th { text-align: left; border-bottom: 1.5px solid #222; padding: .25rem .7rem .25rem 0; vertical-align: bottom; }
td { border-bottom: 1px solid #e4e4e4; padding: .25rem .7rem .25rem 0; vertical-align: top; }
td.holds { color: #00654a; font-weight: 600; } td.fails { color: #a33a00; font-weight: 600; } td.open { color: #666; }
svg { width: 100%; height: auto; } figure { margin: 1rem 0; }
"""


@final
@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@final
@dataclass(frozen=True)
class Paragraph:
    text: str


@final
@dataclass(frozen=True)
class Grid:
    """A table; **bold** is understood in its cells."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@final
@dataclass(frozen=True)
class Drawing:
    """A figure: inside the HTML page, as a file beside the Markdown."""

    title: str
    path: str
    svg: str


Block = Heading | Paragraph | Grid | Drawing


def as_markdown(title: str, blocks: Sequence[Block]) -> str:
    parts = [f"# {title}"]
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {block.text}")
        elif isinstance(block, Paragraph):
            parts.append(block.text.strip())
        elif isinstance(block, Grid):
            rule = "| " + " | ".join("---" for _ in block.heads) + " |"
            parts.append("\n".join([_row(block.heads), rule, *map(_row, block.rows)]))
        else:
            parts.append(f"![{block.title}]({block.path})")
    return "\n\n".join(parts) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_html(title: str, blocks: Sequence[Block]) -> str:
    body = [f"<h1>{escape(title)}</h1>"]
    for block in blocks:
        if isinstance(block, Heading):
            body.append(f"<h{block.level}>{escape(block.text)}</h{block.level}>")
        elif isinstance(block, Paragraph):
            body.append(f"<p>{escape(block.text.strip())}</p>")
        elif isinstance(block, Grid):
            heads = "".join(f"<th>{escape(head)}</th>" for head in block.heads)
            rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in block.rows)
            body.append(
                f'<div class="grid"><table><thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
            )
        else:
            drawing = block.svg[block.svg.index("<svg") :]
            label = f'role="img" aria-label="{escape(block.title)}"'
            body.append(f'<figure {label} style="max-width: {_pixels(drawing)}px">{drawing}</figure>')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _pixels(svg: str) -> int:
    """Larger than in a paper: two panels side by side fill most of the page."""
    width = re.search(r'width="([0-9.]+)pt"', svg)
    assert width is not None
    return round(float(width[1]) * 96 / 72 * 1.6)


def _cell(text: str) -> str:
    kinds = {"holds": "holds", "does not hold": "fails", "not resolved": "open"}
    kind = next((kinds[verdict] for verdict in kinds if text.startswith(verdict)), "")
    inside = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(text))
    return f'<td class="{kind}">{inside}</td>' if kind else f"<td>{inside}</td>"
