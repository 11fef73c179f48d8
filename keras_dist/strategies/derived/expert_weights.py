"""Which dims of the weights of mixtures of experts tensor parallelism should shard, as mixtures are computed sparsely.

The model is traced as it is written, mostly with all experts for all tokens. But its mixtures are computed for chosen
experts only, and their results are all-reduced once, as (tokens, D), whether the experts are sharded or their width.
Then the width is better: each device computes the same number of rows, whatever the router chooses. Shards of less than
`MIN_SHARD_WIDTH` would waste much of a matrix unit.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Literal

from keras_dist.mixtures.partial_sums import partial_sums
from keras_dist.mixtures.recognition import Mixture, find_mixtures
from keras_dist.passes.experts import may_have_experts
from keras_dist.tracing.dim_graph import DimGraph
from keras_dist.tracing.jaxpr_evaluation import all_equations, inlined, inner_jaxprs, live
from keras_dist.tracing.kept_dims import kept_dims, moved_dim, reversed_groups
from keras_dist.tracing.primitives import LOOPS_AND_BRANCHES

MIN_SHARD_WIDTH = 128  # the tile of a TPU's matrix unit


def with_mixtures(program: Any) -> tuple[Any, list[Mixture]]:
    """Returns a closed jaxpr and its mixtures.

    If it has any, its calls are inlined, and what its results do not need is left out; its inputs stay.
    """
    if not may_have_experts(program):
        return program, []
    whole = inlined(program.jaxpr, program.consts, is_call=lambda _: True)
    whole = whole.replace(jaxpr=live(whole.jaxpr))
    mixtures = list(_mixtures(whole.jaxpr, whole.consts))
    return (whole if mixtures else program), mixtures


def _mixtures(jaxpr: Any, constants: Sequence[Any]) -> Iterator[Mixture]:
    yield from find_mixtures(jaxpr, constants)[0]
    for equation in jaxpr.eqns:
        if equation.primitive.name in LOOPS_AND_BRANCHES:
            for body in inner_jaxprs(equation.params):
                yield from _mixtures(body, ())


def summed_later(mixtures: Sequence[Mixture]) -> dict[Any, Any]:
    """Returns the values whose partial sums need not be added up at once, each with the one that is all-reduced."""
    return {value: mixture.output for mixture in mixtures for value in partial_sums(mixture)}


def preferred_nodes(mixtures: Sequence[Mixture], graph: DimGraph) -> set[int]:
    """Returns the nodes to shard of mixtures: of each its width, if shards of it are wide, otherwise its experts.

    A mixture whose width cannot be followed, such as that of fused gate and up projections, or is narrow has none if
    the axis does not divide the number of experts.
    """
    return {node for mixture in mixtures for node in (_wide(mixture, graph) or expert_nodes([mixture], graph))}


def expert_nodes(mixtures: Sequence[Mixture], graph: DimGraph) -> set[int]:
    """Returns the nodes of the dims of experts."""
    places: list[Any] = [
        (weight, mixture.places[weight].expert) for mixture in mixtures for weight in _weights(mixture)
    ]
    return {node for weight, dim in places if (node := graph.find(graph.dims[weight])[dim]) is not None}


def _weights(mixture: Mixture) -> list[Any]:
    numbers = ((equation, mixture.weight_of(equation)) for equation in mixture.equations)
    return [equation.invars[number] for equation, number in numbers if number is not None]


def _wide(mixture: Mixture, graph: DimGraph) -> set[int]:
    """Returns the node of the width of all experts, if its shards are wide, and only results have partial sums."""

    def nodes_of(variable: Any) -> Sequence[int | None]:
        return () if isinstance(variable, Literal) else graph.find(graph.dims[variable])

    places, weights = mixture.places, _weights(mixture)
    sizes = [
        {nodes_of(weight)[dim]: weight.aval.shape[dim] for dim in places[weight].rest(weight)} for weight in weights
    ]
    outside = [*mixture.operands, mixture.output]
    token_nodes = {node for v in outside if places[v].tokens is not None for node in nodes_of(v)}
    sums, gathered = partial_sums(mixture), graph.gather_bytes()

    def is_followed(node: int) -> bool:
        summed = (
            equation.outvars[0]
            for equation in mixture.equations
            if any(node in nodes_of(variable) for variable in equation.invars)
            and all(node not in nodes_of(variable) for variable in equation.outvars)
        )
        return node not in gathered and sums.issuperset(summed)

    common = set.intersection(*map(set, sizes)) - token_nodes - {None}
    widths = {node: min(each[node] for each in sizes) for node in common if node is not None and is_followed(node)}
    return {node for node, width in widths.items() if width // graph.axis_size >= MIN_SHARD_WIDTH}


def routers(program: Any, mixtures: Sequence[Mixture]) -> set[Any]:
    """Returns the inputs of a program that have the dim of experts along which tokens choose, such as routers.

    Tokens choose among the scores of all experts, so sharded ones would have to be gathered.
    """
    return _inputs(program, [(each.choice.indices, each.choice.indices.aval.ndim - 1) for each in mixtures])


def weights_of_experts(program: Any, mixtures: Sequence[Mixture]) -> set[Any]:
    """Returns the inputs of a program that are weights of experts, also their biases and scales."""
    places = ((variable, mixture.places[variable]) for mixture in mixtures for variable in mixture.operands)
    return _inputs(program, [(v, place.expert) for v, place in places if place.tokens is None])


def shares_of_tokens(program: Any, mixtures: Sequence[Mixture]) -> dict[Any, float]:
    """Returns what fraction of each weight of experts a token is multiplied with, k / E, by inputs of a program."""
    by_share: defaultdict[float, list[Mixture]] = defaultdict(list)
    for mixture in mixtures:
        by_share[mixture.choice.num_chosen / mixture.choice.num_experts].append(mixture)
    return {weight: share for share, each in by_share.items() for weight in weights_of_experts(program, each)}


def _inputs(program: Any, values: Sequence[tuple[Any, int | None]]) -> set[Any]:
    """Returns the inputs of a program from which values have a dim."""
    producers: dict[Any, Any] = {}
    outside: dict[Any, Any] = {}  # what loops take, by the inputs of their bodies
    for equation in all_equations(program):
        producers.update(dict.fromkeys(equation.outvars, equation))
        if equation.primitive.name == "scan":
            outside.update(zip(inner_jaxprs(equation.params)[0].invars, equation.invars, strict=True))
    todo = [(variable, dim) for variable, dim in values if dim is not None]
    seen = set(todo)
    while todo:
        variable, dim = todo.pop()
        found: set[tuple[Any, int]] = set()
        if variable in producers:
            found = {*_before(producers[variable], dim)}
        elif not isinstance(operand := outside.get(variable, variable), Literal):
            found = {(operand, dim + operand.aval.ndim - variable.aval.ndim)}  # a step may take a slice of it
        todo += found - seen
        seen |= found
    return {variable for variable, _ in seen}.intersection(program.jaxpr.invars)


def _before(equation: Any, dim: int) -> Iterator[tuple[Any, int]]:
    """Yields operands with the dim that is this one of the results, or along which it is computed, as by `top_k`."""
    name, result = equation.primitive.name, equation.outvars[0].aval.shape
    for number, operand in enumerate(equation.invars):
        if isinstance(operand, Literal):
            continue
        place = moved_dim(dim, reversed_groups(kept_dims(equation, number)))
        is_along = name in ("slice", "top_k") or (operand.aval.shape == result and name != "dot_general")
        if place is not None or is_along:
            yield operand, dim if place is None else place
