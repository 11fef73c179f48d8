"""Variables of equal blocks are one group, with one readable pattern and one regex for rules."""

import dataclasses
import math
import re

import pytest

from keras_dist._report.variable_groups import (
    PlacedVariable,
    group_variables,
    path_pattern,
    path_regex,
    variable_rows,
)


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
def test_paths_that_differ_in_parts_are_merged_into_one_pattern(paths, pattern):
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
def test_variables_that_differ_in_more_than_numbers_are_two_groups(other):
    first = variable("b0/kernel", (8, 4), (None, None), (8, 4))
    assert len(group_variables([first, dataclasses.replace(first, path="b7/kernel")])) == 1
    assert len(group_variables([first, other])) == 2


@pytest.mark.parametrize("path", ["", "/", "_", "a__b", "1/2", "_1", "a_1_2/b3c", "größe_2/核", "a/b/"])
def test_any_path_can_be_grouped(path):
    for part in ("weights", "optimizer"):
        [group] = group_variables([variable(path, (2,), (None,), (2,), part)] * 2)
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
def test_path_regex_matches_all_paths_and_none_of_the_others(paths, others, regex):
    assert path_regex(paths, others) == regex
    assert all(re.fullmatch(regex, path) for path in paths)
    assert not any(re.fullmatch(regex, path) for path in others)


def rows_of(variables, most):
    return variable_rows(variables, {"weights": most, "optimizer": most, "other": most}, lambda v: v.rule or "")


def test_a_row_shows_the_rule_the_layout_and_the_shard_of_a_group():
    blocks = [variable(f"b{n}/kernel", (8, 4), (None, ("data", "model")), (8, 1), rule="b.*") for n in range(3)]
    [row] = rows_of(blocks, 4)
    assert row == ("b{0..2}/kernel\n  b.*", "3", "float32[8, 4]\n       [8, 1]", "(None, data+model)", "96 B")


def test_the_largest_groups_have_rows_and_the_rest_is_counted():
    names = ["a", "b", "c", "d"]
    weights = [variable(f"{name}/kernel", (n,), (None,), (n,)) for n, name in enumerate(names, 1)]
    assert [row[0] for row in rows_of(weights, 4)] == ["d/kernel", "c/kernel", "b/kernel", "a/kernel"]
    assert [row[0] for row in rows_of(weights, 3)] == ["d/kernel", "c/kernel", "b/kernel", "a/kernel"]
    assert rows_of(weights, 2)[2:] == [("... and 2 more weights, replicated", "", "", "", "12 B")]
    weights[0] = variable("a/kernel", (1,), ("data",), (1,))
    assert rows_of(weights, 2)[2][0] == "... and 2 more weights, 1 of them replicated"


def test_bookkeeping_scalars_have_no_rows_of_their_own():
    moments = [variable(f"adam/kernel_{name}", (8,), (None,), (8,), "optimizer") for name in ("momentum", "velocity")]
    scalars = [variable(f"adam/{name}", (), (), (), "optimizer") for name in ("iteration", "learning_rate")]
    losses = [
        variable("loss/total", (), (), (), "other"),
        variable("seed_generator_state", (2,), (None,), (2,), "other"),
    ]
    scale = [variable("scale", (), (), ())]
    assert [row[0] for row in rows_of([*scalars, *moments, *losses, *scale], 4)] == [
        "scale",
        "adam/kernel_{momentum,velocity}",
        "... and 2 more optimizer variables, replicated",
        "... and 2 other variables, replicated",
    ]
    sharded = variable("seed_generator_state", (2,), ("data",), (1,), "other")
    assert [row[0] for row in rows_of([sharded, losses[0]], 4)] == [
        "seed_generator_state",
        "... and 1 other variable, replicated",
    ]
