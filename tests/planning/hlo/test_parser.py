import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dist.planning.hlo.megascale import parse_target, slices_of
from keras_dist.planning.hlo.module_costs import read_module
from keras_dist.planning.hlo.parser import parse_module
from keras_dist.planning.hlo.replica_groups import axes_of_groups, axes_of_pairs, parse_groups
from keras_dist.planning.hlo.shapes import Array, leaves, parse_shape


def module_of(*entry, computations="", devices=8):
    *others, last = entry
    root = "" if any(line.startswith("ROOT ") for line in entry) else "ROOT "
    lines = "\n".join(f"  {line}" for line in (*others, root + last))
    header = f"HloModule jit_f, is_scheduled=true, num_partitions={devices}"
    return f"{header}\n\n{computations}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n"


def collectives_of(*entry, axes=None, **options):
    return read_module(module_of(*entry, **options), axes).collectives


class TestShapes:
    @pytest.mark.parametrize(
        ("text", "dtype", "dims", "space", "size"),
        [
            ("f32[]", "f32", (), 0, 4),
            ("pred[3]{0}", "pred", (3,), 0, 3),
            ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", "bf16", (8, 128), 1, 2048),
            ("s4[5]{0:E(4)}", "s4", (5,), 0, 3),
            ("u4[8]{0}", "u4", (8,), 0, 4),
            ("f8e4m3fn[16,2]{1,0}", "f8e4m3fn", (16, 2), 0, 32),
            ("f4e2m1fn[16]{0}", "f4e2m1fn", (16,), 0, 8),
            ("c64[4]{0}", "c64", (4,), 0, 32),
            ("c128[4]{0}", "c128", (4,), 0, 64),
            ("s32[<=5,2]{1,0}", "s32", (5, 2), 0, 40),
            ("token[]", "token", (), 0, 0),
            ("f32[0,8]{1,0}", "f32", (0, 8), 0, 0),
        ],
        ids=lambda value: value if isinstance(value, str) and "[" in value else "",
    )
    def test_of_arrays(self, text, dtype, dims, space, size):
        array = parse_shape(text)
        assert isinstance(array, Array)
        assert (array.dtype, array.dims, array.space, array.bytes) == (dtype, dims, space, size)

    def test_tuples_of_tuples_keep_their_structure(self):
        shape = parse_shape("((f32[8]{0:T(128)}, bf16[2,3]{1,0}), s32[2], /*index=2*/(u32[]{:S(2)}), ())")
        assert isinstance(shape, tuple)
        assert [str(array) for array in leaves(shape)] == ["f32[8]", "bf16[2,3]", "s32[2]", "u32[]"]
        assert isinstance(shape[0], tuple)
        assert isinstance(shape[1], Array)
        assert shape[3] == ()

    @pytest.mark.parametrize(
        ("text", "stored"),
        [
            ("f32[8,100]{1,0:T(8,128)}", 8 * 128 * 4),
            ("f32[8,100]{0,1:T(8,128)}", 104 * 128 * 4),
            ("bf16[3,9,130]{2,1,0:T(8,128)(2,1)}", 3 * 16 * 256 * 2),
            ("f32[1000]{0:T(1024)}", 4096),
            ("f32[1000]{0}", 4000),
        ],
    )
    def test_tiles_pad_what_is_stored(self, text, stored):
        array = parse_shape(text)
        assert isinstance(array, Array)
        assert array.stored_bytes == stored

    @pytest.mark.parametrize("text", ["", "f32", "(f32[8]", "f32[8])"])
    def test_what_is_no_shape_is_refused(self, text):
        with pytest.raises(ValueError, match="HLO shape"):
            parse_shape(text)


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
    def test_are_read_in_every_syntax(self, text, groups):
        assert parse_groups(text, 4) == groups

    def test_a_part_in_the_middle_of_an_axis(self):
        # Of an axis of 8, the part of size 2 inside a part of size 2.
        assert parse_groups("mesh['a'=8] {'a':(2)2}", 8) == ((0, 2), (1, 3), (4, 6), (5, 7))

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def test_iotas_are_numpys_reshape_and_transpose(self, data):
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
    def test_groups_along_axes_name_those_axes(self, data):
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
    def test_groups_that_are_no_product_of_axes_have_none(self, groups):
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
    def test_groups_on_a_part_of_an_axis_are_on_that_axis(self, groups, axes):
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
    def test_parts_of_several_axes_go_each_with_each(self, groups, axes):
        assert axes_of_groups(groups, {"a": 4, "b": 2}) == axes

    def test_groups_of_one_are_on_no_axis(self):
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
    def test_pairs_are_on_the_axes_along_which_any_differ(self, pairs, axes):
        assert axes_of_pairs(pairs, {"a": 2, "one": 1, "b": 4}) == axes

    @pytest.mark.parametrize("text", ["0,1", "<=", "[2,2]<=2"])
    def test_another_syntax_is_refused(self, text):
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            parse_groups(text, 4)


