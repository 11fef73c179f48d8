"""Fourier transforms: each device transforms its rows.

XLA gathers all rows. XLA:CPU computes transforms of arrays in row-major layout only, but chooses another one where an
array is gathered along dim 1, and fails when the step runs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from keras_dist.passes.step_program import StepProgram
from keras_dist.sharding.per_device import call_per_device


def fourier(equation: Any, program: StepProgram) -> Callable | None:
    """Computes Fourier transforms on each device for its rows, in row-major layout on CPUs."""
    if equation.primitive.name != "fft":
        return None
    is_row_major = program.device.platform == "cpu"

    def transform(fft: Callable, operand: Any) -> Any:
        return _row_major(fft(_row_major(operand))) if is_row_major else fft(operand)

    operand, mesh = equation.invars[0], program.mesh
    axes = program.axes_of(operand)[: operand.aval.ndim - len(equation.params["fft_lengths"])]
    if program.partitioned_mesh(equation) is not mesh or not any(axes):
        return transform if is_row_major else None
    spec = PartitionSpec(*axes)

    def per_device(fft: Callable, operand: Any) -> Any:
        result = call_per_device(partial(transform, fft), mesh, (operand,), (spec,), spec, summed_axes=((),))
        return program.sequences_sharded(equation, result)

    return per_device


def _row_major(array: Any) -> Any:
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))
