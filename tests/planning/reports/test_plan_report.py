"""How plans and comparisons print."""

import dataclasses
import html.parser
import re

import pytest
from support.example_plans import GIB, MEMORY, MIB, example_plan, variable

import keras_dist as kd
from keras_dist._report.tables import WIDTH
from keras_dist.planning.compiling.compilation import Traffic
from keras_dist.planning.costs.roofline import Roofline
from keras_dist.planning.generated_rows import largest_batch
from keras_dist.planning.hlo.collectives import Collective
from keras_dist.planning.hlo.module_costs import LargeValue
from keras_dist.planning.reports.compare import Comparison, compare
from keras_dist.planning.reports.plan_report import distribution_name


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


def test_headline_has_model_devices_batch_and_whether_it_fits():
    lines = str(example_plan()).split("\n")
    assert lines[0].startswith("gpt, train step, 197 k parameters ─")
    assert lines[1:4] == [
        "8 x v5e, mesh data:2 x model:4, ModelParallel",
        "batch x int32[64, 1024], y {labels: int32[64]}",
        "Fits: 9.00 GiB of 16 GiB per device (56.3%), 7.00 GiB free.",
    ]


def test_headline_has_the_number_of_blocks_extrapolated_to():
    assert str(example_plan(depth=80)).startswith("gpt, train step, 197 k parameters, 80 blocks ─")


def test_plan_that_does_not_fit_has_the_excess_and_the_largest_values():
    text = str(example_plan(fits=False, memory=dataclasses.replace(MEMORY, temporaries=12 * GIB)))
    assert "DOES NOT FIT: 18.0 GiB of 16 GiB per device (113%), 2.00 GiB over capacity." in text
    assert row(text, "Largest values on one device", "jit(train_step)/dot_general f32[8,128]")[-2:] == ["1", "GiB"]


def test_largest_values_are_left_out_if_the_plan_fits():
    assert "Largest values" not in str(example_plan())


def test_plan_refused_by_the_compiler_although_its_sum_fits():
    assert "DOES NOT FIT: 9.00 GiB of 16 GiB per device (56.3%), but the compiler cannot allocate it." in str(
        example_plan(fits=False)
    )


def test_plan_for_a_device_of_unknown_capacity():
    text = str(example_plan(fits=None, memory=dataclasses.replace(MEMORY, capacity=None)))
    assert "Needs 9.00 GiB per device, whose capacity is unknown." in text
    assert row(text, "Memory per device", "weights")[:2] == ["2", "GiB"]
    assert not any(line.startswith("capacity") for line in section(text, "Memory per device"))


def test_memory_bars_are_stacked_up_to_the_total():
    lines = section(str(example_plan(memory=dataclasses.replace(MEMORY, capacity=15 * GIB))), "Memory per device")
    spans = {line.split()[0]: (line.find("█"), line.rfind("█")) for line in lines if "█" in line}
    assert spans["weights"][1] + 1 == spans["optimizer"][0]
    assert spans["optimizer"][1] + 1 == spans["temporaries"][0]
    assert spans["total"] == (spans["weights"][0], spans["temporaries"][1])
    assert (spans["weights"][1] + 1 - spans["weights"][0]) / 60 == pytest.approx(2 / 15, abs=0.01)


def test_tiny_values_still_have_a_mark():
    assert row(str(example_plan()), "Memory per device", "batch") == ["64", "KiB", "<0.1%", "▏"]


def test_empty_parts_of_memory_are_left_out():
    labels = [line.split("  ")[0] for line in section(str(example_plan()), "Memory per device")]
    assert labels == ["weights", "optimizer", "other state", "batch", "temporaries", "program", "total", "capacity"]


def test_capacity_bar_is_shorter_than_the_total_that_exceeds_it():
    text = str(example_plan(fits=False, memory=dataclasses.replace(MEMORY, temporaries=26 * GIB)))
    lines = section(text, "Memory per device")
    [capacity], [total] = ([line for line in lines if line.startswith(label)] for label in ("capacity", "total"))
    assert (capacity.count("░"), total.count("█")) == (30, 60)


