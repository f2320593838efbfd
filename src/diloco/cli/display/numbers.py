"""Numbers as the terminal shows them: bytes, durations, shares, ratios."""

from diloco.training.sizes.room import size_text


def megabytes(count: float | None) -> str:
    """Return a number of bytes with its unit; a hyphen if it is not known."""
    if count is None:
        return "-"
    if count < 1e6:
        return size_text(count)
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def duration(seconds: float | None) -> str:
    """Return seconds as 1:05, or as 2:03:04 from an hour on."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def share(value: float | None) -> str:
    """Return a share in per cent; a hyphen if it is not known."""
    return "-" if value is None else f"{value:.1%}"


def times(ratio: float) -> str:
    """Return a ratio in words: 12 times, or 1.5 times below ten."""
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:,.1f} times"
