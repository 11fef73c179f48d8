"""Instructions and attributes of HLO text."""

import pytest
from support.hlo_text import module_of, read_module

from keras_dist.planning.hlo.parser import parse_module


class TestModules:
    def test_text_without_a_module_raises(self):
        with pytest.raises(ValueError, match="'nonsense'"):
            read_module("nonsense")

    def test_attributes_are_not_searched_in_metadata_and_backend_config(self):
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

    def test_devices_are_replicas_times_partitions(self):
        text = module_of("ROOT %x = f32[] parameter(0)").replace(
            "num_partitions=8", "replica_count=2, num_partitions=4"
        )
        assert parse_module(text).devices == 8