def test_time_bars_are_proportional_to_the_times():
    text = str(example_plan())
    bars = {label: row(text, "Lower bound on step time", label) for label in ("compute", "HBM", "ICI")}
    assert bars["compute"][:4] == ["1.25", "TFLOP", "6", "ms"]
    assert bars["HBM"][:4] == ["4", "GiB", "3", "ms"]
    assert [len(bar[-1]) for bar in (bars["compute"], bars["HBM"], bars["ICI"])] == [60, 30, 15]
    assert "DCN" not in text  # of one slice


def test_bound_has_its_resource_the_sum_and_the_utilization():
    lines = " ".join(section(str(example_plan()), "Lower bound on step time"))
    assert "At least 6 ms, bound by compute; 10.5 ms if nothing overlaps." in lines
    assert "Model FLOP utilization at most 42.5% (8 TFLOP over all" in lines
    assert "unknown" not in lines


def test_forecast_has_its_parts_and_the_most_exposed_collectives():
    reduced = Collective(
        "all-reduce", "r", "", 1, 8, 14.0, 1, 8, ("data", "model"), (), "f32", seconds=0.003, exposed_seconds=2**-9
    )
    collectives = [
        dataclasses.replace(reduced, op_name=f"jit(train_step)/transpose(jvp(gpt))/block{n}/dense/dot_general")
        for n in range(12)
    ]
    text = str(example_plan(collectives=(*collectives, dataclasses.replace(reduced, exposed_seconds=0.0))))
    title = "Forecast of step time"
    bars = {label: row(text, title, label) for label in ("compute", "exposed collectives", "waiting for copies")}
    assert [(*bar[:2], len(bar[2])) for bar in bars.values()] == [("7", "ms", 42), ("2", "ms", 12), ("1", "ms", 6)]
    lines = " ".join(section(text, title))
    assert "Probably 10 ms a step. Model FLOP utilization 25.5%. The compiler estimated 50% of the compute" in lines
    [found] = [line for line in text.split("\n") if "gpt/block{0..11}/dense, gradient" in line]
    assert re.split(r"\s{2,}", found)[-3:] == ["12", "36 ms", "23.4 ms"]


def test_only_the_most_exposed_collectives_have_a_row():
    one = Collective("all-gather", "g", "", 1, 8, 7.0, 1, 8, ("data",), (), "f32", seconds=1.0, exposed_seconds=1.0)
    names = "abcdefgh"
    each = [
        dataclasses.replace(one, op_name=f"jit(f)/jvp(net)/{name}/add", exposed_seconds=1 / (n + 1))
        for n, name in enumerate(names)
    ]
    lines = [line for line in str(example_plan(collectives=tuple(each))).split("\n") if "net/" in line]
    assert [line.split("net/")[1][0] for line in lines] == list("abcdef")
    assert "... and 2 more" in str(example_plan(collectives=tuple(each)))


def test_without_a_forecast_collectives_have_no_times():
    text = str(example_plan(roofline=Roofline(0.006, 0.003, 0.0015, 0.0)))
    assert "Forecast" not in text
    assert "exposed" not in text


def test_memory_bound_is_labelled_hbm():
    assert "bound by HBM;" in str(example_plan(roofline=Roofline(0.001, 0.003, 0.0, 0.0)))


def test_unknown_times():
    text = str(example_plan(roofline=Roofline(None, 0.003, 0.0, None), model_flops_utilization=None))
    assert row(text, "Lower bound on step time", "compute") == ["1.25", "TFLOP", "unknown"]
    assert row(text, "Lower bound on step time", "DCN") == ["unknown"]
    assert "At least 3 ms, bound by HBM; 3 ms if nothing overlaps. Unknown times are left out." in text
    assert "Bottleneck unknown." in str(example_plan(roofline=Roofline(None, None, None, None)))


