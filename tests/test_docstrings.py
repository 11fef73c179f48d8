"""One convention for docstrings: in `Args`, `Attributes` and `Raises`, what is said of a name begins in upper case."""

import ast
import pathlib
import re

import keras_dist

PACKAGE = pathlib.Path(keras_dist.__file__).parent
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef
SECTION = re.compile(r"^( *)(Args|Attributes|Raises):\n((?:\1    .*\n|\n)+)", re.M)


def descriptions(docstring):
    """Yields what is said of each name."""
    for indent, _, body in SECTION.findall(f"{docstring}\n"):
        yield from re.findall(rf"(?m)^{indent}    [*\w]+(?: \([^)]*\))?: (.*)", body)


def test_descriptions_begin_in_upper_case():
    found = {
        f"{file.relative_to(PACKAGE)}: {description}"
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node))
        for description in descriptions(docstring)
        if re.match(r"[a-z][a-z]+[ ,.;:]", description) and not description.startswith("jax.")
    }
    assert not found


def test_lower_case_would_be_found():
    assert list(descriptions("Does.\n\nArgs:\n    name: the name,\n        of it: all.\n    *more (int): More.\n")) == [
        "the name,",
        "More.",
    ]
