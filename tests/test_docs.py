"""What the documentation names exists, its examples run, and the site has everything.

Sphinx checks the links of the site when it is built (`make -C docs html`, a stage of `.ci/run`).
"""

import ast
import pathlib
import re
import tomllib

import keras
import numpy as np
import pytest
from support.compilers import needs_cuda, needs_libtpu

import keras_dist
import keras_dist as kd

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = pathlib.Path(keras_dist.__file__).parent
TEXT = (DOCS / "architecture.md").read_text()
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


def test_what_the_architecture_names_exists():
    for reference in REFERENCES:
        path, _, name = reference.partition(": ")
        file = next((root / path for root in (PACKAGE, PACKAGE.parent, ROOT) if (root / path).exists()), None)
        assert file is not None, f"{path} does not exist"
        body = ast.parse(file.read_text()).body if name else []
        for part in name.split(".") if name else []:
            statement = defined(body, part)
            assert statement is not None, f"{path} does not define {part}"
            body = getattr(statement, "body", [])


def test_the_picture_has_the_rooms_of_the_import_contract_in_its_order():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    picture = re.findall(r"(?m)^ (\w+)(?:/|\.py)", TEXT.split("```")[1])
    assert picture == [layer for layer in contract["layers"] if layer != "__main__"]
    assert {file.parent.name for file in PACKAGE.glob("*/__init__.py")} < set(picture)


@pytest.mark.parametrize("room", [init.parent for init in PACKAGE.rglob("*/__init__.py")], ids=lambda room: room.name)
def test_a_room_lists_its_files_and_has_at_most_20(room):
    files = [file.name for file in room.glob("*.py") if not file.name.startswith("__")]
    files += [f"{inner.parent.name}/" for inner in room.glob("*/__init__.py")]
    text = (room / "__init__.py").read_text()
    assert [name for name in files if f"`{name}`" not in text] == []
    assert len(files) <= 20


# The examples of a page run one after another, as a reader would type them. What they need besides:
BUILD = """
def build():
    tokens = keras.Input((16,), dtype="int32")
    x = keras.layers.Embedding(64, 32)(tokens)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(4, 8)(x, x, use_causal_mask=True)])
    model = keras.Model(tokens, keras.layers.Dense(64)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
NEEDED = {
    "context_parallelism": BUILD,
    "monitoring": BUILD
    + """
distribution = kd.DataParallel()
kd.set_distribution(distribution)
model = build()


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, batch):
        return np.zeros((256, 16), "int32"), np.zeros((256, 16), "int32")


data = Data()
""",
    "step_options": """
def build():
    x = inputs = keras.Input((64,))
    for _ in range(4):
        x = keras.layers.Add()([x, keras.layers.Dense(64)(keras.layers.Dense(128, "gelu")(x))])
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return model
""",
    "strategies": "import keras_hub",
}
COMPILED = {"planning": needs_libtpu, "step_options": needs_cuda}  # for hardware that is not attached
SLOW = {"checkpoints", "data", "index", "monitoring", "planning", "step_options", "strategies"}
FENCE = re.compile(r"(?:<!-- not run: ([^\n]*) -->\n)?^```python\n(.*?)^```", re.M | re.S)
PAGES = {page.stem: FENCE.findall(page.read_text()) for page in DOCS.glob("*.md")}


def runs(name):
    marks = [pytest.mark.compiler, COMPILED[name]] if name in COMPILED else []
    marks += [pytest.mark.slow] if name in SLOW else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [runs(name) for name, examples in sorted(PAGES.items()) if examples])
def test_the_examples_of_a_page_run(name, tmp_path, monkeypatch):
    if name == "strategies":
        pytest.importorskip("keras_hub", exc_type=ImportError)
    if name == "checkpoints":
        pytest.importorskip("orbax.checkpoint")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kd.hardware, "_entries", dict(kd.hardware._entries))  # examples register hardware
    namespace = {"keras": keras, "kd": kd, "np": np}
    exec(NEEDED.get(name, ""), namespace)
    for reason, example in PAGES[name]:
        if not reason:
            exec(compile(example.replace("/tmp/", f"{tmp_path}/"), f"docs/{name}.md", "exec"), namespace)


def test_examples_that_do_not_run_say_why():
    skipped = [reason for examples in PAGES.values() for reason, _ in examples if reason]
    assert 0 < len(skipped) < 6
    for test in re.findall(r"tests/[\w/.*]+", " ".join(skipped)):
        assert any(ROOT.glob(test)), test


def test_the_reference_has_every_public_name_once():
    documented = re.findall(
        r"^\.\. auto(?:class|data|exception|function):: keras_dist\.(\w+)$",
        "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md")),
        re.M,
    )
    assert sorted(documented) == sorted(keras_dist.__all__)


def test_every_page_and_guide_is_in_the_table_of_contents():
    pages = [*DOCS.glob("*.md"), *(DOCS / "api").glob("*.md")]
    listed = set()
    for page in pages:
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.S):
            documents = re.findall(r"^(?:[^:\n]* <)?([\w/]+)>?$", tree, re.M)  # or a title <document>
            listed |= {(page.parent / document).relative_to(DOCS) for document in documents}
    documents = {
        page.relative_to(DOCS).with_suffix("") for page in pages if page.stem != "index" or page.parent != DOCS
    }
    assert listed == documents | {pathlib.Path("guides", guide.stem) for guide in (ROOT / "guides").glob("*.py")}