def test_links_are_named_after_the_hardware():
    text = str(
        example_plan(
            roofline=Roofline(0.001, 0.001, 0.004, 0.002, "NVLink", "network"),
            traffic=(Traffic("all-reduce", ("data",), 1, 1, MIB, MIB, crosses_network=True),),
        )
    )
    assert row(text, "Lower bound on step time", "NVLink")[:2] == ["4", "ms"]
    assert row(text, "Lower bound on step time", "network")[:2] == ["2", "ms"]
    assert "bound by NVLink" in text
    assert "data (network)" in text
    assert not {"ICI", "DCN"} & set(text.split())


def test_collectives_are_listed_with_totals():
    lines = section(str(example_plan()), "Collectives per step")
    cells = [re.split(r"\s{2,}", line) for line in lines]
    times = ["total time", "exposed"]
    assert cells[0] == ["kind", "over axes", "count", "tensors", "bytes", "sent per device", *times]
    assert cells[2:] == [
        ["all-reduce", "data, model", "12", "40", "1.50 GiB", "1.25 GiB", "4 ms", "2 ms"],
        ["all-gather", "other groups", "2.50", "3", "64 MiB", "32 MiB", "500 us", "0 s"],
        ["total", "14.5", "43", "1.56 GiB", "1.28 GiB", "4.50 ms", "2 ms"],
    ]


def test_step_without_collectives():
    assert section(str(example_plan(traffic=())), "Collectives per step") == ["None."]


def test_equal_blocks_share_a_row_with_rule_layout_and_shard_shape():
    lines = section(str(example_plan()), "Variables, bytes per device")
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[2:-1]] == [
        ["block{0..11}/mlp/kernel", "12", "float32[64, 256]", "(data, model)", "96 KiB"],
        ["block.*/mlp/kernel", "[32, 64]"],
        ["block{0..11}/norm/scale", "12", "float32[64]", "replicated", "3 KiB"],
        ["adam/block{0..11}_mlp_kernel_{momentum,velocity}", "24", "float32[64, 256]", "(data, model)", "192 KiB"],
        ["block.*/mlp/kernel", "[32, 64]"],
    ]
    assert lines[-1] == "Replicated: 12 of 24 weights, 3 KiB per device."


def test_several_axes_of_one_dim_are_joined_by_plus():
    text = str(example_plan(variables=(variable("a", (64,), (("data", "model"),), (8,)),)))
    assert "(data+model)" in text
    assert "no rule" in text


def test_largest_variables_are_shown_and_the_rest_counted():
    many = tuple(variable(f"{chr(97 + n)}/kernel", (100 + n,), (None,), (100 + n,)) for n in range(26))
    lines = section(str(example_plan(variables=many)), "Variables, bytes per device")
    assert lines[2].startswith("z/kernel")
    assert lines[13].startswith("o/kernel")
    assert re.split(r"\s{2,}", lines[14]) == ["... and 14 more weights, replicated", "5.82 KiB"]


def test_notes_are_a_section_of_their_own_if_there_are_any():
    assert section(str(example_plan()), "Notes") == ["Loops count once."]
    assert "Notes" not in str(example_plan(notes=()))


LONG = example_plan(
    model="m" * 90,
    batch=({f"input_{n}": f"float32[{n}, 1024]" for n in range(20)},),
    notes=("word " * 100,),
    variables=(variable("layer/" * 30 + "kernel", (64,) * 6, ("data",) * 6, (32,) * 6, rule="layer/" * 30),),
    traffic=(Traffic("collective-permute", tuple("abcdefgh" * 10), 1e12, 1e12, 1e18, 1e18),),
)


@pytest.mark.parametrize("plan", [example_plan(), LONG], ids=["usual names", "long names"])
def test_no_line_exceeds_the_report_width(plan):
    assert max(map(len, str(plan).split("\n"))) <= WIDTH


