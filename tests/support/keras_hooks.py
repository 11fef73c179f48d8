"""A pytest plugin for a Keras with `docs/keras_hooks.diff`: its hooks are used in place of patches.

.ci/keras_with_hooks
"""

import pytest

_COUNTS = pytest.StashKey[tuple[int, int]]()

# The hook of `keras.distribution.Distribution` that makes each patch needless.
HOOKS = {
    "backend.common.variables.Variable._maybe_autocast": "read_variable",
    "backend.jax.trainer.JAXEpochIterator": "epoch_iterator",
    "backend.jax.trainer._distribute_data": "place_batch",
    "backend.jax.trainer.JAXTrainer.train_step": "train_step",
    "backend.jax.trainer.JAXTrainer.predict_step": "predict_step",
    "backend.jax.trainer.JAXTrainer._get_state_sharding_spec": "state_shardings",
    "backend.jax.trainer.jit": "compile_step",
    "backend.jax.nn.dot_product_attention": "dot_product_attention",
}


def _hook_of(patch):
    def hook(distribution, original, *args, **kwargs):
        if isinstance(patch.replacement, type):
            return patch.replacement(*args, **kwargs)
        context = () if patch.context is None else (distribution,)
        return patch.replacement(original, *context, *args, **kwargs)

    return hook


def pytest_sessionstart(session):
    # Imported here: by then the root conftest has chosen Keras's backend and simulated devices.
    from keras_dist._keras.internals import KerasDistribution
    from keras_dist._keras.patch_registry import GROUPS
    from keras_dist.strategies.base import Distribution

    found = {patch.target.removeprefix("keras.src."): (group, patch) for group in GROUPS for patch in group.patches}
    for target, hook in HOOKS.items():
        group, patch = found[target]
        assert hasattr(KerasDistribution, hook), f"Keras has no hook {hook}: apply docs/keras_hooks.diff."
        setattr(Distribution, hook, _hook_of(patch))
        group.patches.remove(patch)
    session.config.stash[_COUNTS] = len(found), len(HOOKS)


def pytest_terminal_summary(terminalreporter, config):
    patches, hooks = config.stash[_COUNTS]
    terminalreporter.write_line(f"{patches} patches of Keras: {hooks} are replaced by hooks, {patches - hooks} remain.")
