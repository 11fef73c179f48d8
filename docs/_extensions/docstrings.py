"""How autodoc reads docstrings: code is between single backticks, and what patches and Keras call is left out."""

import re

from keras_dist._keras.active_distribution import PackageDistribution

CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)")
SKIPPED = {*PackageDistribution.asked_by_patches, "asked_by_patches"} - {"strict"}


def mark_code(app, what, name, obj, options, lines: list[str]) -> None:
    """Doubles single backticks, as reStructuredText has them, outside of examples: `x`s becomes ``x``\\\\ s."""
    text = "\n".join(lines)
    blocks = re.split(r"(^ *>>> .*?(?:\n *(?:\n|\Z)|\Z))", text, flags=re.M | re.S)
    blocks[::2] = [CODE.sub(_doubled, block) for block in blocks[::2]]  # the others are examples
    lines[:] = "".join(blocks).split("\n")


def _doubled(code: re.Match) -> str:
    return f"``{code[1]}``" + (rf"\ {code[2]}" if code[2] else "")


def skip(app, what, name, member, skipped, options) -> bool | None:
    """Skips what patches ask of distributions, and the methods by which Keras calls callbacks."""
    return True if name in SKIPPED or name.startswith("on_") else None


def setup(app):
    app.connect("autodoc-process-docstring", mark_code)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
