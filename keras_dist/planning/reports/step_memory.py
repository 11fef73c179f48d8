"""Parts of the report of a plan about the memory of a device."""

from dataclasses import dataclass

from keras_dist._report.tables import Bar, Bars, Lines, Section
from keras_dist._report.units import bytes_text, counted, percent_text
from keras_dist._report.variable_groups import PARTS

_PARTS = (*PARTS, "batch", "padding", "outputs", "temporaries", "program")


@dataclass(frozen=True)
class Memory:
    """Memory of one device during a step, in bytes.

    Attributes:
        weights: Trainable and non-trainable weights of the model.
        optimizer: Optimizer state.
        other: Metrics and random seeds.
        batch: The device's shard of the batch.
        padding: What the compiler adds to variables and batch to fill the hardware's tiles.
        outputs: Results that do not reuse the memory of an argument.
        temporaries: Activations, gradients, gathered weights and collective buffers.
        cache: The part of the temporaries that `generate()` keeps of the tokens before: keys and values.
        program: The compiled program.
        host: Variables in the memory of the device's host, which are not part of the total.
        capacity: Memory of the device; None if unknown.
    """

    weights: int
    optimizer: int
    other: int
    batch: int
    padding: int = 0
    outputs: int = 0
    temporaries: int = 0
    cache: int = 0
    program: int = 0
    host: int = 0
    capacity: int | None = None

    @property
    def state(self) -> int:
        """Bytes of all variables: weights, optimizer state and other state."""
        return self.weights + self.optimizer + self.other

    @property
    def total(self) -> int:
        """Bytes needed in total."""
        return self.state + self.batch + self.padding + self.outputs + self.temporaries + self.program


def capacity_text(memory: Memory, fits: bool | None) -> str:
    """Returns whether the memory that a step needs is there, and how much is free or lacking."""
    total, capacity = memory.total, memory.capacity
    needed = bytes_text(total)
    if capacity is not None:
        needed += f" of {bytes_text(capacity)} per device ({percent_text(total / capacity)})"
    if fits is None or capacity is None:
        return f"Needs {needed} per device, whose capacity is unknown."
    if fits:
        return f"Fits: {needed}, {bytes_text(capacity - total)} free."
    if total <= capacity:
        return f"DOES NOT FIT: {needed}, but the compiler cannot allocate it."
    return f"DOES NOT FIT: {needed}, {bytes_text(total - capacity)} over capacity."


def memory_width(memory: Memory) -> int:
    """Returns the bytes that the full width of the bars of memory stands for."""
    return max(memory.total, memory.capacity or 0, 1)


def memory_section(memory: Memory) -> tuple[str, list[Bars]]:
    width = memory_width(memory)

    def bar(label: str, size: int, start: int = 0, is_limit: bool = False) -> Bar:
        percent = () if memory.capacity is None else (percent_text(size / memory.capacity),)
        return Bar(label, (bytes_text(size), *percent), start / width, (start + size) / width, is_limit)

    bars, end = [], 0
    for part in _PARTS:
        if size := getattr(memory, part):
            bars.append(bar("other state" if part == "other" else part, size, end))
            end += size
    if memory.host:
        bars.append(Bar("host", (bytes_text(memory.host), *[""] * (memory.capacity is not None)), 0, 0))
    bars.append(bar("total", memory.total))
    if memory.capacity is not None:
        bars.append(bar("capacity", memory.capacity, is_limit=True))
    return "Memory per device", [Bars(tuple(bars))]


def cache_section(memory: Memory, largest_batch: int | None) -> Section:
    lines = [f"{bytes_text(memory.cache)} of the temporaries are the cache of keys and values."]
    if largest_batch is not None:
        lines.append(f"About {counted(largest_batch, 'row', 'fits', 'fit')} in memory.")
    return "Cache and largest batch", [Lines(tuple(lines))]
