"""Shapes, their padding and their memory spaces."""

import pytest

from keras_dist.planning.hlo.shapes import Array, leaves, parse_shape


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
    def test_arrays(self, text, dtype, dims, space, size):
        array = parse_shape(text)
        assert isinstance(array, Array)
        assert (array.dtype, array.dims, array.space, array.bytes) == (dtype, dims, space, size)

    def test_nested_tuples(self):
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
    def test_stored_bytes_include_the_padding_of_tiles(self, text, stored):
        array = parse_shape(text)
        assert isinstance(array, Array)
        assert array.stored_bytes == stored

    @pytest.mark.parametrize("text", ["", "f32", "(f32[8]", "f32[8])"])
    def test_invalid_shapes_raise(self, text):
        with pytest.raises(ValueError, match="HLO shape"):
            parse_shape(text)
