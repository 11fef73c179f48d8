"""What compilations found is kept on disk, and anything wrong with the disk only costs a compilation."""

import pickle

import jax

from keras_dist.planning.compilation_cache import CompilationCache


def test_values_come_back_in_another_object(tmp_path):
    CompilationCache(tmp_path / "new").put("a", (1.5, "text"))
    assert CompilationCache(tmp_path / "new").get("a") == (1.5, "text")
    assert CompilationCache(tmp_path / "new").get("b") is None


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
    monkeypatch.setattr("keras_dist.planning.compilation_cache._hash_of_this_room", lambda: b"changed")
    assert CompilationCache().key("program") != before


def test_a_damaged_file_is_as_none(tmp_path):
    cache = CompilationCache(tmp_path)
    cache.put("a", {"x": 1})
    whole = (tmp_path / "a").read_bytes()
    for damaged in (b"", whole[:5], b"text", pickle.dumps(CompilationCache)[:-4]):
        (tmp_path / "a").write_bytes(damaged)
        assert cache.get("a") is None
    cache.put("a", 2)
    assert cache.get("a") == 2


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = CompilationCache(tmp_path / "file" / "folder")
    cache.put("a", 1)
    assert cache.get("a") is None


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
