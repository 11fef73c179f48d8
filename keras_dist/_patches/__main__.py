"""Prints docs/patches.md: `python -m keras_dist._patches > docs/patches.md`."""

from keras_dist._keras.patch_registry import GROUPS, Patch

_HEAD = """# Patches of Keras

keras_dist replaces these functions of Keras, one of JAX that Keras calls, and one of safetensors that KerasHub calls,
where there is no public hook. Each patch calls the original function for everything that it is not about, so programs
that use plain `keras.distribution` see no change. All apply to all [supported releases of Keras](keras_versions.md).
Before patches are installed, the parameters of Keras's functions are compared with those of these releases; others are
an error that names the function.

This file is generated: `python -m keras_dist._patches > docs/patches.md`. A patch is declared in the file of
`keras_dist/_patches/` that the table names, with a decorator from `keras_dist/_keras/patch_registry.py`.
"""

_IN_JAX = """## In JAX, for a time

No patches: these are replaced where they are needed, and then restored.

| Replaced | When | Why | File |
|---|---|---|---|
| `jax.distributed.initialize` | while `keras_dist.initialize` runs | Keras calls it without a timeout, and it \
cannot be passed one | `keras_dist/_keras/internals.py` |
| the C++ library in `jax._src.distributed`, and `make_gloo_tcp_collectives` in jaxlib | while processes join; the \
collectives of CPUs from then on | JAX waits without a limit for processes that do not come, and ends the program \
when one fails; gloo listens on the address of the host's name, also where all processes are on one machine | \
`keras_dist/multihost/coordination.py` |
| `jax.devices`, `jax.local_devices`, `jax.device_count`, `jax.local_device_count`, `jax.default_backend`, and what \
JAX asks of cuDNN | while a step is traced for hardware that is not attached | Keras and layers choose algorithms by \
the devices of this machine, and not by those to compile for | `keras_dist/planning/targets/target_platform.py` |
"""


def document() -> str:
    parts = [_HEAD]
    for group in GROUPS:
        patches = sorted(group.patches, key=lambda patch: (_file(patch), patch.target))
        rows = [
            f"| `{p.target.removeprefix('keras.src.')}` | {p.reason} | {p.issue} | `{_file(p)}` |\n" for p in patches
        ]
        parts.append(
            f"## {group.name.capitalize()} ({len(rows)})\n\n{group.when}\n\n"
            "| Function of Keras | What is wrong or missing without the patch | Upstream | File |\n"
            f"|---|---|---|---|\n{''.join(rows)}"
        )
    return "\n".join([*parts, _IN_JAX])


def _file(patch: Patch) -> str:
    return patch.replacement.__module__.rpartition(".")[2] + ".py"


if __name__ == "__main__":
    print(document(), end="")
