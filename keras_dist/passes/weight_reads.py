"""What is between the weights of experts, as they are stored, and mixtures that read them."""

from collections.abc import Collection, Mapping
from typing import Any

from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.sharding.resharding import changed_shardings
from keras_dist.tracing.jaxpr_evaluation import with_gradients
from keras_dist.tracing.kept_dims import kept_dims, moved_dim, reversed_groups
from keras_dist.tracing.primitives import UNCHANGED


class Scope:
    """An open jaxpr, and what computes its values and inputs."""

    def __init__(
        self,
        jaxpr: Any,
        trained: Collection[Any],
        outer: "Scope | None" = None,
        inputs: Mapping[Any, Any] | None = None,
    ):
        """`trained`: inputs that have gradients. `inputs`: variables of the outer scope, by inputs of this one."""
        self._jaxpr, self._outer, self._inputs = jaxpr, outer, inputs or {}
        self.trained = with_gradients(jaxpr, trained)
        self._producers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a program, such as one that is computed again."""
        return self._outer is not None

    def reading(self, weight: Any, expert: int | None, is_own: bool = False) -> list[tuple[Any, int | None]]:
        """Returns the equations from a weight as it is stored to an operand of a mixture, each with the dim of experts.

        Args:
            weight: The operand.
            expert: Its dim of experts.
            is_own: Whether to begin in this jaxpr, if a weight is passed to it.
        """
        producer = self._producers.get if is_own else self._producer
        found: list[tuple[Any, int | None]] = []
        while (equation := producer(weight)) is not None and len(equation.invars) == 1:
            if not gathers(equation):
                if equation.primitive.name not in (*_READING, *UNCHANGED):
                    break
                expert = None if expert is None else moved_dim(expert, reversed_groups(kept_dims(equation, 0)))
            (weight,) = equation.invars
            found.insert(0, (equation, expert))
        return found

    def _producer(self, variable: Any) -> Any:
        """Returns the equation that computes a variable here or outside; None if there is none."""
        if self._outer is None or variable in self._producers:
            return self._producers.get(variable)
        return self._outer._producer(self._inputs.get(variable, variable))

    def with_only(self, equation: Any) -> Any:
        """Returns a jaxpr of one equation."""
        variables = {"invars": equation.invars, "outvars": equation.outvars, "constvars": []}
        return self._jaxpr.replace(eqns=[equation], **variables)


_READING = ("convert_element_type", "transpose", "reshape", "squeeze")


def gathers(equation: Any) -> bool:
    """Whether an equation changes the layout of a weight that is stored in another one, by `to_compute_layout`."""
    return bool(changed_shardings(equation))


def layouts(gather: Any) -> tuple[TensorLayout, TensorLayout]:
    """Returns the layout in which a weight is stored, and that in which layers compute with it."""
    shardings = changed_shardings(gather)
    rank = gather.invars[0].aval.ndim
    stored, compute = (
        TensorLayout([*each.spec, *[None] * (rank - len(each.spec))], each.mesh)
        for each in (shardings[0], shardings[-1])
    )
    return stored, compute