def test_long_paths_wrap_between_words():
    long = variable("layer/" * 30 + "kernel", (64,), ("data",), (32,), rule="layer/" * 30)
    lines = section(str(example_plan(variables=(long,))), "Variables, bytes per device")
    words = [re.split(r"\s{2,}", line.strip())[0] for line in lines]
    assert words[2:7] == ["layer/" * 13, "layer/" * 13, "layer/" * 4 + "kernel", "layer/" * 13, "layer/" * 13]


def test_long_paths_without_words_are_printed_in_full():
    text = str(example_plan(variables=(variable("Z" * 200, (4,), (None,), (4,)),)))
    assert text.count("Z") == 200


def test_a_single_remaining_row_is_shown_instead_of_counted():
    many = tuple(variable(f"{chr(97 + n)}/kernel", (100 + n,), (None,), (100 + n,)) for n in range(13))
    assert "more weights" not in str(example_plan(variables=many))


def test_names_with_markup_are_printed_literally():
    text = str(example_plan(variables=(variable("[bold]/:smile:/kernel", (4,), (None,), (4,)),)))
    assert "[bold]/:smile:/kernel" in text


def test_report_is_independent_of_the_terminal(monkeypatch):
    text = str(example_plan())
    for name, value in (("COLUMNS", "40"), ("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)
    assert str(example_plan()) == text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.split("\n"))


def test_picture_is_the_bar_charts_of_the_report():
    text = str(example_plan())
    sections = [block for block in text.split("\n\n") if "█" in block]
    assert example_plan().picture() == "\n\n".join(sections)
    assert len(sections) == 3


# ------------------------------------------------------------------------------------------------------ the HTML


def test_html_contains_all_words_of_the_text():
    elements = Elements(example_plan()._repr_html_())
    shown = " ".join(" ".join(elements.text).split())
    words = set(re.findall(r"[\w./{}%]+", re.sub(r"[─█░▏]", " ", str(example_plan()))))
    assert {word for word in words if word not in shown} == set()
    assert elements.tags.count("svg") == 8 + 3 + 3  # memory, bounds and forecast


def test_html_bars_are_proportional_to_their_figures():
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+" width="([\d.]+)"', example_plan()._repr_html_())]
    assert widths[0] == pytest.approx(360 * 2 / 16, abs=0.1)
    assert widths[8:] == pytest.approx([360, 180, 90, 252, 72, 36], abs=0.1)


def test_html_escapes_user_names():
    evil = '<script>alert("1")</script>'
    plan = example_plan(
        model=evil,
        batch=({evil: "int32[1]"},),
        notes=(evil,),
        variables=(variable(evil, (4,), ("data",), (2,), rule=evil),),
        largest_values=(LargeValue(1, evil, evil, evil),),
        traffic=(Traffic(evil, (evil,), 1, 1, 1, 1),),
        fits=False,
    )
    for page in (plan._repr_html_(), compare(**{evil: plan})._repr_html_()):
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        assert "script" not in Elements(page).tags


def test_html_fetches_nothing_and_sets_no_colour_that_a_theme_could_hide():
    page = example_plan()._repr_html_()
    assert not re.search(r"https?:|src=|url\(|@import", page)
    assert not re.search(r"[{;]\s*(color|background)\s*:\s*(#|white|black|rgb)", page)


def test_html_style_applies_only_to_reports():
    [style] = re.findall(r"<style>(.*?)</style>", example_plan()._repr_html_(), re.DOTALL)
    selectors = [each.strip() for rule in style.split("}")[:-1] for each in rule.split("{")[0].split(",")]
    assert all(selector.startswith(".keras-dist") for selector in selectors)


@pytest.mark.parametrize("report", [example_plan(), compare(a=example_plan())], ids=["plan", "comparison"])
def test_a_report_is_saved_as_one_file_that_loads_nothing(report, tmp_path):
    report.save_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert report._repr_html_() in page
    assert "<title>gpt, train step, 197 k parameters</title>" in page
    assert not re.search(r"https?:|src=|url\(|@import|<script", page)


# ------------------------------------------------------------------------------------------------------ the figure


def bars_of(axes) -> list[tuple[int, float, float]]:
    """The row, start and end of each bar that has a width, in the units of the axis."""
    bars = [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in axes.patches]
    return [(row, pytest.approx(start), pytest.approx(start + width)) for row, start, width in bars if width]


def test_the_figure_has_the_memory_and_the_schedule():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure = example_plan().figure()
    memory, time = figure.axes
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert "gpt, train step" in figure.get_suptitle()
    assert (memory.get_xlabel(), time.get_xlabel()) == ("GiB", "ms (gray: hidden by compute)")
    rows = [label.get_text() for label in memory.get_yticklabels()]
    assert rows[:2] == ["weights  2 GiB  12.5%", "optimizer  4 GiB  25%"]
    assert [bar for bar in bars_of(memory) if bar[0] < 2] == [(0, 0, 2), (1, 2, 6)]
    assert bars_of(memory)[-1] == (len(rows) - 1, 0, 16)  # the capacity
    assert [label.get_text() for label in time.get_yticklabels()] == [
        "compute  7 ms",
        "collectives over data, model  4 ms  2 ms exposed",
        "collectives over other groups  500 us  0 s exposed",
        "copies  1 ms",
    ]
    hidden, exposed = (1, 5, 7), (1, 7, 9)
    assert bars_of(time) == [(0, 0, 7), hidden, exposed, (2, 6.5, 7), (3, 9, 10)]


def test_the_figure_has_the_bounds_without_a_forecast_and_no_time_if_none_is_known():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    _, time = example_plan(roofline=Roofline(0.001, 0.002, None, 0.0)).figure().axes
    assert bars_of(time) == [(0, 0, 1), (1, 0, 2)]
    assert time.get_yticklabels()[2].get_text() == "ICI  unknown"
    assert len(example_plan(roofline=Roofline.unknown("cpu")).figure().axes) == 1


# ------------------------------------------------------------------------------------------------------ comparisons


def test_comparison_has_a_row_per_plan():
    larger = dataclasses.replace(MEMORY, temporaries=12 * GIB)
    text = str(compare(fsdp=example_plan(), tp=example_plan(fits=False, memory=larger, target="h100")))
    lines = text.split("\n")
    assert lines[0].startswith("gpt, train step, 197 k parameters ─")
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines[4:]]
    figures = ["9.00 GiB", "2 GiB", "4 GiB", "3 GiB", "1.28 GiB", "6 ms", "10 ms", "12.5 s"]
    assert cells[0] == ["fsdp", "8 x v5e", *figures]
    assert cells[1] == ["data:2 x model:4", "of 16 GiB", "compute", "25.5%"]
    assert cells[2] == ["fits", "42.5%"]
    assert cells[3][:6] == ["tp", "8 x h100", "18.0 GiB", "2 GiB", "4 GiB", "12 GiB"]
    assert cells[5] == ["does not fit", "42.5%"]