class TestModules:
    def test_what_is_no_module_is_refused(self):
        with pytest.raises(ValueError, match="'nonsense'"):
            read_module("nonsense")

    def test_keys_in_names_and_configurations_are_no_attributes(self):
        module = parse_module(
            module_of(
                "%x = f32[8]{0} parameter(0)",
                'ROOT %y = f32[8]{0} add(%x, %x), metadata={op_name="f, calls=%g, index=7" source_file="a}b"}, '
                'backend_config={"calls":"x, body=%c"}',
            )
        )
        instruction = module.computations["main"].instructions["y"]
        assert (instruction.attribute("calls"), instruction.attribute("body")) == (None, None)
        assert instruction.op_name == "f, calls=%g, index=7"

    def test_operands_with_and_without_shapes(self):
        for operands in ("%x, %y", "f32[8,4] %x, /*index=1*/f32[4,2] %y"):
            text = module_of(
                "%x = f32[8,4]{1,0} parameter(0)",
                "%y = f32[4,2]{1,0} parameter(1)",
                f"ROOT %z = f32[8,2]{{1,0}} dot({operands}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
            )
            assert read_module(text).flops == 2 * 8 * 4 * 2

    def test_replicas_count_as_devices(self):
        text = module_of("ROOT %x = f32[] parameter(0)").replace(
            "num_partitions=8", "replica_count=2, num_partitions=4"
        )
        assert read_module(text).devices == 8


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
    def test_a_start_and_its_end_count_once(self, instruction, kind, size, wire, dtype):
        opcode = instruction.split("(%x)")[0].split()[-1]
        end = opcode.removesuffix("-start") + "-done" if opcode.endswith("-start") else "copy"
        [found] = collectives_of(
            self.X, f"%c = {instruction}", f"ROOT %d = f32[256]{{0}} {end}(%c)", axes={"a": 2, "b": 4}
        )
        assert (found.kind, found.bytes, found.wire_bytes, found.dtype) == (kind, size, wire, dtype)
        assert (found.axes, found.group_size, found.name) == (("b",), 4, "c")

    def test_a_permute_with_its_context(self):
        [found] = collectives_of(
            self.X,
            "%s = (f32[256]{0}, f32[256]{0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), "
            "source_target_pairs={{0,1},{1,0},{2,2}}",
            "ROOT %d = f32[256]{0} collective-permute-done(%s)",
            axes={"x": 8},
        )
        assert (found.bytes, found.wire_bytes, found.groups) == (1024, 1024, ((0, 1), (1, 0), (2, 2)))

    def test_a_permute_of_each_device_to_itself_sends_nothing(self):
        [found] = collectives_of(
            self.X,
            "ROOT %c = f32[256]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
            axes={"x": 8},
        )
        assert (found.bytes, found.wire_bytes, found.axes) == (1024, 0, ())

    def test_a_send_with_pairs_is_a_permute(self):
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
    def test_a_send_to_other_slices_is_a_collective_of_all_of_them(self, kind, expected, size, wire, target):
        attributes = f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"'
        costs = self.sent(f"frontend_attributes={{{self.MEGASCALE},{attributes}}}")
        [found] = costs.collectives
        assert (found.kind, found.bytes, found.wire_bytes, found.count) == (expected, size, wire, 1)
        assert (found.axes, found.groups, found.group_size) == (("slice",), ((0, 2), (1, 3)), 2)
        assert costs.devices == 4
        assert costs.memory_bytes == 2 * 1024
        assert costs.largest_values == ()

    def test_a_send_to_one_device_of_another_slice_is_a_permute(self):
        pairs = "{{100000->200001},{200001->100001}}"
        attributes = f'_xla_megascale_transfer_type="ONE_TO_ONE",_xla_megascale_target={pairs}'
        [found] = self.sent(f"frontend_attributes={{{self.MEGASCALE},{attributes}}}").collectives
        assert (found.kind, found.wire_bytes, found.group_size) == ("collective-permute", 1024, 2)
        assert (found.axes, found.groups) == (("slice", "chip"), ((0, 3), (3, 1)))

    def test_devices_that_are_not_in_the_mesh_make_no_groups(self):
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
    def test_a_send_of_something_else_is_no_collective(self, attributes):
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
    def test_the_ways_to_write_who_takes_part_in_a_transfer(self, text, groups):
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
    def test_devices_are_known_by_id_or_by_their_order_in_the_slice(self, networks, ids, places):
        assert slices_of(2, networks, ids).of_ids(((100000, 100001, 200000, 200001),)) == (places,)

    def test_hosts_that_run_one_module_together_have_one_numbering(self):
        [found] = read_module(
            module_of(self.X, "ROOT %c = f32[256]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add"),
            {"host": 2, "chip": 4},
            [0, 0, 0, 0, 1, 1, 1, 1],
        ).collectives
        assert (found.axes, found.groups) == (("chip",), ((0, 1, 2, 3), (4, 5, 6, 7)))

    def test_an_asynchronous_computation_is_followed(self):
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

    def test_combined_tensors_are_one_collective(self):
        [found] = collectives_of(
            self.X,
            "%y = bf16[2048]{0} parameter(1)",
            "ROOT %c = (f32[2048]{0}, bf16[16384]{0}) all-gather(%x, %y), replica_groups=[1,8]<=[8], dimensions={0}",
        )
        assert (found.tensors, found.bytes, found.dtype) == (2, 8 * (1024 + 4096), "bf16")

    def test_an_exchange_with_ragged_parts_sends_at_most_its_input(self):
        [found] = collectives_of(
            self.X,
            "%s = s32[8]{0} parameter(1)",
            "ROOT %c = f32[256]{0} ragged-all-to-all(%x, %x, %s, %s, %s, /*index=5*/%s), replica_groups={}",
        )
        assert (found.kind, found.bytes, found.tensors) == ("ragged-all-to-all", 1024, 1)

    REDUCE_SCATTER = (
        "%all-reduce-scatter (input: f32[256]) -> f32[32] {\n"
        "  %input = f32[256]{0} parameter(0)\n"
        "  %all-reduce.1 = f32[256]{0} all-reduce(%input), channel_id=1, replica_groups={}, to_apply=%add\n"
        "  %partition-id = u32[] partition-id()\n"
        "  ROOT %slice = f32[32]{0} dynamic-slice(%all-reduce.1, %partition-id), dynamic_slice_sizes={32}\n}\n"
    )

    def test_a_fusion_of_a_sum_and_a_slice_is_a_scattered_sum(self):
        [found] = collectives_of(
            self.X,
            'ROOT %f = f32[32]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter, metadata={op_name="jit(f)/dot"}',
            computations=self.REDUCE_SCATTER,
            axes={"x": 8},
        )
        assert (found.kind, found.bytes, found.wire_bytes) == ("reduce-scatter", 1024, 896)
        assert (found.axes, found.op_name) == (("x",), "jit(f)/dot")

    def test_a_sum_and_a_slice_of_their_own_are_a_sum(self):
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

    def test_the_fragments_of_one_collective_count_once(self):
        parts = [("first", self.START), ("second", *self.MIDDLE), ("third", self.DONE)]
        text = module_of(*self.FRAGMENTS, computations="\n".join(self.fragment(*part) for part in parts))
        costs = read_module(text)
        assert [(each.kind, each.bytes, each.count) for each in costs.collectives] == [("all-gather", 1024, 1)]
        # The start reads the shard and writes what is gathered, the middle squares another tensor meanwhile.
        assert costs.memory_bytes == 128 + 1024 + 2 * 1024
        assert [value.name for value in costs.largest_values] == ["f1", "f2"]

    def test_the_same_chain_started_twice_counts_twice(self):
        parts = [("first", self.START), ("second", *self.MIDDLE), ("third", self.DONE)]
        computations = "\n".join(self.fragment(*part) for part in parts)
        again = computations.replace("first", "fourth").replace("second", "fifth").replace("third", "sixth")
        entry = ["%y = f32[32]{0} parameter(0)", "%z = f32[256]{0} parameter(1)"]
        for name in ("first", "second", "third", "fourth", "fifth", "sixth"):
            entry.append(f"%f.{name} = f32[256]{{0}} fusion(%y, %z), kind=kLoop, calls=%{name}")
        found = collectives_of(*entry, computations=computations + again)
        assert [(each.bytes, each.count) for each in found] == [(1024, 1), (1024, 1)]

    def test_a_chain_without_a_start_counts_once(self):
        middle, later = self.fragment("second", *self.MIDDLE), self.fragment("second", *self.MIDDLE)
        found = collectives_of(
            "%y = f32[32]{0} parameter(0)",
            "%z = f32[256]{0} parameter(1)",
            "%f1 = (f32[256]{0}, f32[32]{0}, f32[256]{0}) fusion(%y, %z), kind=kOutput, calls=%second",
            "%f2 = (f32[256]{0}, f32[32]{0}, f32[256]{0}) fusion(%y, %z), kind=kOutput, calls=%later",
            computations=middle + later.replace("second", "later"),
        )
        assert [(each.bytes, each.count) for each in found] == [(1024, 1)]

    def test_a_mesh_with_device_ids_among_other_attributes(self):
        [found] = collectives_of(
            self.X,
            "ROOT %c = f32[256,4]{1,0} all-gather(%x), channel_id=1, replica_groups=mesh['a'=2,'b'=4], "
            "device_ids=(0,2,4,6,1,3,5,7) {'b'}, dimensions={0}, use_global_device_ids=true",
            axes={"a": 4, "b": 2},
        )
        assert (found.groups, found.axes, found.bytes) == (((0, 2, 4, 6), (1, 3, 5, 7)), ("a",), 4096)

    def test_the_permutes_of_a_windowed_einsum_are_part_of_its_gather_also_outside_the_loop(self):
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

    def count(
        self,
        first=0,
        step=1,
        limit=10,
        operation="add(%i, %one)",
        kept="%k",
        comparison="compare(%j, %limit), direction=LT",
        carried=10,
        note="",
        start="%zero",
    ):
        computations = self.BODY.format(step=step, operation=operation, kept=kept, limit=limit, comparison=comparison)
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
                computations=computations,
            )
        )
        if costs.unknown_loops:
            assert [each.count for each in costs.collectives] == [1]
            return None
        return costs.collectives[0].count if costs.collectives else 0

    @pytest.mark.parametrize("config", ['{"known_trip_count":{"n":"7"}}', '{"a":{"b":1},"known_trip_count":{"n":"7"}}'])
    def test_the_compilers_note_is_taken(self, config):
        assert self.count(note=f", backend_config={config}") == 7

    @pytest.mark.parametrize(
        ("direction", "first", "step", "limit"),
        [
            ("LT", 0, 1, 10), ("LT", 3, 4, 10), ("LE", 0, 1, 10), ("LE", 1, 3, 10), ("GT", 10, -1, 0),
            ("GE", 10, -3, 0), ("NE", 0, 2, 10), ("NE", 10, -5, 0), ("LT", 5, 1, 5), ("GT", 0, -1, 5),
        ],
    )  # fmt: skip
    def test_constants_are_counted_as_python_counts(self, direction, first, step, limit):
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
    def test_values_are_found_through_tuples_copies_and_fusions(self, options):
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
    def test_what_does_not_follow_is_unknown(self, options):
        assert self.count(**options) is None

    def test_a_computation_that_two_instructions_call_says_nothing_about_their_operands(self):
        computations = self.BODY.format(
            step=1,
            operation="fusion(%i, %one), kind=kLoop, calls=%step",
            kept="%k",
            limit=10,
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

    def test_long_chains_and_sums_of_sums_end(self):
        # Each sum of the one before and itself: following every path would never end.
        sums = [f"%s{number} = s32[] add(%s{number - 1}, %s{number - 1})" for number in range(1, 3000)]
        costs = read_module(
            module_of(
                "%s0 = s32[] parameter(0)",
                *sums,
                "%x = f32[256]{0} parameter(1)",
                "%tuple = (s32[], f32[256]{0}, s32[]) tuple(%s2999, %x, %s150)",
                "ROOT %loop = (s32[], f32[256]{0}, s32[]) while(%tuple), condition=%condition, body=%body",
                computations=self.BODY.format(
                    step=1,
                    operation="add(%i, %k)",
                    kept="%k",
                    limit=0,
                    comparison="compare(%j, %carried), direction=LT",
                ),
            )
        )
        assert costs.unknown_loops == 1

    def test_unsigned_counters_go_down(self):
        computations = self.BODY.format(
            step=4294967295,
            operation="add(%i, %one)",
            kept="%k",
            limit=0,
            comparison="compare(%j, %limit), direction=NE",
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


class TestFlopOfLibraryCalls:
    LEFT, RIGHT = "%a = bf16[4,128,256]{2,1,0} parameter(0)", "%b = bf16[4,256,512]{2,1,0} parameter(1)"

    @pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
    def test_cublas_matmuls_contract_what_their_configuration_says(self, target):
        costs = read_module(
            module_of(
                self.LEFT,
                self.RIGHT,
                f'%c = (f32[4,128,512]{{2,1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), custom_call_target="{target}", '
                'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
                '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}}}',
                "ROOT %d = f32[4,128,512]{2,1,0} get-tuple-element(%c), index=0",
            )
        )
        assert dict(costs.flops_by_dtype) == {"bf16": 2 * 4 * 128 * 256 * 512}
        assert costs.opaque_calls == ()

    @pytest.mark.parametrize(("left", "transposed"), [("f32[128,256]", "false"), ("f32[256,128]", "true")])
    def test_onednn_matmuls(self, left, transposed):
        costs = read_module(
            module_of(
                f"%a = {left}{{1,0}} parameter(0)",
                "%b = f32[256,512]{1,0} parameter(1)",
                'ROOT %c = f32[128,512]{1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul", '
                f'backend_config={{"onednn_matmul_config":{{"transpose_a":{transposed}}}}}',
            )
        )
        assert costs.flops == 2 * 128 * 256 * 512

    @pytest.mark.parametrize(
        ("target", "operands", "result"),
        [
            ("__cudnn$convForward", ("f32[2,16,16,8]", "f32[32,3,3,8]"), "f32[2,14,14,32]"),
            ("__cudnn$convBackwardInput", ("f32[2,14,14,32]", "f32[32,3,3,8]"), "f32[2,16,16,8]"),
            ("__cudnn$convBackwardFilter", ("f32[2,16,16,8]", "f32[2,14,14,32]"), "f32[32,3,3,8]"),
            ("__cudnn$convBiasActivationForward", ("f32[2,16,16,8]", "f32[32,3,3,8]"), "f32[2,14,14,32]"),
        ],
    )
    def test_cudnn_convolutions_and_their_gradients(self, target, operands, result):
        costs = read_module(
            module_of(
                f"%a = {operands[0]}{{3,2,1,0}} parameter(0)",
                f"%b = {operands[1]}{{3,2,1,0}} parameter(1)",
                f"ROOT %c = ({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3x3}}, "
                f'dim_labels=b01f_o01i->b01f, custom_call_target="{target}"',
            )
        )
        assert costs.flops == 2 * (2 * 14 * 14 * 32) * (3 * 3 * 8)

    def test_a_dot_that_a_tpu_writes_as_a_dilated_convolution(self):
        costs = read_module(
            module_of(
                "%a = f32[8,128,256]{2,1,0} parameter(0)",
                "%b = f32[8,256,512]{2,1,0} parameter(1)",
                "ROOT %c = f32[8,128,512]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, "
                "dim_labels=0bf_0io->0bf",
            )
        )
        assert costs.flops == 2 * 8 * 128 * 256 * 512

    @pytest.mark.parametrize("stride", [1, 2, 3, 4])
    @pytest.mark.parametrize("dilation", [1, 2, 4, 6])
    @pytest.mark.parametrize("pad", [-1, 0, 3])
    def test_a_window_counts_what_it_meets(self, stride, dilation, pad):
        image, kernel, kernel_dilation = 7, 4, 3
        spread = (image - 1) * dilation + 1 + 2 * pad - ((kernel - 1) * kernel_dilation + 1)
        result = spread // stride + 1 if spread >= 0 else 0
        met = sum(
            (place := out * stride + tap * kernel_dilation - pad) % dilation == 0
            and 0 <= place <= (image - 1) * dilation
            for out in range(result)
            for tap in range(kernel)
        )
        costs = read_module(
            module_of(
                f"%a = f32[2,{image},8]{{2,1,0}} parameter(0)",
                f"%b = f32[{kernel},8,5]{{2,1,0}} parameter(1)",
                f"ROOT %c = f32[2,{result},5]{{2,1,0}} convolution(%a, %b), window={{size={kernel} stride={stride} "
                f"pad={pad}_{pad} lhs_dilate={dilation} rhs_dilate={kernel_dilation}}}, dim_labels=b0f_0io->b0f",
            )
        )
        assert costs.flops == 2 * (2 * 8 * 5) * met

    def test_a_kernel_that_says_what_it_costs(self):
        call = 'ROOT %c = bf16[4,128,512]{2,1,0} custom-call(%a, %b), custom_call_target="tpu_custom_call"'
        config = (
            ", backend_config="
            '{"custom_call_config":{"body":"TUw=","cost_estimate":{"flops":"1000","bytes_accessed":"8"}}}'
        )
        costs = read_module(module_of(self.LEFT, self.RIGHT, call + config))
        assert (costs.flops, costs.opaque_calls) == (1000, ())

    def test_a_kernel_that_does_not_is_reported(self):
        call = 'ROOT %c = bf16[4,128,512]{2,1,0} custom-call(%a, %b), custom_call_target="tpu_custom_call"'
        costs = read_module(module_of(self.LEFT, self.RIGHT, call))
        assert (costs.flops, costs.opaque_calls) == (0, ("tpu_custom_call",))


class TestMemoryOfInstructions:
    def test_copies_between_vmem_and_memory_count_one_side(self):
        costs = read_module(
            module_of(
                "%x = f32[1024]{0:T(1024)} parameter(0)",
                "%s = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}) copy-start(%x)",
                "%v = f32[1024]{0:T(1024)S(1)} copy-done(%s)",
                "%w = f32[1024]{0:T(1024)S(1)} add(%v, %v)",
                "ROOT %y = f32[1024]{0:T(1024)} copy(%w)",
            )
        )
        assert costs.memory_bytes == 2 * 4096

    def test_a_gather_reads_the_rows_that_it_takes(self):
        costs = read_module(
            module_of(
                "%table = f32[50000,64]{1,0} parameter(0)",
                "%ids = s32[16,1]{1,0} parameter(1)",
                "ROOT %rows = f32[16,64]{1,0} gather(%table, %ids), offset_dims={1}, slice_sizes={1,64}",
            )
        )
        assert costs.memory_bytes == 2 * 16 * 64 * 4 + 16 * 4

    def test_an_update_in_place_writes_the_update(self):
        costs = read_module(
            module_of(
                "%array = f32[50000,64]{1,0} parameter(0)",
                "%row = f32[1,64]{1,0} parameter(1)",
                "%i = s32[] constant(3)",
                "ROOT %new = f32[50000,64]{1,0} dynamic-update-slice(%array, %row, %i, %i)",
            )
        )
        assert costs.memory_bytes == 2 * 64 * 4 + 2 * 4

    def test_a_scatter_reads_and_writes_the_rows_that_it_adds_to(self):
        costs = read_module(
            module_of(
                "%table = f32[50000,64]{1,0} parameter(0)",
                "%ids = s32[16,1]{1,0} parameter(1)",
                "%rows = f32[16,64]{1,0} parameter(2)",
                "ROOT %new = f32[50000,64]{1,0} scatter(%table, %ids, %rows), update_window_dims={1}, to_apply=%add",
            )
        )
        assert costs.memory_bytes == 2 * 16 * 64 * 4 + 16 * 4

    def test_what_a_fusion_passes_on_is_no_traffic(self):
        fused = (
            "%fused (p: f32[256], q: f32[256]) -> (f32[256], f32[256]) {\n"
            "  %p = f32[256]{0} parameter(0)\n  %q = f32[256]{0} parameter(1)\n  %n = f32[256]{0} negate(%q)\n"
            "  ROOT %t = (f32[256]{0}, f32[256]{0}) tuple(%p, %n)\n}\n"
        )
        costs = read_module(
            module_of(
                "%x = f32[256]{0} parameter(0)",
                "%y = f32[256]{0} parameter(1)",
                "ROOT %f = (f32[256]{0}, f32[256]{0}) fusion(%x, %y), kind=kLoop, calls=%fused",
                computations=fused,
            )
        )
        assert costs.memory_bytes == 2 * 1024

    def test_results_parameters_and_updates_are_no_large_values(self):
        costs = read_module(
            module_of(
                "%x = f32[1024,1024]{1,0} parameter(0)",
                '%y = f32[1024,512]{1,0} slice(%x), slice={[0:1024], [0:512]}, metadata={op_name="jit(f)/slice"}',
                "%z = f32[512]{0} parameter(1)",
                "%i = s32[] constant(3)",
                "%w = f32[1024,512]{1,0} dynamic-update-slice(%y, %z, %i, %i)",
                "%v = f32[1024,512]{1,0} bitcast(%w)",
                "%o = f32[1024,1024]{1,0} concatenate(%v, %v), dimensions={1}",
                "ROOT %t = (f32[1024,1024]{1,0}) tuple(%o)",
            )
        )
        [value] = costs.largest_values
        assert (value.bytes, value.shape, value.op_name, value.name) == (2**21, "f32[1024,512]", "jit(f)/slice", "y")


def test_a_fusion_that_is_started_and_done_is_a_fusion():
    text = """HloModule m, num_partitions=8

%fused (p0: f32[50,64,128], p1: s32[], p2: f32[8,64]) -> f32[50,64,128] {
  %p0 = f32[50,64,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[8,64]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %w = f32[64,128]{1,0} constant({...})
  %dot = f32[8,128]{1,0} dot(%p2, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %b = f32[1,8,128]{2,1,0} bitcast(%dot)
  ROOT %u = f32[50,64,128]{2,1,0} dynamic-update-slice(%p0, %b, %p1, %zero, %zero)
}

ENTRY %main (a: f32[50,64,128], i: s32[], x: f32[8,64]) -> f32[50,64,128] {
  %a = f32[50,64,128]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[8,64]{1,0} parameter(2)
  %s = ((f32[50,64,128]{2,1,0}, s32[]), f32[50,64,128]{2,1,0}, u32[]) fusion-start(%a, %i, %x), calls=%fused
  ROOT %d = f32[50,64,128]{2,1,0} fusion-done(%s)
}
"""
    costs = read_module(text)
    assert costs.flops == 2 * 8 * 64 * 128
    assert costs.memory_bytes == 4 + 8 * 64 * 4 + 8 * 128 * 4  # the index, x, and the update that is written
