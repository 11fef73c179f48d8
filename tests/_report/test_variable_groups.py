"""Variables that are alike are one group, with one pattern for people and one regex for rules."""

import dataclasses
import math
import re

import pytest

from keras_dist._report.variable_groups import PlacedVariable, groups_of, path_pattern, path_regex


def variable(path, shape, axes, shard_shape, part="weights", rule=None):
    return PlacedVariable(path, part, shape, "float32", rule, axes, shard_shape, 4 * math.prod(shard_shape))


@pytest.mark.parametrize(
    ("paths", "pattern"),
    [
        (["head/kernel"], "head/kernel"),
        (["block0/kernel", "block1/kernel"], "block{0,1}/kernel"),
        ([f"block{n}/conv{n}/kernel" for n in range(3)], "block{0..2}/conv{0..2}/kernel"),
        (["dense/kernel", "dense_1/kernel", "dense_2/kernel", "dense_3/kernel"], "dense{,_1.._3}/kernel"),
        (["layer_9/a", "layer_10/a", "layer_11/a"], "layer_{9..11}/a"),
        ([f"layer_{n}/a" for n in range(0, 12, 2)], "layer_{0,2,..,10}/a"),
        (["adam/d_kernel_momentum", "adam/d_1_kernel_velocity"], "adam/d{,_1}_kernel_{momentum,velocity}"),
    ],
)
def test_paths_that_differ_in_parts_are_spelled_as_one(paths, pattern):
    assert path_pattern(paths) == pattern


@pytest.mark.parametrize(
    "other",
    [
        variable("b1/kernel", (8, 8), (None, None), (8, 8)),
        variable("b1/kernel", (8, 4), ("data", None), (4, 4)),
        variable("b1/kernel", (8, 4), (None, None), (8, 4), rule="b1.*"),
        variable("b1/bias", (8, 4), (None, None), (8, 4)),
        variable("b1/kernel", (8, 4), (None, None), (8, 4), part="other"),
    ],
    ids=["shape", "layout", "rule", "name", "part"],
)
def test_variables_that_differ_in_more_than_a_number_are_two_groups(other):
    first = variable("b0/kernel", (8, 4), (None, None), (8, 4))
    assert len(groups_of([first, dataclasses.replace(first, path="b7/kernel")])) == 1
    assert len(groups_of([first, other])) == 2


@pytest.mark.parametrize("path", ["", "/", "_", "a__b", "1/2", "_1", "a_1_2/b3c", "größe_2/核", "a/b/"])
def test_any_path_can_be_grouped_and_spelled(path):
    for part in ("weights", "optimizer"):
        [group] = groups_of([variable(path, (2,), (None,), (2,), part)] * 2)
        assert path_pattern([each.path for each in group]) == path


@pytest.mark.parametrize(
    ("paths", "others", "regex"),
    [
        (["head/kernel"], [], "head/kernel"),
        (["a.b-c/kernel"], ["aXb-c/kernel"], r"a\.b\-c/kernel"),
        ([f"block{n}/conv{n}/kernel" for n in range(3)], [], "block[0-9]+/conv[0-9]+/kernel"),
        (["dense/kernel", "dense_1/kernel"], ["dense_a/kernel"], "dense(_[0-9]+)?/kernel"),
        (["b/1/k", "b/2/k"], ["b/3/k"], "b/(1|2)/k"),
        (["dense/k", "dense_2/k"], ["dense_1/k"], "dense(|_2)/k"),
        (["res2a/k", "res3b/k"], [], "(res2a|res3b)/k"),
        (["a1/b1", "a2/b2"], ["a1/b2"], "a1/b1|a2/b2"),
    ],
)
def test_a_regex_matches_all_paths_and_none_of_the_others(paths, others, regex):
    assert path_regex(paths, others) == regex
    assert all(re.fullmatch(regex, path) for path in paths)
    assert not any(re.fullmatch(regex, path) for path in others)
