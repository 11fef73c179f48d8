"""What compilations found is kept on disk, and anything wrong with the disk only costs a compilation."""

import json
import pickle

import jax
import numpy as np
import pytest
from support.example_plans import example_plan

from keras_dist.planning.compiling.compilation import Compilation
from keras_dist.planning.compiling.compilation_cache import CompilationCache
from keras_dist.planning.hlo.collectives import Collective

PLAN = example_plan()
COMPILATION = Compilation(
    argument_bytes=7,
    temporaries=2.5,
    traffic=PLAN.traffic,
    collectives=(
        Collective("all-reduce", "a", "", 1, 8, 7.0, 1, 4, ("data",), ((0, 1), (2, 3)), "f32"),
        Collective("all-gather", "b", "", 1, 8, float("inf"), 1, 4, None, (), "f32", "all-gather", 0.5, 0.25),
    ),
    model_flops=1e15,
    roofline=PLAN.roofline,
    largest_values=PLAN.largest_values,
    attention=PLAN.attention,
    refusal=None,
    notes=("Größe",),
    seconds=3,
)


def test_values_come_back_in_another_object(tmp_path):
    CompilationCache(tmp_path / "new").put("a", COMPILATION)
    found = CompilationCache(tmp_path / "new").get("a", Compilation)
    assert found == COMPILATION
    assert hash(found.collectives) == hash(COMPILATION.collectives)
    assert isinstance(found.roofline.forecast, type(PLAN.roofline.forecast))
    assert CompilationCache(tmp_path / "new").get("b", Compilation) is None
    CompilationCache(tmp_path).put("c", (np.int64(3), np.float32(0.5)))
    assert CompilationCache(tmp_path).get("c", tuple[float, ...]) == (3, 0.5)


class Harmful:
    def __reduce__(self):
        return pytest.fail, ("executed",)


def test_files_of_others_are_as_none_and_execute_nothing(tmp_path):
    cache = CompilationCache(tmp_path)
    cache.put("a", COMPILATION)
    [file] = tmp_path.iterdir()
    content = json.loads(file.read_text())
    value = content["value"]
    wrong = [
        {"format": 2, "value": value},
        {"value": value},
        {"format": 1, "value": {**value, "unknown": 1}},
        {"format": 1, "value": {name: each for name, each in value.items() if name != "temporaries"}},
        {"format": 1, "value": {**value, "notes": "text"}},
        {"format": 1, "value": {**value, "notes": [1]}},
        {"format": 1, "value": {**value, "seconds": None}},
        {"format": 1, "value": {**value, "collectives": [{**value["collectives"][0], "groups": [[0.5]]}]}},
        [content],
        None,
    ]
    for each in wrong:
        file.write_text(json.dumps(each))
        assert cache.get("a", Compilation) is None
    for name in ("a", "a.json"):
        (tmp_path / name).write_bytes(pickle.dumps(Harmful()))
        assert cache.get("a", Compilation) is None
    file.write_text(json.dumps(content))
    assert cache.get("a", Compilation) == COMPILATION


def test_keys_depend_on_every_part_and_their_order():
    cache = CompilationCache()
    keys = {cache.key(*parts) for parts in [("a", "b"), ("b", "a"), ("ab",), ("a", "b", ""), ()]}
    assert len(keys) == 5
    assert cache.key("a", "b") == CompilationCache().key("a", "b")


def test_keys_depend_on_what_the_compiler_is_told_elsewhere(monkeypatch):
    before = CompilationCache().key("program")
    monkeypatch.setenv("XLA_FLAGS", "--xla_example=1")
    assert CompilationCache().key("program") != before
    monkeypatch.delenv("XLA_FLAGS")
    level = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not level)
    try:
        assert CompilationCache().key("program") != before
    finally:
        jax.config.update("jax_disable_most_optimizations", level)


def test_keys_depend_on_the_code_that_reads_programs(monkeypatch):
    before = CompilationCache().key("program")
    monkeypatch.setattr("keras_dist.planning.compiling.compilation_cache._hash_of_planning", lambda: b"changed")
    assert CompilationCache().key("program") != before


def test_a_damaged_file_is_as_none(tmp_path):
    cache = CompilationCache(tmp_path)
    cache.put("a", 1)
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:5], b"text", b"\xff" + whole, b"[" * 100_000):
        file.write_bytes(damaged)
        assert cache.get("a", int) is None
    cache.put("a", 2)
    assert cache.get("a", int) == 2


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = CompilationCache(tmp_path / "file" / "folder")
    cache.put("a", 1)
    assert cache.get("a", int) is None


def test_the_folder_is_in_the_cache_of_jax_or_of_the_user(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
        assert CompilationCache().folder == tmp_path / "jax" / "keras_dist"
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert CompilationCache().folder == tmp_path / "keras_dist"
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")  # which JAX takes, and Python does not
        assert CompilationCache().folder == tmp_path / "keras_dist"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert CompilationCache().folder == tmp_path / ".cache" / "keras_dist"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
