"""Every form in which XLA prints a collective, with its bytes and groups."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hlo_text import collectives_of, module_of, read_module

from keras_dist.planning.hlo.collectives import wire_bytes
from keras_dist.planning.hlo.megascale import parse_target, slices_of


class TestCollectiveForms:
    X = "%x = f32[256]{0} parameter(0)"

    @pytest.mark.parametrize(
        ("instruction", "kind", "size", "wire", "dtype"),
        [
            ("f32[256]{0} all-reduce-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}", "all-reduce", 1024, 1536, "f32"),
            ("(f32[256]{0}, f32[1024]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}",
             "all-gather", 4096, 3072, "f32"),
            ("((f32[256]{0}), f32[64]{0}) reduce-scatter-start(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}",
             "reduce-scatter", 1024, 768, "f32"),
            ("((f32[256]{0}), f32[256]{0}) all-to-all-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}",
             "all-to-all", 1024, 768, "f32"),
            ("f32[256]{0} collective-broadcast(%x), replica_groups={{0,1,2,3},{4,5,6,7}}",
             "collective-broadcast", 1024, 1024, "f32"),
        ],
        ids=["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"],
    )  # fmt: skip
    def test_asynchronous_start_and_done_count_once(self, instruction, kind, size, wire, dtype):
        opcode = instruction.split("(%x)")[0].split()[-1]
        end = opcode.removesuffix("-start") + "-done" if opcode.endswith("-start") else "copy"
        [found] = collectives_of(
            self.X, f"%c = {instruction}", f"ROOT %d = f32[256]{{0}} {end}(%c)", axes={"a": 2, "b": 4}
        )
        assert (found.kind, found.bytes, found.wire_bytes, found.dtype) == (kind, size, wire, dtype)
        assert (found.axes, found.group_size, found.name) == (("b",), 4, "c")

    def test_collective_permute_start_with_context(self):
        [found] = collectives_of(
            self.X,
            "%s = (f32[256]{0}, f32[256]{0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), "
            "source_target_pairs={{0,1},{1,0},{2,2}}",
            "ROOT %d = f32[256]{0} collective-permute-done(%s)",
            axes={"x": 8},
        )
        assert (found.bytes, found.wire_bytes, found.groups) == (1024, 1024, ((0, 1), (1, 0), (2, 2)))

    def test_permute_of_each_device_to_itself_sends_nothing(self):
        [found] = collectives_of(
            self.X,
            "ROOT %c = f32[256]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
            axes={"x": 8},
        )
        assert (found.bytes, found.wire_bytes, found.axes) == (1024, 0, ())

    def test_send_with_source_target_pairs_is_a_permute(self):
        [found] = collectives_of(
            self.X,
            "%t = token[] after-all()",
            "%s = (f32[256]{0}, u32[], token[]) send(%x, %t), channel_id=1, "
            'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}',
            "ROOT %d = token[] send-done(%s), channel_id=1",
            axes={"x": 8},
        )
        assert (found.kind, found.bytes, found.groups) == ("collective-permute", 1024, ((0, 1), (1, 2)))

    def sent(self, attributes, networks=(0, 0, 1, 1), ids=None):
        lines = [
            self.X,
            "%t = token[] after-all()",
            f"%s = (f32[256]{{0}}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true, {attributes}",
            "%d = token[] send-done(%s), channel_id=1, is_host_transfer=true",
            f"%r = (f32[256]{{0}}, u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, {attributes}",
            "ROOT %e = (f32[256]{0}, token[]) recv-done(%r), channel_id=2, is_host_transfer=true",
        ]
        return read_module(module_of(*lines, devices=2), {"slice": 2, "chip": 2}, networks, ids)

    MEGASCALE = '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="psum.7_0"'

    @pytest.mark.parametrize(
        ("kind", "expected", "size", "wire"),
        [
            ("ALL_REDUCE", "all-reduce", 1024, 1024),
            ("ALL_GATHER", "all-gather", 2048, 1024),
            ("REDUCE_SCATTER", "reduce-scatter", 1024, 512),
            ("ALL_TO_ALL", "all-to-all", 1024, 512),
        ],
    )
    @pytest.mark.parametrize("target", ['"{1,2}x{0:1}"', "{{100000,200000},{100001,200001}}"])
    def test_send_to_other_slices_is_a_collective(self, kind, expected, size, wire, target):
        attributes = f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"'
        costs = self.sent(f"frontend_attributes={{{self.MEGASCALE},{attributes}}}")
        [found] = costs.collectives
        assert (found.kind, found.bytes, found.wire_bytes, found.count) == (expected, size, wire, 1)
        assert (found.axes, found.groups, found.group_size) == (("slice",), ((0, 2), (1, 3)), 2)
        assert costs.memory_bytes == 2 * 1024
        assert costs.largest_values == ()

    def test_one_to_one_send_to_another_slice_is_a_permute(self):
        pairs = "{{100000->200001},{200001->100001}}"
        attributes = f'_xla_megascale_transfer_type="ONE_TO_ONE",_xla_megascale_target={pairs}'
        [found] = self.sent(f"frontend_attributes={{{self.MEGASCALE},{attributes}}}").collectives
        assert (found.kind, found.wire_bytes, found.group_size) == ("collective-permute", 1024, 2)
        assert (found.axes, found.groups) == (("slice", "chip"), ((0, 3), (3, 1)))

    def test_megascale_ids_outside_the_mesh_give_no_groups(self):
        attributes = '_xla_megascale_target="{1,2}x{2:3}",_xla_megascale_transfer_type="ALL_REDUCE"'
        [found] = self.sent(f"frontend_attributes={{{self.MEGASCALE},{attributes}}}").collectives
        assert (found.groups, found.axes, found.group_size, found.wire_bytes) == ((), None, 2, 1024)
        ids = [100002, 100003, 200002, 200003]
        [found] = self.sent(f"frontend_attributes={{{self.MEGASCALE},{attributes}}}", ids=ids).collectives
        assert (found.groups, found.axes) == (((0, 2), (1, 3)), ("slice",))

    @pytest.mark.parametrize(
        "attributes",
        [
            '_xla_host_transfer_handler_name="xla_host_callback",_xla_host_transfer_rendezvous="print_0"',
            f'{MEGASCALE},_xla_megascale_ragged_operand_index="2",_xla_megascale_target="{{1,2}}x{{0:1}}",'
            '_xla_megascale_transfer_type="RAGGED_ALL_TO_ALL"',
        ],
        ids=["a callback", "the sizes of a ragged exchange"],
    )
    def test_other_sends_are_not_collectives(self, attributes):
        assert self.sent(f"frontend_attributes={{{attributes}}}").collectives == ()

    @pytest.mark.parametrize(
        ("text", "groups"),
        [
            ("{2,1}x{0:1}", ((200000, 100000), (200001, 100001))),
            ("{1,2,3}x{1}", ((100001, 200001, 300001),)),
            ("{1,2}x{0,2:3}", ((100000, 200000), (100002, 200002), (100003, 200003))),
            ("{{100000,100001,200000}}", ((100000, 100001, 200000),)),
        ],
    )
    def test_formats_of_megascale_targets(self, text, groups):
        assert parse_target(text) == groups

    @pytest.mark.parametrize(
        ("networks", "ids", "places"),
        [
            ((0, 0, 1, 1), None, (0, 1, 2, 3)),
            ((0, 1, 0, 1), None, (0, 2, 1, 3)),
            ((0, 0, 1, 1), (1, 0, 2, 3), (1, 0, 2, 3)),
            ((1, 1, 0, 0), (200000, 200001, 100001, 100000), (3, 2, 0, 1)),
        ],
        ids=["in order", "taking turns", "with ids of another numbering", "with ids"],
    )
    def test_positions_of_megascale_ids(self, networks, ids, places):
        assert slices_of(2, networks, ids).of_ids(((100000, 100001, 200000, 200001),)) == (places,)

    def test_hosts_that_run_one_module_share_partition_numbers(self):
        [found] = read_module(
            module_of(self.X, "ROOT %c = f32[256]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add"),
            {"host": 2, "chip": 4},
            [0, 0, 0, 0, 1, 1, 1, 1],
        ).collectives
        assert (found.axes, found.groups) == (("chip",), ((0, 1, 2, 3), (4, 5, 6, 7)))

    def test_async_start_with_a_called_computation(self):
        wrapped = (
            "%wrapped (p: f32[256]) -> f32[32] {\n"
            "  %p = f32[256]{0} parameter(0)\n"
            "  ROOT %inner = f32[32]{0} reduce-scatter(%p), replica_groups={}, dimensions={0}, to_apply=%add\n}\n"
        )
        [found] = collectives_of(
            self.X,
            "%s = ((f32[256]{0}), f32[32]{0}, u32[]) async-start(%x), calls=%wrapped, "
            'metadata={op_name="jit(f)/scatter"}',
            "%u = ((f32[256]{0}), f32[32]{0}, u32[]) async-update(%s), calls=%wrapped",
            "ROOT %d = f32[32]{0} async-done(%u), calls=%wrapped",
            computations=wrapped,
        )
        assert (found.kind, found.name, found.bytes, found.count) == ("reduce-scatter", "inner", 1024, 1)
        assert found.op_name == "jit(f)/scatter"
        assert found.axes is None

    def test_combined_tensors(self):
        [found] = collectives_of(
            self.X,
            "%y = bf16[2048]{0} parameter(1)",
            "ROOT %c = (f32[2048]{0}, bf16[16384]{0}) all-gather(%x, %y), replica_groups=[1,8]<=[8], dimensions={0}",
        )
        assert (found.tensors, found.bytes, found.dtype) == (2, 8 * (1024 + 4096), "bf16")

    def test_ragged_all_to_all_sends_at_most_its_input(self):
        [found] = collectives_of(
            self.X,
            "%s = s32[8]{0} parameter(1)",
            "ROOT %c = f32[256]{0} ragged-all-to-all(%x, %x, %s, %s, %s, /*index=5*/%s), replica_groups={}",
        )
        assert (found.kind, found.bytes, found.tensors) == ("ragged-all-to-all", 1024, 1)

    @pytest.mark.parametrize(("rows", "buffer"), [("x", "large"), ("large", "x")])
    def test_ragged_all_to_all_sends_rows_and_not_the_rest_of_a_buffer(self, rows, buffer):
        size = {"x": 256, "large": 320}[buffer]
        [found] = collectives_of(
            self.X,
            "%large = f32[320]{0} parameter(1)",
            "%s = s32[8]{0} parameter(2)",
            f"ROOT %c = f32[{size}]{{0}} ragged-all-to-all(%{rows}, %{buffer}, %s, %s, %s, %s), replica_groups={{}}",
        )
        assert (found.bytes, found.wire_bytes) == (1024, 896)

    REDUCE_SCATTER = (
        "%all-reduce-scatter (input: f32[256]) -> f32[32] {\n"
        "  %input = f32[256]{0} parameter(0)\n"
        "  %all-reduce.1 = f32[256]{0} all-reduce(%input), channel_id=1, replica_groups={}, to_apply=%add\n"
        "  %partition-id = u32[] partition-id()\n"
        "  ROOT %slice = f32[32]{0} dynamic-slice(%all-reduce.1, %partition-id), dynamic_slice_sizes={32}\n}\n"
    )

    def test_fusion_of_all_reduce_and_slice_is_a_reduce_scatter(self):
        [found] = collectives_of(
            self.X,
            'ROOT %f = f32[32]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter, metadata={op_name="jit(f)/dot"}',
            computations=self.REDUCE_SCATTER,
            axes={"x": 8},
        )
        assert (found.kind, found.bytes, found.wire_bytes) == ("reduce-scatter", 1024, 896)
        assert (found.axes, found.op_name) == (("x",), "jit(f)/dot")

    def test_all_reduce_and_slice_outside_a_fusion_is_an_all_reduce(self):
        [found] = collectives_of(
            self.X,
            "%r = f32[256]{0} all-reduce(%x), replica_groups={}, to_apply=%add",
            "%i = u32[] partition-id()",
            "ROOT %s = f32[32]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={32}",
        )
        assert (found.kind, found.wire_bytes) == ("all-reduce", 1792)

    @staticmethod
    def fragment(name, *end):
        """One of the fusions that a TPU spreads an all-gather of 1024 bytes over."""
        lines = "\n  ".join(end)
        return (
            f"%{name} (p.{name}: f32[32], q.{name}: f32[256]) -> f32[256] {{\n"
            f"  %p.{name} = f32[32]{{0}} parameter(0)\n  %q.{name} = f32[256]{{0}} parameter(1)\n"
            f"  %g.{name} = f32[256]{{0}} all-gather(%p.{name}), channel_id=5, replica_groups={{}}, dimensions={{0}}, "
            f'frontend_attributes={{chain_id="0"}}\n  {lines}\n}}\n'
        )

    START = 'ROOT %c = (f32[32]{0}, f32[256]{0}) custom-call(%g.first), custom_call_target="AsyncCollectiveStart"'
    MIDDLE = (
        "%mul = f32[256]{0} multiply(%q.second, %q.second)",
        "ROOT %t = (f32[256]{0}, f32[32]{0}, f32[256]{0}) tuple(%mul, %p.second, %g.second)",
    )
    DONE = 'ROOT %e = f32[256]{0} custom-call(%p.third, %q.third, %g.third), custom_call_target="AsyncCollectiveDone"'
    FRAGMENTS = (
        "%y = f32[32]{0} parameter(0)",
        "%z = f32[256]{0} parameter(1)",
        "%f1 = (f32[32]{0}, f32[256]{0}) fusion(%y, %z), kind=kLoop, calls=%first",
        "%y1 = f32[32]{0} get-tuple-element(%f1), index=0",
        "%z1 = f32[256]{0} get-tuple-element(%f1), index=1",
        "%f2 = (f32[256]{0}, f32[32]{0}, f32[256]{0}) fusion(%y1, %z), kind=kOutput, calls=%second",
        "%z2 = f32[256]{0} get-tuple-element(%f2), index=2",
        "ROOT %f3 = f32[256]{0} fusion(%y1, %z2), kind=kLoop, calls=%third",
    )

    def test_fragments_of_one_collective_count_once(self):
        parts = [("first", self.START), ("second", *self.MIDDLE), ("third", self.DONE)]
        text = module_of(*self.FRAGMENTS, computations="\n".join(self.fragment(*part) for part in parts))
        costs = read_module(text)
        assert [(each.kind, each.bytes, each.count) for each in costs.collectives] == [("all-gather", 1024, 1)]
        # The start reads the shard and writes what is gathered, the middle squares another tensor meanwhile.
        assert costs.memory_bytes == 128 + 1024 + 2 * 1024
        assert [value.name for value in costs.largest_values] == ["f1", "f2"]

    def test_chain_that_starts_twice_counts_twice(self):
        parts = [("first", self.START), ("second", *self.MIDDLE), ("third", self.DONE)]
        computations = "\n".join(self.fragment(*part) for part in parts)
        again = computations.replace("first", "fourth").replace("second", "fifth").replace("third", "sixth")
        entry = ["%y = f32[32]{0} parameter(0)", "%z = f32[256]{0} parameter(1)"]
        for name in ("first", "second", "third", "fourth", "fifth", "sixth"):
            entry.append(f"%f.{name} = f32[256]{{0}} fusion(%y, %z), kind=kLoop, calls=%{name}")
        found = collectives_of(*entry, computations=computations + again)
        assert [(each.bytes, each.count) for each in found] == [(1024, 1), (1024, 1)]

    def test_chain_without_a_start_counts_once(self):
        middle, later = self.fragment("second", *self.MIDDLE), self.fragment("second", *self.MIDDLE)
        found = collectives_of(
            "%y = f32[32]{0} parameter(0)",
            "%z = f32[256]{0} parameter(1)",
            "%f1 = (f32[256]{0}, f32[32]{0}, f32[256]{0}) fusion(%y, %z), kind=kOutput, calls=%second",
            "%f2 = (f32[256]{0}, f32[32]{0}, f32[256]{0}) fusion(%y, %z), kind=kOutput, calls=%later",
            computations=middle + later.replace("second", "later"),
        )
        assert [(each.bytes, each.count) for each in found] == [(1024, 1)]

    def test_mesh_format_with_device_ids_among_other_attributes(self):
        [found] = collectives_of(
            self.X,
            "ROOT %c = f32[256,4]{1,0} all-gather(%x), channel_id=1, replica_groups=mesh['a'=2,'b'=4], "
            "device_ids=(0,2,4,6,1,3,5,7) {'b'}, dimensions={0}, use_global_device_ids=true",
            axes={"a": 4, "b": 2},
        )
        assert (found.groups, found.axes, found.bytes) == (((0, 2, 4, 6), (1, 3, 5, 7)), ("a",), 4096)

    def test_permutes_of_a_windowed_einsum_are_part_of_its_all_gather(self):
        permute = 'collective-permute(%{}), source_target_pairs={{{{0,1}},{{1,0}}}}, metadata={{op_name="jit(f)/{}"}}'
        body = (
            "%windowed_dot_general_body_ag.1 (p: (f32[256])) -> (f32[256]) {\n"
            "  %p = (f32[256]{0}) parameter(0)\n  %t = f32[256]{0} get-tuple-element(%p), index=0\n"
            f"  %r = f32[256]{{0}} {permute.format('t', 'dot')}\n  ROOT %o = (f32[256]{{0}}) tuple(%r)\n}}\n"
            "%windowed_dot_general_cond_ag.1 (q: (f32[256])) -> pred[] {\n"
            "  %q = (f32[256]{0}) parameter(0)\n  ROOT %yes = pred[] constant(true)\n}\n"
        )
        found = collectives_of(
            self.X,
            f"%first = f32[256]{{0}} {permute.format('x', 'dot')}",
            f"%other = f32[256]{{0}} {permute.format('first', 'ppermute')}",
            "%tuple = (f32[256]{0}) tuple(%other)",
            "ROOT %loop = (f32[256]{0}) while(%tuple), condition=%windowed_dot_general_cond_ag.1, "
            'body=%windowed_dot_general_body_ag.1, backend_config={"known_trip_count":{"n":"3"}}',
            computations=body,
        )
        assert {each.name: (each.part_of, each.count) for each in found} == {
            "first": ("all-gather", 1),
            "other": (None, 1),
            "r": ("all-gather", 3),
        }


class TestWireBytes:
    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("all-reduce", 1500.0),
            ("all-gather", 750.0),
            ("reduce-scatter", 750.0),
            ("all-to-all", 750.0),
            ("collective-permute", 1000.0),
            ("collective-broadcast", 1000.0),
        ],
    )
    def test_wire_bytes_of_each_kind(self, kind, expected):
        assert wire_bytes(kind, 1000, 4) == expected

    @given(st.integers(1, 10**12), st.integers(1, 4096))
    @settings(max_examples=50, deadline=None)
    def test_all_reduce_equals_reduce_scatter_and_all_gather(self, size, group):
        parts = wire_bytes("reduce-scatter", size, group) + wire_bytes("all-gather", size, group)
        assert wire_bytes("all-reduce", size, group) == pytest.approx(parts)

    @pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "collective-broadcast", "all-to-all"])
    def test_group_of_one_sends_nothing(self, kind):
        assert wire_bytes(kind, 1000, 1) == 0
