"""The texts of errors, warnings and reports are those of the reviewed snapshot."""

import importlib
import pathlib
import re
import warnings

import keras
import pytest

import keras_dist as kd
from keras_dist._report import install_advice

FOLDER = pathlib.Path(__file__).parent / "messages"
SNAPSHOT = FOLDER / "snapshot.md"
ROOMS = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")


def text_of(case, directory):
    """Returns the texts of a case: its warnings and its error with their types, and what it returns."""
    kd.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
    texts = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        try:
            returned = case()
            texts += [returned] if isinstance(returned, str) else []
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    own = [each for each in warned if issubclass(each.category, UserWarning)]
    for each in own:  # points at the line that called Keras or this package
        assert each.filename.startswith((str(FOLDER.parent), str(directory))), f"{each.filename}:{each.lineno}: {each}"
    texts = [f"{each.category.__name__}: {each.message}" for each in own] + texts
    assert texts, "the case raises nothing, warns of nothing and returns no text"
    return "\n".join(texts).replace(str(directory), "/tmp")


def section(room, directory):
    cases = importlib.import_module(f"messages.{room}").CASES
    texts = (f"## {name}\n\n```text\n{text_of(case, directory)}\n```\n" for name, case in cases.items())
    return f"# {room}\n\n" + "\n".join(texts)


def sections():
    text = SNAPSHOT.read_text() if SNAPSHOT.exists() else ""
    return {part.partition("\n")[0]: f"# {part.rstrip()}\n" for part in re.split(r"(?m)^# ", text)[1:]}


@pytest.mark.parametrize("room", ROOMS)
def test_texts_are_those_of_the_snapshot(room, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    # As on a machine without an NVIDIA driver, where the package does not come from an index.
    monkeypatch.setattr(install_advice, "_DRIVER_FILE", tmp_path / "absent")
    monkeypatch.setattr(install_advice, "_is_from_index", lambda: False)
    found = section(room, tmp_path)
    if request.config.getoption("--update-messages"):
        parts = {name: part for name, part in sections().items() if name in ROOMS} | {room: found}
        SNAPSHOT.write_text("\n".join(parts[name] for name in sorted(parts)))
    assert found == sections()[room]


def test_the_snapshot_has_no_other_rooms():
    assert list(sections()) == ROOMS
