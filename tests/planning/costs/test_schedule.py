"""Walks through schedules written by hand, in which a cycle and 100 bytes on a link take a second each."""

import types

import pytest

from keras_dist.planning.costs.forecast import Forecast
from keras_dist.planning.costs.schedule import walk_schedule
from keras_dist.planning.hlo.module_costs import ModuleReader

AXES = {"data": 2, "model": 2}
GROUPS = {"data": "{{0,2},{1,3}}", "model": "{{0,1},{2,3}}"}


class Seconds:
    """Cycles and a hundredth of the bytes as seconds; collectives over one axis share a link."""

    def of_work(self, flops, memory_bytes, cycles=None, microseconds=None, is_attention=False):
        if cycles is not None:
            return cycles, True
        if microseconds is not None:
            return microseconds, True
        return sum(flops.values()) + memory_bytes / 100, False

    def of_collective(self, collective):
        return collective.wire_bytes / 100

    def of_copy(self, memory_bytes):
        return memory_bytes / 100

    def of_host_copy(self, host_bytes):
        return host_bytes / 100

    def links(self, collective):
        return collective.axes


class Instant(Seconds):
    """Memory takes no time, so that only cycles and links count."""

    def of_work(self, flops, memory_bytes, cycles=None, microseconds=None, is_attention=False):
        return (cycles, True) if cycles is not None else (0.0, False)

    def of_copy(self, memory_bytes):
        return 0.0


