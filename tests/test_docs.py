"""The files and functions that docs/architecture.md names exist."""

import ast
import pathlib
import re

import pytest

import keras_dist

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(keras_dist.__file__).parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()
REFERENCES = sorted(set(re.findall(r"`([\w/]+(?:\.py(?:: [\w.]+)?|/))`", TEXT)))


def defined(body, name):
    """The statement that defines a name in a body, None where there is none."""
    for statement in body:
        if getattr(statement, "name", None) == name:
            return statement
    return None


def test_references_are_found():
    assert len(REFERENCES) > 40
    assert any(": " in reference and "." in reference.split(": ")[1] for reference in REFERENCES)


@pytest.mark.parametrize("reference", REFERENCES)
def test_what_the_architecture_names_exists(reference):
    path, _, name = reference.partition(": ")
    file = next((root / path for root in (PACKAGE, PACKAGE.parent, ROOT) if (root / path).exists()), None)
    assert file is not None, f"{path} does not exist"
    body = ast.parse(file.read_text()).body if name else []
    for part in name.split(".") if name else []:
        statement = defined(body, part)
        assert statement is not None, f"{path} does not define {part}"
        body = getattr(statement, "body", [])


def test_every_room_is_in_the_picture_once():
    rooms = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    picture = TEXT.split("```")[1]
    assert rooms == set(re.findall(r"(?m)^ (\w+)/", picture))
