"""Text of small HLO modules, and what is read from it."""

from keras_dist.planning.hlo.module_costs import ModuleReader


def read_module(*module):
    """The costs of a module, for the arguments of `ModuleReader`."""
    return ModuleReader(*module).module_costs()


def module_of(*entry, computations="", devices=8):
    """Text of a module with these instructions in its entry computation; by default the last one is the root."""
    *others, last = entry
    root = "" if any(line.startswith("ROOT ") for line in entry) else "ROOT "
    lines = "\n".join(f"  {line}" for line in (*others, root + last))
    header = f"HloModule jit_f, is_scheduled=true, num_partitions={devices}"
    return f"{header}\n\n{computations}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n"


def collectives_of(*entry, axes=None, **options):
    """The collectives of such a module on a mesh with these axes."""
    return read_module(module_of(*entry, **options), axes).collectives
