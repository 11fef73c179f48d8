"""Replaces ADDRESS_OF_THIS_REPOSITORY on pages by the address that `pyproject.toml` states."""

import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
PLACEHOLDER = "ADDRESS_OF_THIS_REPOSITORY"
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]


def fill_in(app, name: str, source: list[str]) -> None:
    source[0] = source[0].replace(PLACEHOLDER, ADDRESS)


def setup(app):
    app.connect("source-read", fill_in)
    return {"parallel_read_safe": True}
