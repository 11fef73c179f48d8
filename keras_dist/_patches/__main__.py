"""Prints docs/patches.md: `python -m keras_dist._patches > docs/patches.md`."""

from keras_dist._keras.patch_registry import GROUPS, Patch
from keras_dist._keras.replaced_in_jax import REPLACED

_HEAD = """# Patches of Keras

keras_dist replaces these functions of Keras, and one of JAX that Keras calls, where there is no public hook. Each patch
calls the original function for everything that it is not about, so programs that use plain `keras.distribution` see no
change. All apply to all [supported releases of Keras](keras_versions.md). Before patches are installed, the
parameters of Keras's functions are compared with those of these releases; others are an error that names the function.

This file is generated: `python -m keras_dist._patches > docs/patches.md`. A patch is declared in the file of
`keras_dist/_patches/` that the table names, with a decorator from `keras_dist/_keras/patch_registry.py`.
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
    rows = [f"| {what} | {when} | {why} | `{module.replace('.', '/')}.py` |\n" for what, when, why, module in REPLACED]
    parts.append(
        "## In JAX, for a time\n\nNo patches: these are replaced where they are needed, and then restored.\n\n"
        f"| Replaced | When | Why | File |\n|---|---|---|---|\n{''.join(rows)}"
    )
    return "\n".join(parts)


def _file(patch: Patch) -> str:
    return patch.replacement.__module__.rpartition(".")[2] + ".py"


if __name__ == "__main__":
    print(document(), end="")
