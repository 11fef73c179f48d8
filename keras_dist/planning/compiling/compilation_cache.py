"""Keeps what compilations found on disk, by the program and the target, so that nothing is compiled twice."""

import contextlib
import functools
import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from keras_dist._report.report import from_plain_data, to_plain_data
from keras_dist.checkpoint.atomic_write import write_atomically

# What determines, besides the program, what a compiler makes of it and what is read from that.
_PACKAGES = ("keras-dist", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_FORMAT = 1  # of the files


class CompilationCache:
    """Results by key in files of a folder. Files that cannot be read or written are left alone.

    The folder is `keras_dist` in JAX's compilation cache, if there is one (`jax_compilation_cache_dir`), or else in the
    user's cache folder. It can be deleted at any time. Others may be able to write to it, so the files are JSON, which
    unlike pickles cannot execute anything.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = _default_folder() if folder is None else folder

    def key(self, *parts: str) -> str:
        """Returns a key for texts that determine a result, the versions of what makes it, and JAX's configuration."""
        circumstances = _circumstances().encode() + _hash_of_planning()
        return hashlib.sha256(b"\0".join([circumstances, *(part.encode() for part in parts)])).hexdigest()

    def get(self, key: str, kind: Any) -> Any:
        """Returns what was put under a key, of a type for `from_plain_data`; None if nothing can be read."""
        try:
            content = json.loads((self.folder / f"{key}.json").read_text("utf-8"))
            return from_plain_data(kind, content["value"]) if content["format"] == _FORMAT else None
        except Exception:  # another version of this package wrote it, or the disk damaged it: it is compiled again
            return None

    def put(self, key: str, value: Any) -> None:
        """Keeps a value under a key, if the folder can be written."""
        content = {"format": _FORMAT, "value": to_plain_data(value)}
        text = json.dumps(content, default=lambda number: number.item())  # NumPy's numbers
        with contextlib.suppress(OSError):  # without a cache, the next search compiles again
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / f"{key}.json", lambda path: Path(path).write_text(text, "utf-8"))


def _default_folder() -> Path:
    configured: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if configured and "://" in configured:  # JAX also takes buckets, such as "gs://cache"
        configured = None
    return Path(configured or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "keras_dist")


@functools.cache
def _hash_of_planning() -> bytes:
    """Returns a hash of the code that reads compiled programs, which may change while its version stays the same."""
    files = [path for path in Path(__file__).parents[1].rglob("*") if path.suffix in (".py", ".toml")]
    texts = [path.read_bytes() for path in sorted(files)]
    return hashlib.sha256(b"".join(texts)).digest()


def _circumstances() -> str:
    texts = [repr(sorted(jax.config.values.items())), *(f"{name}={os.environ.get(name)}" for name in _VARIABLES)]
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            texts.append(f"{name}=={metadata.version(name)}")
    return " ".join(texts)
