"""Names of machines with GPUs, as clouds and notebook services spell them: those in `machines.toml`."""

import re
import tomllib
from importlib import resources

_MACHINES = tomllib.loads(resources.files("keras_dist.planning.targets").joinpath("machines.toml").read_text())[
    "machines"
]


def gpus_of_machine(name: str) -> tuple[str, int] | None:
    """Returns the hardware and the number of GPUs of a machine; None if the name is no machine's.

    >>> gpus_of_machine("g5.12xlarge")
    ('a10g', 4)
    """
    for pattern, chip, *count in _MACHINES:
        if machine := re.fullmatch(pattern, name):
            return chip, count[0] if count else int(machine[1])
    return None