def module_of(*lines, others=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule step, num_partitions=4\n\n{others}\n\nENTRY %main (x: f32[100]) -> f32[100] {{\n{body}\n}}\n"


def walk(*lines, others="", times=None):
    text = module_of("%x = f32[100]{0} parameter(0)", *lines, others=others)
    return walked(ModuleReader(text, AXES), times or Instant())


def walked(reader, times, bound=0.0):
    """The fields of the forecast, and the times of the collectives."""
    forecast, collectives = walk_schedule(reader, times, bound)
    return types.SimpleNamespace(**vars(forecast), collectives=collectives)


def work(name, cycles, operand="x", root=""):
    return (
        f"{root}%{name} = f32[100]{{0}} fusion(%{operand}), kind=kLoop, calls=%fused, "
        f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    )


FUSED = """%fused (p: f32[100]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  ROOT %n = f32[100]{0} negate(%p)
}"""


def reduce(name, axis="data", operand="x", start=False):
    """An all-reduce of 400 bytes between 2 devices, of which each sends 400: 4 seconds."""
    opcode = "all-reduce-start" if start else "all-reduce"
    return (
        f"%{name} = f32[100]{{0}} {opcode}(%{operand}), channel_id=1, replica_groups={GROUPS[axis]}, to_apply=%add, "
        f'metadata={{op_name="jit(step)/{name}"}}'
    )


def done(name, of):
    return f"%{name} = f32[100]{{0}} all-reduce-done(%{of})"


END = "ROOT %end = f32[100]{0} bitcast(%x)"


class TestInOrder:
    def test_work_adds_up_and_nothing_is_exposed(self):
        found = walk(work("a", 3), work("b", 5), END, others=FUSED)
        assert (found.seconds, found.compute_seconds, found.estimated_seconds) == (8, 8, 8)
        assert (found.exposed_seconds, found.copy_seconds, dict(found.collectives)) == (0, 0, {})

    def test_only_what_the_compiler_estimated_counts_as_estimated(self):
        negate = "%b = f32[100]{0} negate(%x)"  # reads and writes 400 bytes
        found = walk(work("a", 3), negate, END, others=FUSED, times=Seconds())
        assert (found.compute_seconds, found.estimated_seconds) == (3 + 8, 3)

    def test_an_estimate_without_a_value_is_none(self):
        found = walk(work("a", 2**63 - 1), END, others=FUSED, times=Seconds())
        assert (found.compute_seconds, found.estimated_seconds) == (8, 0)

    @pytest.mark.parametrize(
        ("models", "seconds"),
        [
            ({"": 3.5}, 3.5),
            ({"": 3.5, "sol": 0.01}, 3.5),
            ({"": 4e6, "indexing-cost-model": 5.0, "sol": 0.01}, 5.0),
            ({"": 3.5, "experimental-gemm-cost-model": 30.0, "sol": 9.0}, 3.5),
        ],
    )
    def test_of_several_cost_models_the_least_counts_that_knows_all_work(self, models, seconds):
        costs = ",".join(
            f'{{"exec_time_us":{time},"compute_time_us":0,"name":"{name}"}}' for name, time in models.items()
        )
        config = f'backend_config={{"reification_cost":[{costs}],"operation_queue_id":"0"}}'
        fusion = f"%a = f32[100]{{0}} fusion(%x), kind=kCustom, calls=%fused, {config}"
        found = walk(fusion, END, others=FUSED, times=Seconds())
        assert (found.compute_seconds, found.estimated_seconds) == (seconds, seconds)

    def test_a_forecast_is_never_below_the_bound(self):
        reader = ModuleReader(module_of("%x = f32[100]{0} parameter(0)", work("a", 3), END, others=FUSED), AXES)
        forecasts = [walk_schedule(reader, Instant(), bound)[0] for bound in (1.0, 5.0)]
        assert forecasts == [Forecast(3, 3, 0, 0, 3), Forecast(5, 3, 0, 0, 3)]

    def test_a_synchronous_collective_is_exposed_in_full(self):
        found = walk(work("a", 3), reduce("r"), work("b", 2), END, others=FUSED)
        assert (found.seconds, found.compute_seconds, found.exposed_seconds) == (9, 5, 4)
        assert found.collectives == {"main/r": (4, 4)}

    def test_a_collective_is_no_faster_than_the_memory_that_it_moves(self):
        found = walk(reduce("r"), END, times=Seconds())
        assert found.collectives == {"main/r": (8, 8)}


class TestAsynchronous:
    def test_work_that_takes_longer_hides_a_collective(self):
        found = walk(reduce("r", start=True), work("a", 6), done("d", "r"), END, others=FUSED)
        assert (found.seconds, found.exposed_seconds) == (6, 0)
        assert found.collectives == {"main/r": (4, 0)}

    @pytest.mark.parametrize("cycles", [0, 1, 3, 4])
    def test_the_rest_of_a_collective_is_exposed(self, cycles):
        found = walk(reduce("r", start=True), work("a", cycles), done("d", "r"), work("b", 2), END, others=FUSED)
        assert (found.seconds, found.exposed_seconds) == (4 + 2, 4 - cycles)

    def test_two_on_one_link_run_one_after_another(self):
        found = walk(
            reduce("r", start=True),
            reduce("s", start=True),
            work("a", 5),
            done("d", "r"),
            done("e", "s"),
            END,
            others=FUSED,
        )
        assert (found.seconds, found.exposed_seconds) == (8, 3)
        assert found.collectives == {"main/r": (4, 0), "main/s": (4, 3)}

    def test_two_on_different_links_run_at_the_same_time(self):
        found = walk(
            reduce("r", "data", start=True),
            reduce("s", "model", start=True),
            work("a", 1),
            done("d", "r"),
            done("e", "s"),
            END,
            others=FUSED,
        )
        assert (found.seconds, found.exposed_seconds) == (4, 3)

    def test_waiting_for_a_later_one_counts_for_the_one_that_held_the_link(self):
        found = walk(reduce("r", start=True), reduce("s", start=True), done("e", "s"), done("d", "r"), END)
        assert found.collectives == {"main/r": (4, 4), "main/s": (4, 4)}
        assert found.exposed_seconds == 8

    def test_a_collective_that_nobody_waits_for_is_not_exposed(self):
        found = walk(reduce("r", start=True), END)
        assert (found.seconds, dict(found.collectives)) == (0, {"main/r": (4, 0)})

    def test_copies_share_the_memory_and_are_told_apart_from_collectives(self):
        copies = [f"%{n} = (f32[100]{{0:S(1)}}, f32[100]{{0}}, u32[]) copy-start(%x)" for n in ("c", "d")]
        ends = [f"%{n}.e = f32[100]{{0:S(1)}} copy-done(%{n})" for n in ("c", "d")]
        found = walk(*copies, work("a", 5), *ends, END, others=FUSED, times=Seconds())
        assert (found.seconds, found.copy_seconds, found.exposed_seconds) == (8, 3, 0)

    def test_copies_from_the_host_and_back_have_links_of_their_own(self):
        fetched = [f"%{n} = (f32[100]{{0}}, f32[100]{{0:S(5)}}, u32[]) copy-start(%h)" for n in ("c", "d")]
        put = "%p = (f32[100]{0:S(5)}, f32[100]{0}, u32[]) copy-start(%x)"
        ends = [f"%{n}.e = f32[100]{{0}} copy-done(%{n})" for n in ("c", "d")]
        ends.append("%p.e = f32[100]{0:S(5)} copy-done(%p)")
        host = "%h = f32[100]{0:S(5)} parameter(1)"
        found = walk(host, *fetched, put, work("a", 3), *ends, END, others=FUSED)
        assert (found.seconds, found.copy_seconds) == (8, 5)  # two of 4 seconds on one link
        found = walk(host, "%c = f32[100]{0} copy(%h)", work("a", 3), END, others=FUSED)
        assert (found.seconds, found.copy_seconds) == (7, 4)

    @pytest.mark.parametrize("opcode", ["async", "fusion"])
    def test_an_asynchronous_computation_begins_its_collective(self, opcode):
        called = (
            "%wrapped (q: f32[100]) -> f32[100] {\n  %q = f32[100]{0} parameter(0)\n  "
            + reduce("r", operand="q").replace("%r =", "ROOT %r =")
            + "\n}"
        )
        found = walk(
            f"%s = ((f32[100]{{0}}), f32[100]{{0}}, u32[]) {opcode}-start(%x), calls=%wrapped",
            work("a", 1),
            f"%d = f32[100]{{0}} {opcode}-done(%s)",
            END,
            others=FUSED + "\n\n" + called,
        )
        assert found.collectives == {"wrapped/r": (4, 3)}
        assert found.seconds == 4

    def test_a_transfer_between_slices_is_over_where_it_is_received(self):
        attributes = (
            'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
            '_xla_host_transfer_rendezvous="all-gather.1_0",_xla_megascale_target="{1,2}x{0:1}",'
            '_xla_megascale_transfer_type="ALL_GATHER"}'
        )
        text = module_of(
            "%x = f32[100]{0} parameter(0)",
            "%t = token[] after-all()",
            f"%s = (f32[100]{{0}}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true, {attributes}",
            f"%r = (f32[200]{{0}}, u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, {attributes}",
            work("a", 1),
            "%e = token[] send-done(%s), channel_id=1, is_host_transfer=true",
            "%d = (f32[200]{0}, token[]) recv-done(%r), channel_id=2, is_host_transfer=true",
            END,
            others=FUSED,
        ).replace("num_partitions=4", "num_partitions=2")
        reader = ModuleReader(text, AXES, networks=[0, 0, 1, 1])
        found = walked(reader, Instant())
        assert found.collectives == {"main/s": (4, 3)}  # 200 floats gathered from 2 slices: 400 bytes
        assert found.seconds == 4


class TestFragments:
    """TPUs spread one collective over fusions with the same `chain_id`."""

    ATTRIBUTES = (
        f'channel_id=7, replica_groups={GROUPS["data"]}, dimensions={{0}}, frontend_attributes={{chain_id="3"}}'
    )
    OTHERS = f"""%starts (p: f32[100]) -> (f32[100], f32[200], u32[]) {{
  %p = f32[100]{{0}} parameter(0)
  %g = f32[200]{{0}} all-gather(%p), {ATTRIBUTES}
  ROOT %c = (f32[100]{{0}}, f32[200]{{0}}, u32[]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%goes_on (p.1: f32[100]) -> f32[200] {{
  %p.1 = f32[100]{{0}} parameter(0)
  ROOT %g.1 = f32[200]{{0}} all-gather(%p.1), {ATTRIBUTES}
}}

%ends (p.2: f32[200]) -> f32[200] {{
  %p.2 = f32[200]{{0}} parameter(0)
  %g.2 = f32[200]{{0}} all-gather(%p.2), {ATTRIBUTES}
  ROOT %c.2 = f32[200]{{0}} custom-call(%g.2), custom_call_target="AsyncCollectiveDone"
}}
"""

    @pytest.mark.parametrize("cycles", [0, 1, 4, 9])
    def test_one_collective_lasts_from_its_start_to_its_last_fragment(self, cycles):
        found = walk(
            "%s = (f32[100]{0}, f32[200]{0}, u32[]) fusion(%x), kind=kCustom, calls=%starts",
            work("w", cycles).replace("calls=%fused", "calls=%goes_on"),
            "%g = f32[200]{0} get-tuple-element(%s), index=1",
            "%e = f32[200]{0} fusion(%g), kind=kCustom, calls=%ends",
            END,
            others=self.OTHERS,
        )
        assert found.compute_seconds == cycles
        assert found.collectives == {"starts/g": (4, max(0, 4 - cycles))}
        assert found.seconds == max(4, cycles)

    def test_fragments_without_a_start_begin_with_the_first(self):
        first = self.OTHERS.split("\n\n")[1].replace("goes_on", "first").replace(".1", ".5")
        found = walk(
            work("v", 1).replace("calls=%fused", "calls=%first"),
            work("w", 2).replace("calls=%fused", "calls=%goes_on"),
            END,
            others=first + "\n\n" + self.OTHERS.split("\n\n")[1],
        )
        assert found.collectives == {"first/g.5": (4, 1)}
        assert (found.seconds, found.compute_seconds) == (4, 3)

    def test_a_fused_collective_runs_while_its_fusion_computes(self):
        fused = FUSED.replace("ROOT %n = f32[100]{0} negate(%p)", reduce("n", operand="p").replace("%n", "ROOT %n", 1))
        found = walk(work("a", 3), END, others=fused)
        assert (found.seconds, found.compute_seconds, found.exposed_seconds) == (4, 3, 1)


LOOP = """%body (b: (s32[], f32[100])) -> (s32[], f32[100]) {
  %b = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[100]{0} get-tuple-element(%b), index=1
BODY
  ROOT %out = (s32[], f32[100]{0}) tuple(%next, %y)
}

%condition (c: (s32[], f32[100])) -> pred[] {
  %c = (s32[], f32[100]{0}) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant(LIMIT)
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}"""
BEFORE_LOOP = ("%zero = s32[] constant(0)", "%init = (s32[], f32[100]{0}) tuple(%zero, %x)")
WHILE = "%loop = (s32[], f32[100]{0}) while(%init), condition=%condition, body=%body"


def loop(*body, limit):
    lines = "\n".join(f"  {line}" for line in body)
    return FUSED + "\n\n" + LOOP.replace("BODY", lines).replace("LIMIT", str(limit))


class TestControlFlow:
    @pytest.mark.parametrize("trips", [0, 1, 2, 10])
    def test_a_loop_takes_its_trip_count_times_one_iteration(self, trips):
        body = reduce("r", operand="y", start=True), work("a", 3, "y"), done("d", "r")
        found = walk(*BEFORE_LOOP, WHILE, END, others=loop(*body, limit=trips))
        assert (found.seconds, found.compute_seconds) == (4 * trips, 3 * trips)
        assert found.collectives.get("body/r", (0, 0)) == (4 * trips, trips)

    def test_only_the_first_iteration_waits_for_what_began_before_the_loop(self):
        body = reduce("r", operand="y", start=True), work("a", 5, "y"), done("d", "r")
        found = walk(*BEFORE_LOOP, reduce("s", start=True), WHILE, done("e", "s"), END, others=loop(*body, limit=10))
        assert found.seconds == 8 + 9 * 5
        assert found.exposed_seconds == 3

    def test_a_nested_loop_multiplies(self):
        inner = loop(work("a", 3, "y"), limit=5)
        outer = (
            loop(
                "%z = s32[] constant(0)",
                "%start = (s32[], f32[100]{0}) tuple(%z, %y)",
                "%nested = (s32[], f32[100]{0}) while(%start), condition=%condition, body=%body",
                limit=7,
            )
            .replace("%body (", "%outer (")
            .replace("%condition (", "%until (")
        )
        found = walk(
            *BEFORE_LOOP,
            WHILE.replace("%condition", "%until").replace("%body", "%outer"),
            END,
            others=inner + "\n\n" + outer.removeprefix(FUSED),
        )
        assert found.seconds == 3 * 5 * 7

    def test_a_conditional_takes_the_branch_that_sends_most(self):
        branches = [
            f"%{name} (p{name}: f32[100]) -> f32[100] {{\n  %p{name} = f32[100]{{0}} parameter(0)\n  {line}\n}}"
            for name, line in (
                ("quiet", work("q", 50, "pquiet", "ROOT ")),
                ("loud", reduce("r", operand="ploud").replace("%r =", "ROOT %r =")),
            )
        ]
        found = walk(
            "%k = pred[] constant(false)",
            "%c = f32[100]{0} conditional(%k, %x, %x), true_computation=%quiet, false_computation=%loud",
            END,
            others="\n\n".join([FUSED, *branches]),
        )
        assert (found.seconds, found.exposed_seconds) == (4, 4)

    def test_a_called_computation_is_walked(self):
        called = "%called (p.9: f32[100]) -> f32[100] {\n  %p.9 = f32[100]{0} parameter(0)\n  " + work(
            "w", 6, "p.9", "ROOT "
        )
        found = walk("%c = f32[100]{0} call(%x), to_apply=%called", END, others=FUSED + "\n\n" + called + "\n}")
        assert found.seconds == 6
