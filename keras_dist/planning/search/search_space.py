"""The search space of `auto`: the candidates for a model on some devices, and what is known of them in advance."""

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from keras_dist._report.units import counted
from keras_dist.planning.compiling.abstract_step import Step, prepared_step
from keras_dist.planning.search.candidates import DATA, MODEL, WITHOUT_SHARDED_STATE, Candidate, enumerate_candidates
from keras_dist.planning.search.choice import NoCandidateError
from keras_dist.planning.search.closed_forms import Sizes, Workload
from keras_dist.planning.search.places import Place
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.data_parallel import DataParallel
from keras_dist.strategies.derived.tensor_parallel import Solution, solve


class SearchSpace(NamedTuple):
    """The candidates with their distributions, what is known of each, and notes on what was left out."""

    candidates: dict[Candidate, Distribution]
    sizes: dict[Candidate, Sizes]
    notes: list[str]


def search_space(build_model: Any, step: str, strategies: Collection[str], place: Place, batch: Any) -> SearchSpace:
    """Returns the candidates for a step of a model, which `build_model` is or returns, and a global batch.

    Raises:
        NoCandidateError: The devices, the strategies and the kept axes leave none.
        ValueError: The model cannot be built or traced.
    """
    count = len(place.devices)
    with prepared_step(build_model, DataParallel(place.mesh({DATA: count})), batch, step) as prepared:
        solutions, notes = _solutions(strategies, place, prepared)
        found = enumerate_candidates(
            count, place.per_network, strategies, place.keep, _length(prepared), solutions.keys(), step == "train"
        )
        if not found:
            kept = ", ".join(f"{axis}:{size}" for axis, size in place.keep.items())
            raise NoCandidateError(
                f"No candidate is left for {place}: of the strategies {', '.join(strategies)}, none has a mesh"
                f"{f' with {kept}' if kept else ''}. Allow more strategies, or keep fewer axes."
            )
        distributions = _distributions(found, place, solutions, notes)
        workload = Workload(prepared, batch, place.hardware, solutions)
        sizes = {each: workload.sizes(each, distribution) for each, distribution in distributions.items()}
    strategies_left = {each.strategy for each in distributions}
    useless = [
        each
        for each in distributions
        if WITHOUT_SHARDED_STATE.get(each.strategy) in strategies_left and not sizes[each].shards_state
    ]
    for each in useless:
        del distributions[each], sizes[each]  # on every mesh the same as the other
    if useless:
        notes.append(
            f"Left out: {counted(len(useless), 'candidate')} of ZeRO-1, FSDP and HSDP that would shard nothing, "
            "because no weight is large enough, or has a dim that the axis divides."
        )
    if count == 1:
        notes.append("There is one device, so there is nothing to choose.")
    return SearchSpace(distributions, sizes, notes)


def _distributions(
    found: Iterable[Candidate], place: Place, solutions: Mapping[int, Solution], notes: list[str]
) -> dict[Candidate, Distribution]:
    """Returns the distributions of candidates, without those that cannot be or are the same as a simpler one."""
    mesh_of = functools.cache(place.mesh)
    made: dict[Candidate, Distribution] = {}
    errors: list[str] = []
    for each in found:
        device_mesh = mesh_of(each.axes)
        try:
            distribution = each.distribution(device_mesh, solutions.get(each.size(MODEL)))
        except ValueError as error:
            errors.append(f"{each}: {error}")
            continue
        simpler = made.get(replace(each, strategy=each.strategy.removesuffix("_sp")))
        if each.sequence_parallel and simpler is not None and simpler.layout_rules() == distribution.layout_rules():
            continue  # the model has no sequences to shard
        made[each] = distribution
    if not made:
        raise NoCandidateError(f"No candidate is left for {place}. {errors[0]}")
    if errors:
        notes.append(f"Left out: {counted(len(errors), 'candidate')} that cannot be created. {errors[0]}")
    return made


def _solutions(strategies: Collection[str], place: Place, prepared: Step) -> tuple[dict[int, Solution], list[str]]:
    """Returns what tensor parallelism shards, by the size of its axis, and notes if it has no rules for the model."""
    kept, most = place.keep.get(MODEL), place.per_network
    sizes = [size for size in range(2, most + 1) if most % size == 0 and kept in (None, size)]
    if not sizes or not any("tp" in name for name in strategies):
        return {}, []
    meshes = {size: place.mesh({DATA: len(place.devices) // size, MODEL: size}) for size in sizes}
    try:
        solved = {size: solve(prepared.model, mesh, MODEL, prepared.batch) for size, mesh in meshes.items()}
    except ValueError as error:
        return {}, [f"Tensor parallelism was not tried: {error}"]
    solutions = {size: solution for size, solution in solved.items() if solution.sharded_fraction > 0}
    if not solutions:
        return {}, ["Tensor parallelism was not tried: no weight of the model can be sharded by it."]
    return solutions, []


def _length(prepared: Step) -> int | None:
    """Returns the length of the sequences of a batch: dim 1 of tokens, or of vectors (rows, positions, features)."""
    for spec in jax.tree.leaves(prepared.batch[0]):
        is_tokens = len(spec.shape) == 2 and jax.numpy.issubdtype(spec.dtype, jax.numpy.integer)
        if (is_tokens or len(spec.shape) == 3) and spec.shape[1] > 1:
            return spec.shape[1]
    return None
