"""What reports are made of."""

from keras_dist._report.tables import Table


def test_a_cell_may_have_several_lines_and_figures_stand_on_the_right():
    text = Table(("name", ">figure"), [("a\nb", "1"), ("long name", "100")], ("sum", "101")).to_text()
    assert [line for line in text.split("\n") if "─" not in line] == [
        "name       figure",
        "a               1",
        "b",
        "long name     100",
        "sum           101",
    ]