def test_comparison_of_different_models_or_steps_names_them():
    lines = str(compare(a=example_plan(), b=example_plan(model="llama"), c=example_plan(step="predict"))).split("\n")
    assert lines[0].startswith("Plans ─")
    text = " ".join(" ".join(lines).split())
    assert [text.count(subject) for subject in ("gpt, train step", "llama, train step", "gpt, predict")] == [1, 1, 1]


def test_unnamed_plans_are_named_after_their_distributions():
    comparison = compare(
        example_plan(), example_plan(), example_plan(distribution="<DataParallel device_mesh=...>"), tp=example_plan()
    )
    assert comparison.names == ("ModelParallel", "ModelParallel 2", "DataParallel", "tp")


def test_automatic_names_do_not_repeat_given_names():
    assert compare(example_plan(), ModelParallel=example_plan()).names == ("ModelParallel 2", "ModelParallel")


def test_comparison_as_data_is_in_bytes_and_seconds():
    figures = compare(fsdp=example_plan()).to_dict()["fsdp"]
    assert figures["devices"] == 8
    assert figures["mesh"] == {"data": 2, "model": 4}
    assert figures["fits"] is True
    assert figures["memory_bytes"] == MEMORY.total
    assert figures["wire_bytes_by_kind"] == {"all-reduce": 1.25 * GIB, "all-gather": 32 * MIB}
    assert sum(figures["wire_bytes_by_kind"].values()) == figures["wire_bytes"]
    assert (figures["seconds"], figures["bound"]) == (0.006, "compute")
    assert (figures["forecast_seconds"], figures["forecast_model_flops_utilization"]) == (0.01, 0.255)


