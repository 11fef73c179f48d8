"""How plans print, from plans made by hand, so that every figure is known."""

import dataclasses
import html.parser
import math
import re

import pytest

import keras_dist as kd
from keras_dist._report.tables import WIDTH
from keras_dist.planning.compare import Comparison, compare
from keras_dist.planning.compilation import Traffic
from keras_dist.planning.hlo.module_costs import LargeValue
from keras_dist.planning.plan import Memory, Plan, PlannedVariable
from keras_dist.planning.report import as_html, as_text, picture
from keras_dist.planning.roofline import Roofline

KIB, MIB, GIB = 2**10, 2**20, 2**30
MEMORY = Memory(
    weights=2 * GIB,
    optimizer=4 * GIB,
    other=8,
    batch=64 * KIB,
    temporaries=3 * GIB,
    program=MIB,
    capacity=16 * GIB,
)


def variable(path, shape, axes, shard_shape, part="weights", rule=None):
    return PlannedVariable(path, part, shape, "float32", rule, axes, shard_shape, 4 * math.prod(shard_shape))


def block(number):
    yield variable(f"block{number}/mlp/kernel", (64, 256), ("data", "model"), (32, 64), rule="block.*/mlp/kernel")
    yield variable(f"block{number}/norm/scale", (64,), (None,), (64,))
    for slot in ("momentum", "velocity"):
        path = f"adam/block{number}_mlp_kernel_{slot}"
        yield variable(path, (64, 256), ("data", "model"), (32, 64), "optimizer", "block.*/mlp/kernel")


VARIABLES = tuple(v for number in range(12) for v in block(number))


def made(**changed) -> Plan:
    fields = {
        "model": "gpt",
        "step": "train",
        "target": "v5e",
        "mesh": kd.create_device_mesh("data:2,model:4"),
        "distribution": "<ModelParallel device_mesh=<DeviceMesh data:2 x model:4 on 8 cpu devices>>",
        "batch": ("int32[64, 1024]", {"labels": "int32[64]"}),
        "variables": VARIABLES,
        "memory": MEMORY,
        "fits": True,
        "traffic": (
            Traffic("all-reduce", ("data", "model"), 12.0, 40.0, 1.5 * GIB, 1.25 * GIB),
            Traffic("all-gather", None, 2.5, 3.0, 64 * MIB, 32 * MIB),
        ),
        "collectives": (),
        "flops": 1.25e12,
        "model_flops": 8e12,
        "memory_traffic": 4.0 * GIB,
        "roofline": Roofline(0.006, 0.003, 0.0015, 0.0),
        "model_flops_utilization": 0.425,
        "largest_values": (LargeValue(GIB, "f32[8,128]", "jit(train_step)/dot_general", "fusion.3"),),
        "notes": ("Loops count once.",),
        "compile_seconds": 12.5,
    }
    return Plan(**{**fields, **changed})


def section(text: str, title: str) -> list[str]:
    """The lines under a title."""
    lines = text.split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{title} ─"))
    return [*lines[start + 1 :], ""][: [*lines[start + 1 :], ""].index("")]


def row(text: str, title: str, label: str) -> list[str]:
    """The words of the row with a label."""
    [line] = [line for line in section(text, title) if line.startswith(label)]
    return line.removeprefix(label).split()


