"""Lowers a traced step to the program that a compiler gets, with the memory that each variable is in."""

from collections.abc import Sequence
from typing import Any

from jax.interpreters.mlir import ir  # pyright: ignore[reportAttributeAccessIssue]

from keras_dist.layout.tensor_layout import HOST_MEMORY, is_in_host_memory
from keras_dist.mesh.devices import is_attached
from keras_dist.planning.compiling.abstract_step import Step


def lowered_step(step: Step, traced: Any) -> Any:
    """Returns a traced step as `jax.stages.Lowered`."""
    lowered = traced.lower()
    device = step.distribution.device_mesh.backend_mesh.devices.flat[0]
    on_host = [is_in_host_memory(step.layouts[id(variable)]) for part in step.variables for variable in part]
    if any(on_host) and device.platform == "gpu" and not is_attached(device):
        _mark_host_memory(lowered.compiler_ir(), on_host)
    return lowered


def _mark_host_memory(module: Any, on_host: Sequence[bool]) -> None:
    """Marks the arguments and results of a module that are in host memory, of which the state has these.

    JAX forgets the memory of arrays on GPUs that are not attached, since these stand-ins do not know their memories.
    """
    (main,) = [op for op in module.body.operations if _name(op) == "main"]
    with module.context:
        for key, first in (("arg_attrs", 0), ("res_attrs", len(main.attributes["res_attrs"]) - len(on_host))):
            attributes = [{each.name: each.attr for each in one} for one in main.attributes[key]]
            for number, one in enumerate(attributes):
                is_state = first <= number < first + len(on_host)
                kind = HOST_MEMORY if is_state and on_host[number - first] else "device"
                one["mhlo.memory_kind"] = ir.StringAttr.get(kind)
            main.attributes[key] = ir.ArrayAttr.get([ir.DictAttr.get(one) for one in attributes])


def _name(operation: Any) -> str | None:
    attributes = operation.attributes
    return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else None