def test_comparison_of_a_plan_with_unknown_figures():
    unknown = example_plan(
        fits=None,
        memory=dataclasses.replace(MEMORY, capacity=None),
        roofline=Roofline(None, None, None, None),
        model_flops_utilization=None,
    )
    text = str(compare(cpu=unknown))
    assert "capacity unknown" in text
    assert re.search(r"unknown\s+unknown\s+12.5 s", text)


def test_comparison_does_not_exceed_the_report_width():
    text = str(compare(**{"n" * 60: example_plan(), "other": example_plan(model="m" * 60)}))
    assert max(map(len, text.split("\n"))) <= WIDTH


def test_comparison_html_and_repr():
    comparison = compare(fsdp=example_plan(), tp=example_plan())
    assert Elements(comparison._repr_html_()).tags.count("tr") == 3
    assert repr(comparison) == "<Comparison of fsdp, tp>"
    assert comparison == Comparison(("fsdp", "tp"), comparison.plans)


def test_comparison_of_no_plans_is_refused():
    with pytest.raises(ValueError, match="at least one plan"):
        compare()


@pytest.mark.parametrize("arguments", [([],), ("plan",), (None,)], ids=["a list", "a string", "nothing"])
def test_comparison_of_other_objects_is_refused(arguments):
    with pytest.raises(TypeError, match=re.escape(f"{arguments[0]!r} ({type(arguments[0]).__name__})")):
        compare(*arguments)
    with pytest.raises(TypeError, match=re.escape(repr(arguments[0]))):
        compare(fsdp=arguments[0])


def test_step_options_are_part_of_the_name_of_a_distribution():
    distribution = kd.DataParallel(step_options=kd.StepOptions(microbatches=2, remat="full"))
    plan = example_plan(distribution=repr(distribution), step_options=distribution.step_options)
    assert distribution_name(plan) == "DataParallel, microbatches=2, remat='full'"
    assert "DataParallel, microbatches=2, remat='full'" in str(plan)


@pytest.mark.parametrize(("weights", "most"), [(2, 16220 - 2 * 1024 - 512), (17, 0)])
def test_the_largest_batch_is_that_of_two_plans(weights, most):
    """Half a GiB of temporaries does not grow, and each row of a device takes 1 MiB. There are four shards."""
    planned = []

    def plan_of(rows):
        planned.append(rows)
        temporaries = GIB // 2 + rows // 4 * MIB
        held = dict.fromkeys(("optimizer", "batch", "program"), 0)
        memory = dataclasses.replace(MEMORY, weights=weights * GIB, temporaries=temporaries, cache=MIB, **held)
        return example_plan(step="generate", memory=memory)

    first = plan_of(400)
    found = largest_batch(first, 400, 4, plan_of)
    assert planned[1] != 400
    assert found == most * 4  # of the 16,220 MiB that 99% of the device are
    lines = section(str(dataclasses.replace(first, largest_batch=found)), "Cache and largest batch")
    assert lines[0].startswith("1 MiB of the temporaries")
    assert f" {found} row" in lines[1]
    assert largest_batch(dataclasses.replace(first, target="cpu"), 400, 4, plan_of) is None
