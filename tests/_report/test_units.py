"""Figures are formatted with three significant digits."""

from keras_dist._report.units import bytes_text, count_text, counted, flops_text, percent_text, seconds_text

GIB = 2**30


def test_figures_have_three_significant_digits():
    assert [bytes_text(n) for n in (0, 1, 999, 1000, 1024, 15.75 * GIB, 2**50)] == (
        ["0 B", "1 B", "999 B", "0.977 KiB", "1 KiB", "15.8 GiB", "1 PiB"]
    )
    assert [count_text(n) for n in (0, 999, 1000, 217_123_456, 2.5)] == ["0", "999", "1 k", "217 M", "2.50"]
    assert [flops_text(n) for n in (0, 999.7e12, 3e21)] == ["0 FLOP", "1.00 PFLOP", "3000 EFLOP"]
    assert [seconds_text(s) for s in (0.0, 1e-9, 9.996e-4, 0.9994, 1234.5)] == (
        ["0 s", "0.001 us", "1.00 ms", "999 ms", "1234 s"]
    )
    assert [percent_text(p) for p in (0, 1e-5, 0.001, 0.5, 2.344)] == ["0%", "<0.1%", "0.100%", "50%", "234%"]


def test_a_count_has_its_noun_in_the_plural_unless_it_is_one():
    nouns = ["device", "axis", "batch", "process", "entry", "array", "NVIDIA GPU", "large constant", "index"]
    assert [counted(1, noun) for noun in nouns] == [f"1 {noun}" for noun in nouns]
    assert [counted(2, noun).removeprefix("2 ") for noun in nouns] == (
        ["devices", "axes", "batches", "processes", "entries", "arrays", "NVIDIA GPUs", "large constants", "indexes"]
    )
    assert [counted(n, "row", "fits", "fit") for n in (0, 1, 2)] == ["0 rows fit", "1 row fits", "2 rows fit"]
    assert [counted(n, "second") for n in (1.0, 2.5, 600.0, "1", "1 of 8")] == (
        ["1 second", "2.5 seconds", "600 seconds", "1 second", "1 of 8 seconds"]
    )