class Elements(html.parser.HTMLParser):
    """The elements of a page, each of which must be closed, and its text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("br", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("br", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


# ------------------------------------------------------------------------------------------------------ the text


def test_the_headline_says_what_is_planned_for_which_devices_and_whether_it_fits():
    lines = as_text(made()).split("\n")
    assert lines[0].startswith("gpt, train step, 197 k parameters ─")
    assert lines[1:4] == [
        "8 x v5e, mesh data:2 x model:4, ModelParallel",
        "batch x int32[64, 1024], y {labels: int32[64]}",
        "Fits: 9.00 GiB of 16 GiB on each device (56.3%), 7.00 GiB are free.",
    ]


def test_the_headline_says_how_many_blocks_were_extrapolated_to():
    assert as_text(made(depth=80)).startswith("gpt, train step, 197 k parameters, 80 blocks ─")


def test_a_plan_that_does_not_fit_says_how_much_is_too_much_and_what_holds_most():
    text = as_text(made(fits=False, memory=dataclasses.replace(MEMORY, temporaries=12 * GIB)))
    assert "DOES NOT FIT: 18.0 GiB of 16 GiB on each device (113%), 2.00 GiB too much." in text
    assert row(text, "What holds most on one device", "jit(train_step)/dot_general f32[8,128]")[-2:] == ["1", "GiB"]


def test_what_holds_most_is_left_out_where_all_fits():
    assert "What holds most" not in as_text(made())


def test_a_plan_that_the_compiler_refuses_though_its_sum_is_small_enough_says_so():
    assert "DOES NOT FIT: 9.00 GiB of 16 GiB on each device (56.3%); the compiler cannot place it." in as_text(
        made(fits=False)
    )


def test_a_plan_for_a_device_of_unknown_memory_neither_fits_nor_not():
    text = as_text(made(fits=None, memory=dataclasses.replace(MEMORY, capacity=None)))
    assert "Needs 9.00 GiB on each device; how much one has is not known." in text
    assert row(text, "Memory of one device", "weights")[:2] == ["2", "GiB"]
    assert not any(line.startswith("capacity") for line in section(text, "Memory of one device"))


def test_the_bars_of_memory_follow_each_other_up_to_the_total():
    lines = section(as_text(made(memory=dataclasses.replace(MEMORY, capacity=15 * GIB))), "Memory of one device")
    spans = {line.split()[0]: (line.find("█"), line.rfind("█")) for line in lines if "█" in line}
    assert spans["weights"][1] + 1 == spans["optimizer"][0]
    assert spans["optimizer"][1] + 1 == spans["temporaries"][0]
    assert spans["total"] == (spans["weights"][0], spans["temporaries"][1])
    assert (spans["weights"][1] + 1 - spans["weights"][0]) / 60 == pytest.approx(2 / 15, abs=0.01)


def test_what_is_too_small_for_a_block_still_has_a_mark():
    assert row(as_text(made()), "Memory of one device", "batch") == ["64", "KiB", "<0.1%", "▏"]


def test_parts_of_memory_that_hold_nothing_are_left_out():
    labels = [line.split("  ")[0] for line in section(as_text(made()), "Memory of one device")]
    assert labels == ["weights", "optimizer", "other state", "batch", "temporaries", "program", "total", "capacity"]


def test_the_bar_of_the_capacity_is_shorter_than_that_of_what_does_not_fit():
    text = as_text(made(fits=False, memory=dataclasses.replace(MEMORY, temporaries=26 * GIB)))
    lines = section(text, "Memory of one device")
    [capacity], [total] = ([line for line in lines if line.startswith(label)] for label in ("capacity", "total"))
    assert (capacity.count("░"), total.count("█")) == (30, 60)


def test_the_times_have_bars_as_long_as_they_take():
    text = as_text(made())
    bars = {label: row(text, "Time of one step, at least", label) for label in ("compute", "HBM", "ICI", "DCN")}
    assert bars["compute"][:4] == ["1.25", "TFLOP", "6", "ms"]
    assert bars["HBM"][:4] == ["4", "GiB", "3", "ms"]
    assert [len(bar[-1]) for bar in (bars["compute"], bars["HBM"], bars["ICI"])] == [60, 30, 15]
    assert bars["DCN"] == ["0", "s"]


def test_the_bound_is_named_with_the_sum_and_the_utilization():
    lines = " ".join(section(as_text(made()), "Time of one step, at least"))
    assert "At least 6 ms, bound by compute; 10.5 ms where nothing overlaps." in lines
    assert "Model FLOP utilization at most 42.5% (8 TFLOP on all" in lines
    assert "not known" not in lines


def test_memory_traffic_that_bounds_is_called_hbm_as_in_its_row():
    assert "bound by HBM;" in as_text(made(roofline=Roofline(0.001, 0.003, 0.0, 0.0)))


def test_times_that_are_not_known_say_so():
    text = as_text(made(roofline=Roofline(None, 0.003, 0.0, None), model_flops_utilization=None))
    assert row(text, "Time of one step, at least", "compute") == ["1.25", "TFLOP", "not", "known"]
    assert row(text, "Time of one step, at least", "DCN") == ["not", "known"]
    assert "At least 3 ms, bound by HBM; 3 ms where nothing overlaps. What is not known is left out." in text
    assert "What bounds it is not known." in as_text(made(roofline=Roofline(None, None, None, None)))


def test_links_are_named_by_the_hardware():
    text = as_text(
        made(
            roofline=Roofline(0.001, 0.001, 0.004, 0.002, "NVLink", "network"),
            traffic=(Traffic("all-reduce", ("data",), 1, 1, MIB, MIB, crosses_network=True),),
        )
    )
    assert row(text, "Time of one step, at least", "NVLink")[:2] == ["4", "ms"]
    assert row(text, "Time of one step, at least", "network")[:2] == ["2", "ms"]
    assert "bound by NVLink" in text
    assert "data (network)" in text
    assert not {"ICI", "DCN"} & set(text.split())


def test_collectives_are_listed_with_their_sum():
    lines = section(as_text(made()), "Collectives of one step")
    cells = [re.split(r"\s{2,}", line) for line in lines]
    assert cells[0] == ["kind", "over axes", "count", "tensors", "bytes", "a device sends"]
    assert cells[2:] == [
        ["all-reduce", "data, model", "12", "40", "1.50 GiB", "1.25 GiB"],
        ["all-gather", "other groups", "2.50", "3", "64 MiB", "32 MiB"],
        ["total", "14.5", "43", "1.56 GiB", "1.28 GiB"],
    ]


def test_a_step_without_collectives_says_so():
    assert section(as_text(made(traffic=())), "Collectives of one step") == ["None."]


def test_equal_blocks_are_one_row_with_rule_layout_and_shard():
    lines = section(as_text(made()), "Variables, and their bytes on one device")
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[2:-1]] == [
        ["block{0..11}/mlp/kernel", "12", "float32[64, 256]", "(data, model)", "96 KiB"],
        ["block.*/mlp/kernel", "[32, 64]"],
        ["block{0..11}/norm/scale", "12", "float32[64]", "replicated", "3 KiB"],
        ["adam/block{0..11}_mlp_kernel_{momentum,velocity}", "24", "float32[64, 256]", "(data, model)", "192 KiB"],
        ["block.*/mlp/kernel", "[32, 64]"],
    ]
    assert lines[-1] == "Replicated: 12 of 24 weights, 3 KiB."


def test_several_axes_of_one_dim_are_joined():
    text = as_text(made(variables=(variable("a", (64,), (("data", "model"),), (8,)),)))
    assert "(data+model)" in text
    assert "no rule" in text


def test_of_many_kinds_of_variables_the_largest_are_shown_and_the_rest_counted():
    many = tuple(variable(f"{chr(97 + n)}/kernel", (100 + n,), (None,), (100 + n,)) for n in range(26))
    lines = section(as_text(made(variables=many)), "Variables, and their bytes on one device")
    assert lines[2].startswith("z/kernel")
    assert lines[13].startswith("o/kernel")
    assert re.split(r"\s{2,}", lines[14]) == ["... and 14 more of weights, 14 of them replicated", "5.82 KiB"]


def test_notes_stand_at_the_end_if_there_are_any():
    assert section(as_text(made()), "Notes") == ["Loops count once."]
    assert "Notes" not in as_text(made(notes=()))


LONG = made(
    model="m" * 90,
    batch=({f"input_{n}": f"float32[{n}, 1024]" for n in range(20)},),
    notes=("word " * 100,),
    variables=(variable("layer/" * 30 + "kernel", (64,) * 6, ("data",) * 6, (32,) * 6, rule="layer/" * 30),),
    traffic=(Traffic("collective-permute", tuple("abcdefgh" * 10), 1e12, 1e12, 1e18, 1e18),),
)


@pytest.mark.parametrize("plan", [made(), LONG], ids=["usual names", "long names"])
def test_no_line_is_longer_than_the_report_is_wide(plan):
    assert max(map(len, as_text(plan).split("\n"))) <= WIDTH


def test_a_long_path_goes_on_in_the_next_line_between_its_words():
    long = variable("layer/" * 30 + "kernel", (64,), ("data",), (32,), rule="layer/" * 30)
    lines = section(as_text(made(variables=(long,))), "Variables, and their bytes on one device")
    words = [re.split(r"\s{2,}", line.strip())[0] for line in lines]
    assert words[2:7] == ["layer/" * 9, "layer/" * 9, "layer/" * 9, "layer/" * 3 + "kernel", "layer/" * 9]


def test_nothing_of_a_long_path_without_words_is_lost():
    text = as_text(made(variables=(variable("Z" * 200, (4,), (None,), (4,)),)))
    assert text.count("Z") == 200


def test_a_single_row_that_is_left_over_is_shown_itself():
    many = tuple(variable(f"{chr(97 + n)}/kernel", (100 + n,), (None,), (100 + n,)) for n in range(13))
    assert "more of weights" not in as_text(made(variables=many))


def test_brackets_and_colons_of_names_are_no_markup():
    text = as_text(made(variables=(variable("[bold]/:smile:/kernel", (4,), (None,), (4,)),)))
    assert "[bold]/:smile:/kernel" in text


def test_a_report_is_the_same_on_every_terminal(monkeypatch):
    text = as_text(made())
    for name, value in (("COLUMNS", "40"), ("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)
    assert as_text(made()) == text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.split("\n"))


def test_printing_and_showing_a_plan_show_its_report():
    assert str(made()) == as_text(made())
    assert made()._repr_html_() == as_html(made())


def test_the_picture_is_the_two_bar_charts_of_the_report():
    text = as_text(made())
    sections = [block for block in text.split("\n\n") if "█" in block]
    assert picture(made()) == "\n\n".join(sections)
    assert len(sections) == 2


# ------------------------------------------------------------------------------------------------------ the HTML


def test_the_html_holds_all_that_the_text_says():
    elements = Elements(as_html(made()))
    shown = " ".join(" ".join(elements.text).split())
    words = set(re.findall(r"[\w./{}%]+", re.sub(r"[─█░▏]", " ", as_text(made()))))
    assert {word for word in words if word not in shown} == set()
    assert elements.tags.count("svg") == 8 + 4  # memory and time


def test_the_bars_of_the_html_are_as_long_as_their_figures():
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+" width="([\d.]+)"', as_html(made()))]
    assert widths[0] == pytest.approx(360 * 2 / 16, abs=0.1)
    assert widths[8:] == pytest.approx([360, 180, 90, 0], abs=0.1)


def test_names_of_the_user_are_escaped():
    evil = '<script>alert("1")</script>'
    plan = made(
        model=evil,
        batch=({evil: "int32[1]"},),
        notes=(evil,),
        variables=(variable(evil, (4,), ("data",), (2,), rule=evil),),
        largest_values=(LargeValue(1, evil, evil, evil),),
        traffic=(Traffic(evil, (evil,), 1, 1, 1, 1),),
        fits=False,
    )
    for page in (as_html(plan), compare(**{evil: plan})._repr_html_()):
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        assert "script" not in Elements(page).tags


def test_the_html_fetches_nothing_and_sets_no_colour_that_a_theme_could_hide():
    page = as_html(made())
    assert not re.search(r"https?:|src=|url\(|@import", page)
    assert not re.search(r"[{;]\s*(color|background)\s*:\s*(#|white|black|rgb)", page)


def test_the_style_of_the_html_reaches_nothing_else_in_the_notebook():
    [style] = re.findall(r"<style>(.*?)</style>", as_html(made()), re.DOTALL)
    selectors = [each.strip() for rule in style.split("}")[:-1] for each in rule.split("{")[0].split(",")]
    assert all(selector.startswith(".keras-dist") for selector in selectors)


# ------------------------------------------------------------------------------------------------------ comparisons


def test_a_comparison_has_a_row_for_each_plan_with_its_name_and_figures():
    larger = dataclasses.replace(MEMORY, temporaries=12 * GIB)
    text = str(compare(fsdp=made(), tp=made(fits=False, memory=larger, target="h100")))
    lines = text.split("\n")
    assert lines[0].startswith("gpt, train step, 197 k parameters ─")
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines[3:]]
    assert cells[0] == ["fsdp", "8 x v5e", "9.00 GiB", "2 GiB", "4 GiB", "3 GiB", "1.28 GiB", "6 ms", "42.5%", "12.5 s"]
    assert cells[1] == ["data:2 x model:4", "of 16 GiB", "compute"]
    assert cells[2] == ["fits"]
    assert cells[3][:6] == ["tp", "8 x h100", "18.0 GiB", "2 GiB", "4 GiB", "12 GiB"]
    assert cells[5] == ["does not fit"]


def test_a_comparison_of_different_models_or_steps_says_which_is_which():
    lines = str(compare(a=made(), b=made(model="llama"), c=made(step="predict"))).split("\n")
    assert lines[0].startswith("Plans ─")
    text = " ".join(lines)
    assert [text.count(subject) for subject in ("gpt, train step", "llama, train step", "gpt, predict")] == [1, 1, 1]


def test_plans_without_names_are_called_by_their_distributions():
    comparison = compare(made(), made(), made(distribution="<DataParallel device_mesh=...>"), tp=made())
    assert comparison.names == ("ModelParallel", "ModelParallel 2", "DataParallel", "tp")


def test_a_name_that_is_given_is_not_given_again():
    assert compare(made(), ModelParallel=made()).names == ("ModelParallel 2", "ModelParallel")


def test_the_dict_of_a_comparison_holds_its_figures_in_bytes_and_seconds():
    figures = compare(fsdp=made()).to_dict()["fsdp"]
    assert figures["devices"] == 8
    assert figures["mesh"] == {"data": 2, "model": 4}
    assert figures["fits"] is True
    assert figures["memory_bytes"] == MEMORY.total
    assert figures["wire_bytes_by_kind"] == {"all-reduce": 1.25 * GIB, "all-gather": 32 * MIB}
    assert sum(figures["wire_bytes_by_kind"].values()) == figures["wire_bytes"]
    assert (figures["seconds"], figures["bound"]) == (0.006, "compute")


def test_what_is_not_known_of_a_compared_plan_says_so():
    unknown = made(
        fits=None,
        memory=dataclasses.replace(MEMORY, capacity=None),
        roofline=Roofline(None, None, None, None),
        model_flops_utilization=None,
    )
    text = str(compare(cpu=unknown))
    assert "capacity not known" in text
    assert re.search(r"not known\s+-\s+12.5 s", text)


def test_a_comparison_is_as_wide_as_a_report():
    text = str(compare(**{"n" * 60: made(), "other": made(model="m" * 60)}))
    assert max(map(len, text.split("\n"))) <= WIDTH


def test_a_comparison_shows_in_a_notebook_and_has_a_short_repr():
    comparison = compare(fsdp=made(), tp=made())
    assert Elements(comparison._repr_html_()).tags.count("tr") == 3
    assert repr(comparison) == "<Comparison of fsdp, tp>"
    assert comparison == Comparison(("fsdp", "tp"), comparison.plans)


def test_a_comparison_needs_a_plan():
    with pytest.raises(ValueError, match=r"one plan or more\. Received: none\. Pass plans"):
        compare()


@pytest.mark.parametrize("arguments", [([],), ("plan",), (None,)], ids=["a list", "a string", "nothing"])
def test_only_plans_are_compared(arguments):
    with pytest.raises(TypeError, match=r"Plans are compared.*Received: .*Pass them one by one"):
        compare(*arguments)
    with pytest.raises(TypeError, match="Plans are compared"):
        compare(fsdp=arguments[0])
