"""Formats of replica groups, and the mesh axes that they follow."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dist.planning.hlo.replica_groups import axes_of_groups, axes_of_pairs, parse_groups


class TestGroups:
    @pytest.mark.parametrize(
        ("text", "groups"),
        [
            ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
            ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
            ("{}", ((0, 1, 2, 3),)),
            ("[2,2]<=[4]", ((0, 1), (2, 3))),
            ("[1,4]<=[4]", ((0, 1, 2, 3),)),
            ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
            ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
            ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
            ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
            ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
            ("mesh[a=2,b=2] {b}", ((0, 1), (2, 3))),
            ("mesh['a'=4,'b'=1] {'b'}", ((0,), (1,), (2,), (3,))),
            ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
            ("mesh['a'=2,'b'=2], device_ids=([2,2]<=[2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
            ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
            ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
            ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ],
    )
    def test_formats_of_replica_groups(self, text, groups):
        assert parse_groups(text, 4) == groups

    def test_sub_axis_in_the_middle_of_an_axis(self):
        # Of an axis of 8, the part of size 2 inside a part of size 2.
        assert parse_groups("mesh['a'=8] {'a':(2)2}", 8) == ((0, 2), (1, 3), (4, 6), (5, 7))

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def test_iota_equals_numpys_reshape_and_transpose(self, data):
        sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        order = data.draw(st.permutations(range(len(sizes))))
        total = int(np.prod(sizes))
        length = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
        expected = np.arange(total).reshape(sizes).transpose(order).reshape(-1, length)
        source, permutation = (",".join(map(str, numbers)) for numbers in (sizes, order))
        text = f"[{total // length},{length}]<=[{source}]T({permutation})"
        assert parse_groups(text, total) == tuple(map(tuple, expected.tolist()))

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def test_groups_along_axes(self, data):
        sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        axes = {f"axis{number}": size for number, size in enumerate(sizes)}
        chosen = [dim for dim in range(len(sizes)) if data.draw(st.booleans())]
        rest = [dim for dim in range(len(sizes)) if dim not in chosen]
        array = np.arange(np.prod(sizes)).reshape(sizes).transpose(*rest, *chosen)
        groups = array.reshape(-1, int(np.prod([sizes[dim] for dim in chosen], dtype=int)))
        shuffled = data.draw(st.permutations([tuple(data.draw(st.permutations(group))) for group in groups.tolist()]))
        expected = tuple(f"axis{dim}" for dim in chosen if sizes[dim] > 1)
        assert axes_of_groups(tuple(shuffled), axes) == expected
        listed = ",".join(f"'axis{dim}'" for dim in chosen)
        if chosen:
            mesh = ",".join(f"'{name}'={size}" for name, size in axes.items())
            assert parse_groups(f"mesh[{mesh}] {{{listed}}}", array.size) == tuple(map(tuple, groups.tolist()))

    @pytest.mark.parametrize(
        "groups",
        [
            ((0, 3), (1, 2), (4, 7), (5, 6)),
            ((0, 1), (2, 3), (4, 6), (5, 7)),
            ((0, 1),),
            ((0, 1, 2), (3, 4, 5), (6, 7)),
            ((8, 9),),
            ((0, 1, 2, 3, 4, 5, 6), (7,)),
        ],
        ids=str,
    )
    def test_groups_that_follow_no_axes(self, groups):
        assert axes_of_groups(groups, {"a": 2, "b": 2, "c": 2}) is None

    @pytest.mark.parametrize(
        ("groups", "axes"),
        [
            (((0, 1, 2, 3), (4, 5, 6, 7)), ("a",)),
            (((0, 4), (1, 5), (2, 6), (3, 7)), ("a",)),
            (((0, 2, 4, 6), (1, 3, 5, 7)), ("a",)),
            (((0, 2), (1, 3), (4, 6), (5, 7)), ("a",)),
            (((0, 5), (1, 2), (3, 7), (4, 6)), ("a",)),
            (((0, 1, 2), (3, 4, 5), (6, 7)), None),
        ],
        ids=str,
    )
    def test_groups_that_span_a_part_of_an_axis(self, groups, axes):
        assert axes_of_groups(groups, {"a": 8}) == axes

    @pytest.mark.parametrize(
        ("groups", "axes"),
        [
            (((0, 1, 2, 3), (4, 5, 6, 7)), ("a", "b")),
            (((0, 2), (1, 3), (4, 6), (5, 7)), ("a",)),
            (((0, 3), (1, 2), (4, 7), (5, 6)), None),
            (((0, 1), (2, 3), (4, 6), (5, 7)), None),
        ],
        ids=str,
    )
    def test_groups_that_span_parts_of_several_axes(self, groups, axes):
        assert axes_of_groups(groups, {"a": 4, "b": 2}) == axes

    def test_groups_of_one_device(self):
        assert axes_of_groups(((0,), (1,)), {"a": 2}) == ()

    @pytest.mark.parametrize(
        ("pairs", "axes"),
        [
            (((0, 1), (1, 2), (2, 3), (3, 0)), ("b",)),
            (((0, 4), (4, 0)), ("a",)),
            (((0, 5),), ("a", "b")),
            (((0, 1), (0, 4)), ("a", "b")),
            (((3, 3),), ()),
            (((0, 8),), None),
        ],
        ids=str,
    )
    def test_axes_of_source_target_pairs(self, pairs, axes):
        assert axes_of_pairs(pairs, {"a": 2, "one": 1, "b": 4}) == axes

    @pytest.mark.parametrize("text", ["0,1", "<=", "[2,2]<=2"])
    def test_unknown_formats_raise(self, text):
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            parse_groups(text, 4)
