"""The equations of a mixture of experts that is computed on each device for chosen experts."""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist.layout.tensor_layout import TensorLayout, axis_names, axis_tuple
from keras_dist.mixtures.batched import MIN_ROWS
from keras_dist.mixtures.computation import compute_mixture
from keras_dist.mixtures.exchange import Form
from keras_dist.mixtures.figures import expert_figures
from keras_dist.mixtures.grouped_products import ChosenForm, choose_form, grouped_product
from keras_dist.mixtures.recognition import Mixture, MixtureCall
from keras_dist.mixtures.rows import compute_one_token, tokens_first
from keras_dist.mixtures.shards import UNSHARDED, Shards, read_shards, row_flops
from keras_dist.passes.step_program import StepProgram
from keras_dist.passes.weight_reads import Scope, gathers, layouts
from keras_dist.sharding.per_device import call_per_device, in_shard_map, pad_with_first
from keras_dist.sharding.resharding import to_compute_layout, without_axes
from keras_dist.tracing.jaxpr_evaluation import as_function, equations_in_place_of, equations_of, scope_of
from keras_dist.tracing.kept_dims import inverse_order


class SparseMixture:
    """Equations in place of the sum over experts of a mixture.

    Weights may be stored in shards over axes of the batch, which are gathered for the layers that read them. The
    expert axes among them need not be: the weights of experts stay where they are, and tokens are sent to them, if
    these have fewer bytes. Outside of train steps that is so for all axes that shard experts: each device computes
    what its experts add to the results of all tokens.
    """

    def __init__(self, program: StepProgram, mixture: Mixture, scope: Scope, regathers: bool):
        """`regathers`: weights are gathered again for the backward pass."""
        self._program, self._mixture, self._scope, self._regathers = program, mixture, scope, regathers
        self._forms: set[ChosenForm] = set()
        self._shards = UNSHARDED
        self._stored_axes: tuple[str, ...] | None = None  # those of experts, if the weights stay where they are stored
        self._num_rows, self._flops, self._exchange = mixture.choice.num_chosen, 0.0, None

    def equations(self) -> Sequence[Any]:
        mixture, function = self._mixture, self._per_device
        operands = [*mixture.operands, mixture.choice.indices]
        if mixture.num_tokens == 1:
            function = self._of_one_token
            if self._may_stay_stored:
                self._stored_axes = self._axes_of_experts()
            self._flops = self._num_rows * row_flops(mixture, UNSHARDED)
        else:
            self._shards = self._read_shards()
            if self._regathers:
                function, operands = self._from_stored_weights(operands)
        found = equations_in_place_of(mixture.equations[-1], function, operands)
        # Of several forms, one that has a reason is reported.
        form = min(self._forms, key=lambda form: form.reason is None, default=ChosenForm("chosen weights", None))
        choice, layer = mixture.choice, scope_of(mixture.equations[-1])
        self._program.mixtures.append(
            MixtureCall(
                layer, *form, choice.num_experts, choice.num_chosen, self._num_rows, self._flops, self._exchange
            )
        )
        return found

    def figures(self, names: list[str]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns equations for the figures that a step logs of the mixture, and their results; adds their names."""
        choice, program = self._mixture.choice, self._program
        sizes, axes = self._tokens(self._shards.shared_axes)
        counts = list(map(self._program.num_shards, axes))
        own_names: list[str] = []

        def computed(indices: Any) -> Any:
            indices = indices.reshape(*sizes, choice.num_chosen)
            missing = [(0, -size % count) for size, count in zip(sizes, counts, strict=True)]
            indices = jnp.pad(indices, [*missing, (0, 0)], constant_values=-1)
            shape = [(count, size // count) for count, size in zip(counts, indices.shape, strict=False)]
            indices = indices.reshape(*itertools.chain.from_iterable(shape), choice.num_chosen)
            devices = [2 * number for number in range(len(counts))]
            indices = jnp.moveaxis(indices, devices, range(len(devices))).reshape(math.prod(counts), -1)
            found = expert_figures(indices, choice.num_experts, program.expert_capacity)
            own_names[:] = found
            return list(found.values())

        found = equations_of(computed, [choice.indices], self._mixture.equations[-1].source_info)
        names += own_names
        return found

    def _of_one_token(self, *values: Any) -> Any:
        """Computes the mixture of a single token with the weights of its experts, and leaves other dims to XLA."""
        mixture = self._mixture
        *operands, indices = values
        num_shards = self._program.num_shards(self._stored_axes or ())
        dims = [mixture.places[variable].expert for variable in mixture.operands]
        operands = [
            value if dim is None else self._split(value, dim, num_shards)
            for value, dim in zip(operands, dims, strict=True)
        ]
        first = jnp.arange(num_shards, dtype=indices.dtype) * (mixture.choice.num_experts // num_shards)
        indices = indices.reshape(-1)
        # XLA:TPU reads a whole array of which several slices are looked up, but only the slice if it is one.
        lookups = jnp.split(indices, indices.size) if self._program.device.platform == "tpu" else [indices]

        def of_shard(operands: Any, first: Any) -> Any:
            found = (compute_one_token(mixture, operands, each, first) for each in lookups)
            return sum(each.astype(mixture.summand_dtype) for each in found)

        return jax.vmap(of_shard, in_axes=(dims, 0))(operands, first).sum(0).astype(mixture.output.aval.dtype)

    def _split(self, value: jax.Array, dim: int, num_shards: int) -> jax.Array:
        """Splits the dim of experts of a value into one of shards, which stay on their devices, and the rest."""
        shape = value.shape
        value = value.reshape(*shape[:dim], num_shards, shape[dim] // num_shards, *shape[dim + 1 :])
        if num_shards == 1:
            return value
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * value.ndim
        spec[dim], spec[dim + 1] = self._stored_axes, None
        return with_sharding_constraint(value, NamedSharding(self._program.mesh, PartitionSpec(*spec)))

    def _per_device(self, *values: Any) -> Any:
        """Computes the mixture of each device's tokens, given operands and the indices of chosen experts."""
        mixture, places, output, shards = self._mixture, self._mixture.places, self._mixture.output, self._shards
        sizes, axes = self._tokens(shards.shared_axes)
        names = (*itertools.chain.from_iterable(axes), *shards.shared_axes)

        def spec_of(variable: Any) -> PartitionSpec:
            tokens = () if places[variable].tokens is None else axes
            return PartitionSpec(*tokens, *shards.axes_of(variable, places[variable]))

        arguments, specs, summed = [], [], []
        for variable, value in zip(mixture.operands, values, strict=False):
            tokens = places[variable].tokens
            value = value.transpose(tokens_first(places[variable], variable))
            if tokens is not None:
                value = self._in_equal_shards(value.reshape(*sizes, *value.shape[len(tokens) :]), axes)
            arguments.append(value)
            specs.append(spec_of(variable))
            if jnp.issubdtype(value.dtype, jnp.inexact):  # those come first
                own = axis_names(specs[-1])
                summed.append(tuple(name for name in names if name not in own))
        indices = self._in_equal_shards(values[-1].reshape(*sizes, mixture.choice.num_chosen), axes)
        summand_axes = shards.summand_axes(output)

        def on_device(*values: Any) -> Any:
            self._num_rows = values[-1].size // (1 if shards.exchange else shards.num_expert_shards)
            self._flops = self._num_rows * row_flops(mixture, shards)
            capacity = self._program.expert_capacity
            result = compute_mixture(mixture, self._product, values[:-1], values[-1], shards, capacity)
            return result.astype(mixture.summand_dtype)[None] if summand_axes else result

        out_spec = PartitionSpec(*([summand_axes] if summand_axes else []), *spec_of(output))
        result = call_per_device(
            on_device, self._program.mesh, (*arguments, indices), (*specs, PartitionSpec(*axes)), out_spec, summed
        )
        if summand_axes:
            result = jax.lax.reduce_sum(result, (0,)).astype(output.aval.dtype)
        result = result[tuple(map(slice, sizes))]
        order = tokens_first(places[output], output)
        result = result.reshape([output.aval.shape[dim] for dim in order])
        return result.transpose(inverse_order(order))

    def _in_equal_shards(self, value: jax.Array, axes: Sequence[Sequence[str]]) -> jax.Array:
        """Pads the leading dims of a value, those of tokens, to equal shards with copies of the first ones."""
        for dim, names in enumerate(axes):
            size = value.shape[dim]
            value = pad_with_first(value, dim, size + -size % self._program.num_shards(names))
        return value

    def _read_shards(self) -> Shards:
        if in_shard_map():  # all operands are shards already
            return UNSHARDED
        program, places = self._program, self._mixture.places
        axes: dict[Any, Any] = {}
        for weight in self._weights:
            if places[weight].expert is not None:
                names = program.axes_of(weight)
                axes[weight] = [[name for name in each if name not in self._batch_axes] for each in names]
        exchange = self._choose_exchange(axes) if program.expert_axes else None
        if not exchange and self._may_stay_stored:
            self._stored_axes = self._choose_stored_axes(axes)
        if program.expert_axes:
            sends_tokens = exchange or {*program.expert_axes} <= {*(self._stored_axes or ())}
            over = ", ".join(map(repr, program.expert_axes))
            self._exchange = f"{'tokens' if sends_tokens else 'weights'} over {over}"
        expert_axes = program.expert_axes if exchange else self._stored_axes or ()
        return read_shards(self._mixture, axes, program.mesh.shape, expert_axes, exchange)

    @property
    def _weights(self) -> list[Any]:
        return [each for each in self._mixture.operands if not self._mixture.places[each].tokens]

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        return self._program.placer.batch_axes + self._program.placer.sequence_axes

    def _choose_exchange(self, axes_of_weights: Mapping[Any, Sequence[Sequence[str]]]) -> Form | None:
        """Returns how rows are sent to the devices of their experts; None if weights are sent to the tokens."""
        mixture, expert_axes = self._mixture, self._program.expert_axes
        sizes, axes = self._tokens(())
        token_axes = {*itertools.chain.from_iterable(axes)}
        is_inexact = all(jnp.issubdtype(variable.aval.dtype, jnp.inexact) for variable in mixture.operands)
        if (
            not is_inexact
            or not token_axes.issuperset(expert_axes)
            or mixture.choice.num_experts % self._program.num_shards(expert_axes)
        ):
            return None
        trained, gathered = self._scope.trained, self._gathered(expert_axes, axes_of_weights)
        weights = [(size, weight in trained) for weight, size in gathered.items()]
        num_tokens = math.prod(sizes) / self._program.num_shards(token_axes)
        if not mixture.sends_tokens(num_tokens, weights, trained, self._regathers or self._is_gathered_again()):
            return None
        return "equal" if self._program.device.platform == "cpu" else "ragged"

    def _is_gathered_again(self) -> bool:
        """Whether a part that is computed again gathers weights of the mixture."""
        readings = (self._reading(weight, is_own=True) for weight in self._weights)
        return self._scope.is_part and any(gathers(each) for each, _ in itertools.chain.from_iterable(readings))

    @property
    def _may_stay_stored(self) -> bool:
        return not (self._program.is_trained or in_shard_map())

    def _choose_stored_axes(self, axes_of_weights: Mapping[Any, Sequence[Sequence[str]]]) -> tuple[str, ...] | None:
        """Returns the axes of experts, if each device is to compute all tokens with the experts that it stores.

        Routing decides how many rows that is. Where devices have the tokens of their own otherwise, rows have to be so
        few that the time is that to read the weights.
        """
        mixture, expert_axes = self._mixture, self._axes_of_experts()
        (_, axes_of_own), (sizes, axes) = self._tokens(()), self._tokens(expert_axes)
        num_tokens = math.prod(sizes) / self._program.num_shards({*itertools.chain.from_iterable(axes)})
        are_few = num_tokens * mixture.choice.num_chosen <= MIN_ROWS * mixture.choice.num_experts
        if not (are_few or {*expert_axes}.isdisjoint(itertools.chain.from_iterable(axes_of_own))):
            return None
        weights = self._gathered({*expert_axes}.intersection(self._batch_axes), axes_of_weights)
        sends_less = num_tokens * mixture.token_bytes(()) <= mixture.choice.num_chosen * sum(weights.values())
        return expert_axes if sends_less else None

    def _axes_of_experts(self) -> tuple[str, ...]:
        """Returns the axes that shard the experts of the largest weight where it is stored."""
        weight = max((each for each in self._weights if self._mixture.places[each].expert is not None), key=_bytes)
        for layout, expert in self._layouts_of(weight):
            if expert is not None:
                return layout[expert]
        return ()

    def _gathered(
        self, over: Collection[str], axes_of_weights: Mapping[Any, Sequence[Sequence[str]]]
    ) -> dict[Any, float]:
        """Returns the weights that are stored in shards over some axes, with their bytes once they are gathered."""
        found = {}
        for weight, names in axes_of_weights.items():
            stored = {name for layout, _ in self._layouts_of(weight) for each in layout for name in each}
            if not stored.isdisjoint(over):
                found[weight] = _bytes(weight) / self._program.num_shards({*itertools.chain.from_iterable(names)})
        return found

    def _layouts_of(self, weight: Any) -> Iterator[tuple[Sequence[tuple[str, ...]], int | None]]:
        """Yields the axes of the dims of a weight before it is gathered for this mixture, then as layers compute."""
        for equation, expert in self._reading(weight):
            if gathers(equation):
                yield [axis_tuple(entry) for entry in layouts(equation)[0].axes], expert
        yield self._program.axes_of(weight), self._mixture.places[weight].expert

    def gathers_of_others(self) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
        """Yields the equations that gather weights over the expert axes, and functions that do so over others only."""
        is_of_one = self._mixture.num_tokens == 1
        if self._shards.exchange or self._stored_axes is not None:
            for weight in self._weights:
                for equation, expert in self._reading(weight):
                    if expert is not None and gathers(equation):
                        gather = functools.partial(self._with_experts_sharded, equation, expert)
                        yield equation, (lambda weight: weight) if is_of_one else gather

    def _from_stored_weights(self, operands: list[Any]) -> tuple[Callable, list[Any]]:
        """Returns the function of operands as they are before their weights are gathered, and these operands."""
        reads = {weight: self._reading(weight, is_own=True) for weight in self._weights}

        def computed(*values: Any) -> Any:
            pairs = zip(operands, values, strict=True)
            return self._per_device(*(self._read(reads.get(variable, ()), value) for variable, value in pairs))

        def is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
            return primitive.name not in ("sharding_constraint", "custom_jvp_call")  # by which weights are gathered

        stored = [reads[each][0][0].invars[0] if reads.get(each) else each for each in operands]
        return jax.checkpoint(computed, policy=is_kept), stored

    def _reading(self, weight: Any, is_own: bool = False) -> list[tuple[Any, int | None]]:
        return self._scope.reading(weight, self._mixture.places[weight].expert, is_own)

    def _read(self, reading: Sequence[tuple[Any, int | None]], value: Any) -> Any:
        for equation, expert in reading:
            if self._shards.exchange and expert is not None and gathers(equation):
                value = self._with_experts_sharded(equation, expert, value)
            else:
                (value,) = as_function(self._scope.with_only(equation))(value)
        return value

    def _with_experts_sharded(self, gather: Any, expert: int, value: Any) -> Any:
        """Gathers a weight as an equation does, but not over the expert axes, which shard no other dim of it."""
        stored, compute = layouts(gather)
        expert_axes = self._shards.expert_axes
        entries = list(without_axes(compute, expert_axes).axes)
        entries[expert] = expert_axes
        summed_axes = [name for name in self._batch_axes if name not in expert_axes]
        return to_compute_layout(value, stored, TensorLayout(entries, compute.device_mesh), stored, summed_axes)

    def _tokens(self, shared_axes: Collection[str]) -> tuple[list[int], list[tuple[str, ...]]]:
        """Returns the sizes of the dims of tokens, and the axes that shard them, which are none of `shared_axes`.

        Operands may have several dims of tokens, such as batch and positions, or one.
        """
        indices, places = self._mixture.choice.indices, self._mixture.places
        dims = [dim for dim, size in enumerate(indices.aval.shape[:-1]) if size > 1]
        sizes = [indices.aval.shape[dim] for dim in dims]
        axes_of_indices = self._program.axes_of(indices)
        axes = [tuple(name for name in axes_of_indices[dim] if name not in shared_axes) for dim in dims]
        operands = (*self._mixture.operands, self._mixture.output)
        variables = [each for each in operands if places[each].tokens is not None]
        if any([each.aval.shape[dim] for dim in places[each].tokens or ()] != sizes for each in variables):
            return [math.prod(sizes)], axes[:1]
        return sizes, axes

    def _product(self, rows: Any, weights: Any, sizes: Any, gates: Any, filled: float) -> Any:
        dtype = jnp.promote_types(rows.dtype, weights.dtype)
        form = choose_form(self._program.device, rows.shape[0], weights.shape, dtype)
        self._forms.add(form)
        return grouped_product(rows.astype(dtype), weights.astype(dtype), sizes, form.name, filled, gates)


def _bytes(variable: Any) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize
