"""The page's colours can be read: text has a contrast of at least 4.5 to 1 on everything that it stands on."""

import re
from pathlib import Path

import pytest

_CSS = Path("src/diloco/dashboard/page/page.css").read_text()
_TEXT = ("ink", "soft", "faint", "accent", "good", "warning", "bad")
_PAIRS = [(text, ground) for text in _TEXT for ground in ("paper", "panel")] + [
    (kind, f"{kind}-soft") for kind in ("accent", "good", "warning", "bad")
]


def _colours(theme: str) -> dict[str, str]:
    light, dark = re.findall(r":root(?:\[[^]]*\])? \{(.*?)\n\}", _CSS, re.S)[:2]
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", light))
    return colours if theme == "light" else colours | dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", dark))


def _luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast(theme: str) -> None:
    colours = _colours(theme)
    for text, ground in _PAIRS:
        lighter, darker = sorted((_luminance(colours[text]), _luminance(colours[ground])), reverse=True)
        contrast = (lighter + 0.05) / (darker + 0.05)
        assert contrast >= 4.5, f"{text} on {ground}: {contrast:.2f}"
