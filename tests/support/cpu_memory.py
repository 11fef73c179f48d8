"""CPU devices with little memory, for which plans do not fit."""

import jax


def capacity_of(monkeypatch, capacity):
    """Lets a CPU device have this memory, in bytes."""
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": int(capacity) * len(jax.devices())}
    monkeypatch.setattr("keras_dist.planning.targets.target.os.sysconf", pages.__getitem__)
