"""Formats figures with three significant digits: bytes in binary units (KiB, MiB), the rest in decimal units."""

import math
import re


def bytes_text(count: float) -> str:
    """Formats a number of bytes in binary units.

    >>> bytes_text(512), bytes_text(3.4 * 2**30), bytes_text(1023 * 2**20)
    ('512 B', '3.40 GiB', '0.999 GiB')
    """
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def flops_text(count: float) -> str:
    return _scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def count_text(count: float) -> str:
    """Formats a count in thousands (k), millions (M), billions (G) or trillions (T)."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T")).rstrip()


def counted(count: float | str, noun: str, verb: str = "", plural_verb: str = "") -> str:
    """Formats a count with its noun, in the plural unless the count is 1, and perhaps with a verb.

    >>> counted(1, "device"), counted(12, "free axis"), counted(0, "batch", "is", "are"), counted(2.5, "second")
    ('1 device', '12 free axes', '0 batches are', '2.5 seconds')
    """
    text = f"{count:g}" if isinstance(count, float) else str(count)
    if text != "1":
        endings = ("is$", "es"), ("([^aeiou])y$", r"\1ies"), ("(s|x|ch|sh)$", r"\1es"), ("$", "s")
        noun = next(re.sub(end, plural, noun, count=1) for end, plural in endings if re.search(end, noun))
        verb = plural_verb
    return f"{text} {noun} {verb}".rstrip()


def seconds_text(seconds: float | None) -> str:
    """Formats a time in s, ms or us.

    >>> seconds_text(0.01234), seconds_text(90), seconds_text(0.0), seconds_text(None)
    ('12.3 ms', '90 s', '0 s', 'unknown')
    """
    if seconds is None:
        return "unknown"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds == 0 or seconds >= 0.9995 * size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-6)} us"


def percent_text(fraction: float) -> str:
    """Formats a fraction of 1 in percent.

    >>> percent_text(0.0371), percent_text(1.5), percent_text(1e-6)
    ('3.71%', '150%', '<0.1%')
    """
    return "<0.1%" if 0 < fraction < 0.001 else f"{_digits(100 * fraction)}%"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if value < 999.5:
            return f"{_digits(value)} {unit}"
        value /= base
    return f"{_digits(value)} {units[-1]}"


def _digits(value: float) -> str:
    """Formats with three significant digits; integers below 1,000 have no decimals, larger numbers are rounded."""
    if not math.isfinite(value):
        return str(value)
    if value == round(value) and value < 1000:
        return f"{value:.0f}"
    decimals = next((d for d, limit in ((3, 0.9995), (2, 9.995), (1, 99.95)) if value < limit), 0)
    return f"{value:.{decimals}f}"
