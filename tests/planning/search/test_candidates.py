"""Which meshes and strategies are candidates, the distributions that they stand for, and the code that makes them."""

import dataclasses
import itertools
import math

import keras
import pytest
from support.strategy_models import transformer

import keras_dist as kd
from keras_dist.planning.search.candidates import CONTEXT_PARALLEL, STRATEGIES, enumerate_candidates
from keras_dist.strategies.derived.tensor_parallel import solve

ALL = (*STRATEGIES, CONTEXT_PARALLEL)


def candidates(devices=8, per_network=None, strategies=ALL, keep=None, length=128, model_sizes=(2, 4, 8)):
    return enumerate_candidates(devices, per_network or devices, strategies, keep or {}, length, model_sizes)


def meshes(found, strategy):
    return {tuple(each.axes.items()) for each in found if each.strategy == strategy}


def test_every_candidate_uses_all_devices_and_none_is_there_twice():
    for devices, per_network in [(1, 1), (6, 6), (8, 8), (16, 8), (64, 64), (512, 512)]:
        found = candidates(devices, per_network, model_sizes=range(2, devices + 1))
        assert all(math.prod(each.axes.values()) == devices for each in found)
        assert len(set(found)) == len(found)
        assert found == candidates(devices, per_network, model_sizes=range(2, devices + 1))


def test_all_strategies_have_candidates_and_the_simplest_is_first():
    found = candidates()
    assert {each.strategy for each in found} == set(STRATEGIES)
    assert found[0].label == "DP"
    assert dict(found[0].axes) == {"data": 8}
    assert meshes(found, "hsdp") == {(("replica", size), ("data", 8 // size)) for size in (2, 4)}
    without_context = {mesh for mesh in meshes(found, "tp") if "context" not in dict(mesh)}
    assert without_context == {(("data", 8 // size), ("model", size)) for size in (2, 4, 8)}
    assert any(each.regathers for each in found if each.strategy == "fsdp_tp_sp")


def test_one_device_has_one_candidate():
    assert [str(each) for each in candidates(1)] == ["DP on data:1"]


@pytest.mark.parametrize(("length", "sizes"), [(None, {1}), (12, {1, 2, 4}), (128, {1, 2, 4, 8}), (7, {1})])
def test_sequences_are_sharded_where_their_length_allows_it(length, sizes):
    assert {each.size("context") for each in candidates(length=length)} == sizes


def test_axes_that_communicate_most_stay_within_a_slice_or_host():
    found = candidates(16, per_network=4, model_sizes=(2, 4, 8, 16))
    assert max(each.size("context", "model") for each in found) == 4
    # Weights may be gathered within each of the four slices, or across them.
    assert (("replica", 4), ("data", 4)) in meshes(found, "hsdp")
    assert (("data", 16),) in meshes(found, "fsdp")
    assert (("replica", 4), ("data", 2), ("model", 2)) in meshes(found, "fsdp_tp")


def test_axes_can_be_kept():
    for keep in ({"data": 4}, {"model": 2, "context": 1}, {"data": 1}, {"replica": 2}):
        found = candidates(keep=keep)
        assert found
        assert all(each.size(axis) == size for each in found for axis, size in keep.items())
        others = [each for each in candidates() if all(each.size(axis) == size for axis, size in keep.items())]
        assert others == [each for each in found if each in others]
        assert others == found or "replica" in keep
    # Replicas that are kept combine with the axes within a slice or host, also if there is only one.
    assert meshes(candidates(keep={"replica": 2, "model": 2}), "fsdp_tp") == {
        (("replica", 2), ("data", 2), ("model", 2)),
    }


def test_weights_are_gathered_again_for_a_backward_pass_only():
    found = enumerate_candidates(8, 8, ALL, {}, 128, (2, 4, 8), is_training=False)
    assert [each for each in candidates() if not each.regathers] == found


def test_strategies_can_be_chosen():
    assert {each.label for each in candidates(strategies=("dp", "tp"))} == {"DP", "TP"}
    assert {each.label for each in candidates(strategies=("dp", "cp"))} == {"DP", "DP + CP"}
    assert candidates(strategies=("hsdp",), devices=2) == []


def test_source_makes_the_same_distribution():
    """One mesh for each strategy, with and without context parallelism, and with experts that are sharded."""
    with kd.deferred():
        model = transformer()
    chosen = {}
    for each in candidates(length=8, model_sizes=(2,)):
        chosen.setdefault(each.label, each)
    assert len(chosen) == 2 * 12 - 2  # within one host, HSDP does not combine with context parallelism
    chosen["FSDP + EP"] = dataclasses.replace(chosen["FSDP"], expert_axis="data")
    assert chosen["FSDP + EP"].label == "FSDP + EP"
    for candidate in chosen.values():
        mesh = kd.create_device_mesh(dict(candidate.axes))
        solution = solve(model, mesh, "model", None) if "model" in candidate.axes else None
        made = candidate.distribution(mesh, solution)
        namespace = {}
        axes = ",".join(f"{axis}:{size}" for axis, size in candidate.axes.items())
        exec(candidate.to_source(made, f'kd.create_device_mesh("{axes}")'), namespace)
        again = namespace["distribution"]
        assert type(again) is type(made)
        assert repr(again) == repr(made)
        assert again.layout_rules() == made.layout_rules()
        for variable, other in itertools.product(model.weights[:4], (made, again)):
            assert other.get_variable_layout(variable) == made.get_variable_layout(variable)
            assert other.get_update_layout(variable) == made.get_update_layout(variable)
        for shape in ((16, 8), (16, 8, 4)):
            assert again.get_data_layout(shape) == made.get_data_layout(shape)
        assert again.reshard_after_forward == candidate.regathers
        assert again.expert_dim_name == candidate.expert_axis


def test_rules_are_those_of_tensor_parallel_layout_map():
    with kd.deferred():
        model = transformer()
    [candidate, *_] = candidates(strategies=("tp_sp",), keep={"model": 4})
    mesh = kd.create_device_mesh(dict(candidate.axes))
    made = candidate.distribution(mesh, solve(model, mesh, "model", None))
    expected = kd.tensor_parallel_layout_map(model, mesh, sequence_parallel=True)
    assert dict(made.layout_rules()) == {pattern: layout.axes for pattern, layout in expected.items()}
    assert isinstance(made, keras.distribution.ModelParallel)
