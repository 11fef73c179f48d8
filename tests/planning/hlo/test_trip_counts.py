"""Trip counts of while loops."""

import pytest
from support.hlo_text import module_of, read_module

from keras_dist.mixtures.rounds import EXTRA_ROUNDS


class TestTripCounts:
    BODY = """
%body (p: (s32[], f32[256], s32[])) -> (s32[], f32[256], s32[]) {{
  %p = (s32[], f32[256]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %t = f32[256]{{0}} get-tuple-element(%p), index=1
  %k = s32[] get-tuple-element(%p), index=2
  %one = s32[] constant({step})
  %next = s32[] {operation}
  %r = f32[256]{{0}} all-reduce(%t), replica_groups={{}}, to_apply=%add
  ROOT %out = (s32[], f32[256]{{0}}, s32[]) tuple(%next, %r, {kept})
}}
%step (a: s32[], b: s32[]) -> s32[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %sum = s32[] add(%a, %b)
}}
%less (c: s32[], d: s32[]) -> pred[] {{
  %c = s32[] parameter(0)
  %d = s32[] parameter(1)
  ROOT %cmp.0 = pred[] compare(%c, %d), direction=LT
}}
%condition (q: (s32[], f32[256], s32[])) -> pred[] {{
  %q = (s32[], f32[256]{{0}}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant({limit})
  %carried = s32[] get-tuple-element(%q), index=2
  ROOT %cmp = pred[] {comparison}
}}
"""

    def computations(self, **options):
        defaults = {
            "step": 1,
            "limit": 10,
            "operation": "add(%i, %one)",
            "kept": "%k",
            "comparison": "compare(%j, %limit), direction=LT",
        }
        return self.BODY.format(**defaults | options)

    def count(self, first=0, carried=10, note="", start="%zero", **options):
        costs = read_module(
            module_of(
                f"%zero.0 = s32[] constant({first})",
                "%zero = s32[] copy(%zero.0)",
                f"%size = s32[] constant({carried})",
                "%x = f32[256]{0} parameter(0)",
                "%unknown = s32[] parameter(1)",
                f"%tuple = (s32[], f32[256]{{0}}, s32[]) tuple({start}, %x, %size)",
                "%loop = (s32[], f32[256]{0}, s32[]) while(%tuple), condition=%condition, body=%body" + note,
                "ROOT %y = f32[256]{0} get-tuple-element(%loop), index=1",
                computations=self.computations(**options),
            )
        )
        if costs.unknown_loops:
            assert [each.count for each in costs.collectives] == [1]
            return None
        return costs.collectives[0].count if costs.collectives else 0

    @pytest.mark.parametrize("config", ['{"known_trip_count":{"n":"7"}}', '{"a":{"b":1},"known_trip_count":{"n":"7"}}'])
    def test_known_trip_count_of_the_compiler(self, config):
        assert self.count(note=f", backend_config={config}") == 7

    def test_what_only_unbalanced_routing_needs_does_not_run(self):
        scope = f', metadata={{op_name="jit(f)/transpose(jvp({EXTRA_ROUNDS}))/while"}}'
        assert self.count(start="%unknown") is None
        assert self.count(start="%unknown", note=scope) == 0

    @pytest.mark.parametrize(
        ("direction", "first", "step", "limit"),
        [
            ("LT", 0, 1, 10), ("LT", 3, 4, 10), ("LE", 0, 1, 10), ("LE", 1, 3, 10), ("GT", 10, -1, 0),
            ("GE", 10, -3, 0), ("NE", 0, 2, 10), ("NE", 10, -5, 0), ("LT", 5, 1, 5), ("GT", 0, -1, 5),
        ],
    )  # fmt: skip
    def test_constant_bounds_count_like_a_python_loop(self, direction, first, step, limit):
        holds = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "NE": int.__ne__}[direction]
        runs, value = 0, first
        while holds(value, limit):
            runs, value = runs + 1, value + step
        comparison = f"compare(%j, %limit), direction={direction}"
        assert self.count(first=first, step=step, limit=limit, comparison=comparison) == runs

    @pytest.mark.parametrize(
        "options",
        [
            {"comparison": "compare(%limit, %j), direction=GT"},
            {"comparison": "fusion(%j, %limit), kind=kLoop, calls=%less"},
            {"comparison": "compare(%j, %carried), direction=LT", "carried": 10},
            {"comparison": "fusion(%j, %carried), kind=kLoop, calls=%less"},
            {"operation": "fusion(%i, %one), kind=kLoop, calls=%step"},
            {"operation": "subtract(%i, %one)", "step": -1},
            {"operation": "add(%one, %i)"},
            {"operation": "add(%i, %k)", "carried": 2, "limit": 20},
        ],
        ids=[
            "the limit on the left", "compared in a fusion", "a carried limit", "a carried limit in a fusion",
            "counted in a fusion", "a subtracted step", "the step on the left", "a carried step",
        ],
    )  # fmt: skip
    def test_counters_are_followed_through_tuples_copies_and_fusions(self, options):
        assert self.count(**options) == 10

    @pytest.mark.parametrize(
        "options",
        [
            {"start": "%unknown"},
            {"operation": "multiply(%i, %one)"},
            {"operation": "add(%i, %i)"},
            {"step": 0},
            {"step": -1},
            {"kept": "%next", "comparison": "compare(%j, %carried), direction=LT"},
            {"comparison": "and(%j, %limit)"},
        ],
        ids=[
            "an unknown start", "a product", "a doubling", "a step of 0", "a step away", "a limit that moves",
            "no comparison",
        ],
    )  # fmt: skip
    def test_unknown_trip_counts(self, options):
        assert self.count(**options) is None

    def test_computation_with_two_callers_has_unknown_parameters(self):
        computations = self.computations(
            operation="fusion(%i, %one), kind=kLoop, calls=%step",
            comparison="fusion(%j, %limit), kind=kLoop, calls=%less",
        )
        costs = read_module(
            module_of(
                "%zero = s32[] constant(0)",
                "%eight = s32[] constant(8)",
                "%x = f32[256]{0} parameter(0)",
                "%other = s32[] fusion(%eight, %eight), kind=kLoop, calls=%step",
                "%tuple = (s32[], f32[256]{0}, s32[]) tuple(%zero, %x, %eight)",
                "ROOT %loop = (s32[], f32[256]{0}, s32[]) while(%tuple), condition=%condition, body=%body",
                computations=computations,
            )
        )
        assert costs.unknown_loops == 1

    def test_long_chains_of_additions_end(self):
        # Each sum of the one before and itself: following every path would never end.
        sums = [f"%s{number} = s32[] add(%s{number - 1}, %s{number - 1})" for number in range(1, 3000)]
        costs = read_module(
            module_of(
                "%s0 = s32[] parameter(0)",
                *sums,
                "%x = f32[256]{0} parameter(1)",
                "%tuple = (s32[], f32[256]{0}, s32[]) tuple(%s2999, %x, %s150)",
                "ROOT %loop = (s32[], f32[256]{0}, s32[]) while(%tuple), condition=%condition, body=%body",
                computations=self.computations(
                    operation="add(%i, %k)", comparison="compare(%j, %carried), direction=LT"
                ),
            )
        )
        assert costs.unknown_loops == 1

    def test_unsigned_counters_that_count_down(self):
        computations = self.computations(
            step=4294967295, limit=0, comparison="compare(%j, %limit), direction=NE"
        ).replace("s32[]", "u32[]")
        costs = read_module(
            module_of(
                "%first = u32[] constant(6)",
                "%x = f32[256]{0} parameter(0)",
                "%tuple = (u32[], f32[256]{0}, u32[]) tuple(%first, %x, %first)",
                "ROOT %loop = (u32[], f32[256]{0}, u32[]) while(%tuple), condition=%condition, body=%body",
                computations=computations,
            )
        )
        assert [each.count for each in costs.collectives] == [6]
