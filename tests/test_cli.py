"""`keras-dist`, called as a function and as a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.compilers import needs_cuda, needs_libtpu
from support.new_process import run

import keras_dist as kd
from keras_dist_cli import main

FUNCTIONS = '''
"""Functions that the command line names."""

import dataclasses

import jax
import keras
import keras_dist as kd


@dataclasses.dataclass
class Sizes:
    width: int = 32


def build(blocks=2):
    print("this is no part of the answer")
    x = keras.Input((16,), name="x")
    hidden = x
    for number in range(blocks):
        hidden = keras.layers.Dense(Sizes().width, activation="relu", name=f"block{number}")(hidden)
    model = keras.Model(x, keras.layers.Dense(10, name="head")(hidden), name="mlp")
    model.compile("adam", "mse")
    return model


def layout(mesh):
    layout_map = kd.LayoutMap(mesh)
    layout_map["block.*/kernel"] = (None, "model")
    return layout_map


def data_parallel(mesh):
    return kd.DataParallel(mesh)


def does_not_divide(mesh):
    layout_map = kd.LayoutMap(mesh)
    layout_map["head/kernel"] = (None, "model")
    return layout_map


def of_another_mesh(mesh):
    return kd.DataParallel(kd.create_device_mesh("other:8"))


def no_layout(mesh):
    return {"kernel": (None, "model")}


def batch():
    return jax.ShapeDtypeStruct((32, 16), "float32"), jax.ShapeDtypeStruct((32, 10), "float32")


def with_an_error_of_its_own():
    raise ValueError("the user's own error")


def rows(number):
    return jax.ShapeDtypeStruct((number, 16), "float32"), jax.ShapeDtypeStruct((number, 10), "float32")


SIZE = 3
'''


@pytest.fixture
def functions(tmp_path, monkeypatch) -> str:
    """A file of functions in a directory that is the current one, under a name that no other test has."""
    name = f"functions_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def plan_arguments(functions: str, **options) -> list[str]:
    """The arguments of a plan for 8 CPU devices; options that are None are left out."""
    named = {"target": "cpu:8", "mesh": "data:2,model:4", "batch": "32", **options}
    pairs = [[f"--{name}", str(value)] for name, value in named.items() if value is not None]
    return ["plan", f"{functions}:build", *(word for pair in pairs for word in pair)]


def error_of(capsys) -> str:
    """The one line that an error is, after which nothing was printed."""
    shown = capsys.readouterr()
    assert shown.out == ""
    [line] = [line for line in shown.err.splitlines() if line != "this is no part of the answer"]
    assert line.startswith("keras-dist: error: ")
    return line.removeprefix("keras-dist: error: ")


# ------------------------------------------------------------------------------------------------------ plans


def test_compiler_options_of_a_plan(functions, capsys):
    arguments = [*plan_arguments(functions, layout=f"{functions}:layout"), "--json"]
    assert main([*arguments, "--compiler-option", "xla_cpu_enable_fast_math=true"]) == 0
    assert json.loads(capsys.readouterr().out)["compiler_options"] == {"xla_cpu_enable_fast_math": True}


def test_step_options_of_a_plan(functions, capsys):
    arguments = [*plan_arguments(functions, layout=f"{functions}:layout"), "--json", "--step-option"]
    options = "reduce_dtype=bfloat16", "without_passes=windows,gates"
    assert main([*arguments, "microbatches=2", *(f"--step-option={each}" for each in options)]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["step_options"] == (
        "StepOptions(microbatches=2, reduce_dtype='bfloat16', without_passes=('windows', 'gates'))"
    )
    assert main([*arguments, "micro=2"]) == 2
    assert "'micro=2'" in capsys.readouterr().err
    assert main([*arguments, "expert_capacity=0.5"]) == 2
    assert "expert_capacity=0.5 must be" in capsys.readouterr().err


def test_misspelled_options_commands_and_programs_are_named(functions, capsys):
    wrong = {
        "--targt": ["plan", f"{functions}:build", "--targt", "cpu:8"],
        "--devics": ["mesh", "data:8", "--devics", "2"],
        "doctr": ["doctr"],
        "no_such_program.py": ["launch", "-n", "2", "no_such_program.py"],
        "no_such_module": ["launch", "-n", "2", "-m", "no_such_module.train"],
    }
    for word, arguments in wrong.items():
        assert main(arguments) == 2
        assert word in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("option", ["xla_no_such_option=1", "xla_cpu_enable_fast_math", "=1"])
def test_compiler_options_that_are_refused(functions, capsys, option):
    assert main([*plan_arguments(functions, layout=f"{functions}:layout"), "--compiler-option", option]) == 2
    assert option.partition("=")[0] in error_of(capsys)


def test_plan_prints_its_report(functions, capsys):
    assert main(plan_arguments(functions, layout=f"{functions}:layout")) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("mlp, train step, 1.93 k parameters ─")
    assert "8 x cpu, mesh data:2 x model:4, ModelParallel" in shown.out
    assert "block.*/kernel" in shown.out
    assert "no part of the answer" not in shown.out
    assert "no part of the answer" in shown.err


@pytest.mark.slow
def test_plan_of_a_preset_without_its_weights(functions, capsys, tmp_path):
    hub = pytest.importorskip("keras_hub", reason="plans a preset of KerasHub: pip install keras-hub")
    sizes = {"num_query_heads": 2, "num_key_value_heads": 1, "hidden_dim": 16, "intermediate_dim": 32}
    backbone = hub.models.Llama3Backbone(vocabulary_size=64, num_layers=1, **sizes)
    hub.models.Llama3CausalLM(backbone, preprocessor=None).save_to_preset(str(tmp_path / "llama"))
    for file in (tmp_path / "llama").glob("*.h5"):
        file.unlink()
    (tmp_path / "preset_model.py").write_text(f"""
import keras, keras_hub, jax

def build():
    model = keras_hub.models.CausalLM.from_preset({str(tmp_path / "llama")!r}, load_weights=False, preprocessor=None)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def batch(rows=8):
    tokens = jax.ShapeDtypeStruct((rows, 32), "int32")
    return {{"token_ids": tokens, "padding_mask": jax.ShapeDtypeStruct((rows, 32), "bool")}}, tokens
""")
    options = ["--target", "cpu:8", "--mesh", "data:8", "--batch", "preset_model.py:batch"]
    assert main(["plan", "preset_model.py:build", *options]) == 0
    assert "token_ids: int32[8, 32]" in capsys.readouterr().out


def test_a_reader_that_ends_first_is_no_error(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["mesh", "data:8"]) == 0
        monkeypatch.undo()
    assert not capsys.readouterr().err


def test_json_is_all_of_standard_output(functions, capsys):
    assert main([*plan_arguments(functions, layout=f"{functions}:layout"), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["mesh"] == {"data": 2, "model": 4}
    assert [v["axes"] for v in planned["variables"] if v["path"] == "block1/kernel"] == [[None, "model"]]
    assert planned["parameters"] == 16 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10


def test_function_named_by_the_path_of_its_file(functions, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir("/")
    file = tmp_path / f"{functions}.py"
    assert main(["plan", f"{file}:build", "--target", "cpu:8", "--mesh", "data:8", "--batch", f"{file}:batch"]) == 0
    assert "batch x float32[32, 16], y float32[32, 10]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layout", "mesh", "kind"),
    [
        (None, "data:8", "DataParallel"),
        (None, "data:2,model:4", "ModelParallel"),
        ("layout", "data:2,model:4", "ModelParallel"),
        ("data_parallel", "data:8", "DataParallel"),
    ],
)
def test_distribution_is_the_layout_s_or_shards_the_batch_over_the_first_axis(functions, capsys, layout, mesh, kind):
    layout = layout and f"{functions}:{layout}"
    assert main([*plan_arguments(functions, mesh=mesh, layout=layout), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["distribution"].startswith(f"<{kind} ")
    batch_bytes = 32 * (16 + 10) * 4 // planned["mesh"]["data"]
    assert planned["memory"]["batch"] == batch_bytes


def test_step_and_depth(functions, capsys):
    assert main([*plan_arguments(functions, step="predict", depth=6), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["step"], planned["depth"], planned["memory"]["optimizer"]) == ("predict", 6, 0)
    assert sum(v["path"].endswith("/kernel") for v in planned["variables"]) == 7


@pytest.mark.parametrize(("fits", "status"), [(True, 0), (None, 0), (False, 1)])
def test_exit_status_is_whether_the_plan_fits(functions, monkeypatch, capsys, fits, status):
    class Planned:
        def __init__(self):
            self.fits = fits

        def __str__(self):
            return "the report"

    monkeypatch.setattr(kd, "plan", lambda *arguments, **options: Planned())
    assert main(plan_arguments(functions)) == status
    assert capsys.readouterr().out == "the report\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "v9:8"}, "'v9' in target 'v9:8'"),
        ({"target": "cpu:eight"}, "'cpu:eight'"),
        ({"target": "cpu:9"}, "'cpu:9' needs 9 CPU devices"),
        ({"slices": "2"}, "slices=2 for target 'cpu:8'"),
        ({"mesh": "data:3"}, "8"),
        ({"mesh": "data"}, "data"),
        ({"batch": "0"}, "batch=0"),
        ({"depth": "1"}, "depth=1 and compile_depths=(2, 4)"),
        ({"layout": "{}:does_not_divide"}, "Cannot shard 'head/kernel'"),
        ({"layout": "{}:of_another_mesh"}, "other:8"),
        ({"layout": "{}:no_layout"}, "(dict)"),
        ({"layout": "{}:nothing"}, "no function 'nothing'. It has Sizes, build, layout, data_parallel"),
        ({"layout": "{}:SIZE"}, "no function 'SIZE'"),
        ({"layout": "no_such_module:layout"}, "Module not found: 'no_such_module'"),
        ({"layout": "no/such/file.py:layout"}, "no/such/file.py'"),
        ({"layout": "layout"}, "'layout' does not name a function"),
        (
            {"batch": "many"},
            "--batch 'many'",
        ),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_errors_are_one_line_without_a_traceback(functions, capsys, options, message):
    assert main(plan_arguments(functions, **{name: value.format(functions) for name, value in options.items()})) == 2
    assert message in error_of(capsys)


def test_error_in_a_user_function_keeps_its_traceback(functions, capsys):
    assert main(plan_arguments(functions, layout=None, batch=f"{functions}:with_an_error_of_its_own")) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" in shown.err
    assert "in with_an_error_of_its_own" in shown.err


def test_missing_import_in_a_user_module_keeps_its_traceback(functions, capsys, tmp_path):
    (tmp_path / f"{functions}_more.py").write_text("import no_such_module_at_all")
    assert main(plan_arguments(functions, layout=f"{functions}_more:layout")) == 2
    assert "No module named 'no_such_module_at_all'" in capsys.readouterr().err


def test_file_that_failed_is_imported_again(functions, capsys, tmp_path):
    file = tmp_path / f"{functions}_more.py"
    file.write_text("raise OSError('at first')")
    assert main(plan_arguments(functions, layout=f"{file}:layout")) == 2
    file.write_text(FUNCTIONS)
    assert main(plan_arguments(functions, layout=f"{file}:layout")) == 0
    assert "at first" in capsys.readouterr().err


@pytest.mark.compiler
@needs_libtpu
def test_plan_for_tpus(functions, capsys):
    options = {"target": "v5e:2x2", "mesh": "data:2,model:2", "layout": f"{functions}:layout"}
    assert main([*plan_arguments(functions, **options), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["target"], planned["devices"], planned["fits"]) == ("v5e", 4, True)


@pytest.mark.compiler
@needs_cuda
def test_plan_for_gpus(functions, capsys):
    options = {"target": "h100:4", "mesh": "data:2,model:2", "layout": f"{functions}:layout"}
    assert main([*plan_arguments(functions, **options), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["target"], planned["devices"], planned["fits"]) == ("h100", 4, True)


# ------------------------------------------------------------------------------------------------------ choices


def auto_arguments(functions: str, *more: str) -> list[str]:
    return ["auto", f"{functions}:build", "--target", "cpu:8", "--strategies", "dp,tp", "--trials", "1", *more]


def test_auto_prints_the_choice(functions, capsys):
    assert main(auto_arguments(functions, "--batch", "32")) == 0
    shown = capsys.readouterr().out
    assert "distribution = kd.DataParallel(mesh)" in shown
    assert "this is no part of the answer" not in shown


def test_auto_as_json(functions, capsys):
    assert main(auto_arguments(functions, "--batch", f"{functions}:batch", "--keep", "model:2", "--json")) == 0
    choice = json.loads(capsys.readouterr().out)
    assert choice["mesh"] == {"data": 4, "model": 2}
    assert choice["candidates"][0]["outcome"] == "chosen"


def test_auto_for_the_most_rows_and_the_fewest_devices(functions, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(kd, "auto", lambda *arguments, **options: calls.append(options) or kd)
    monkeypatch.setattr(kd, "to_json", lambda: "{}", raising=False)
    assert main(auto_arguments(functions, "--batch", "largest", "--json")) == 0
    assert main(auto_arguments(functions, "--batch", f"{functions}:rows", "--json")) == 0
    assert main(auto_arguments(functions, "--target", "cpu:4", "--batch", "8", "--objective", "devices", "--json")) == 0
    assert calls[0]["batch"] == "largest"
    assert calls[1]["batch"](3)[0].shape == (3, 16)
    assert [len(each) for each in calls[2]["target"]] == [8, 4]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_auto_exits_with_1_if_nothing_fits(functions, monkeypatch, capsys, more):
    sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 800}
    monkeypatch.setattr("keras_dist.planning.targets.target.os.sysconf", sizes.__getitem__)
    assert main(auto_arguments(functions, "--batch", "32", *more)) == 1
    shown = capsys.readouterr().out
    assert "No candidate fits" in " ".join(shown.split())
    assert "cannot fit" in shown
    if more:
        assert json.loads(shown)["fits"] is False


@pytest.mark.parametrize(
    "more", [["--batch", "many"], ["--batch", "8", "--keep", "data:3"], ["--batch", "8", "--target", "cpu:4"]]
)
def test_wrong_options_of_auto(functions, capsys, more):
    assert main(auto_arguments(functions, *more)) == 2
    assert error_of(capsys)


# ------------------------------------------------------------------------------------------------------ estimates


LANGUAGE_MODEL = """
import keras

def build():
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(64, 32)(tokens)
    model = keras.Model(tokens, keras.layers.Dense(64)(x), name="lm")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def uncompiled():
    return keras.Model(*[keras.Input((4,))] * 2, name="uncompiled")

class Subclassed(keras.Model):
    def call(self, x):
        return x

def subclassed():
    model = Subclassed()
    model.build((None, 4))
    return model

def forgetful():
    build()

def of_width(width):
    return build()
"""


@pytest.fixture
def language_model(functions, tmp_path) -> str:
    (tmp_path / f"{functions}_lm.py").write_text(LANGUAGE_MODEL)
    return f"{functions}_lm"


def test_estimate_without_a_target_is_of_the_state(language_model, capsys):
    assert main(["estimate", f"{language_model}:build", "--json"]) == 0
    states = json.loads(capsys.readouterr().out)
    parameters = 64 * 32 + 32 * 64 + 64
    assert [states["bfloat16"][part] for part in ("weights", "gradients")] == [2 * parameters] * 2
    assert [*states] == ["float32", "mixed_bfloat16", "bfloat16"]
    assert states["float32"]["devices"]["v5e"] == 1
    options = ["--optimizer", "adamw", "--dtype", "float32"]
    assert main(["estimate", f"{language_model}:build", *options, "--json"]) == 0
    [state] = json.loads(capsys.readouterr().out).values()
    assert (state["optimizer"], state["optimizer_state"]) == ("AdamW", 8 * parameters + 8)
    assert main(["estimate", f"{language_model}:build", "--step", "predict"]) == 0
    assert "4.16 k parameters" in capsys.readouterr().out


def test_estimate_for_a_target_compiles_the_step(language_model, capsys):
    options = ["--target", "cpu:8", "--rows", "16", "--sequence", "24", "--dtype", "mixed_bfloat16"]
    assert main(["estimate", f"{language_model}:build", *options, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [*plans] == ["DP, mixed_bfloat16", "TP, mixed_bfloat16"]
    assert plans["DP, mixed_bfloat16"]["weights_bytes"] == 4 * (64 * 32 + 32 * 64 + 64)
    assert 0 < plans["TP, mixed_bfloat16"]["weights_bytes"] < plans["DP, mixed_bfloat16"]["weights_bytes"]
    assert all(each["fits"] and each["temporaries_bytes"] > 0 and each["devices"] == 8 for each in plans.values())
    targets = ["--target", "cpu:4", *options]
    assert main(["estimate", f"{language_model}:build", *targets, "--step", "predict"]) == 0
    shown = capsys.readouterr().out
    assert "cpu:4" in shown
    assert "Left out: " in shown  # FSDP, which would shard nothing


def test_estimate_exits_with_1_if_no_strategy_fits(language_model, monkeypatch, capsys):
    sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 800}
    monkeypatch.setattr("keras_dist.planning.targets.target.os.sysconf", sizes.__getitem__)
    options = ["--target", "cpu:8", "--rows", "16", "--sequence", "24"]
    assert main(["estimate", f"{language_model}:build", *options]) == 1
    assert "does not" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("build", "--rows 8", "--rows needs --target"),
        ("build", "--target cpu:8", "Add, for example, --rows 64"),
        ("build", "--target cpu:8 --rows 8", "--sequence 1024"),
        ("build", "--target cpu:8 --rows 0 --sequence 8", "at least 1 row"),
        ("build", "--target cpu:8 --rows 8 --sequence 0", "--sequence 0 must be positive"),
        ("uncompiled", "--target cpu:8 --rows 8 --sequence -1", "--sequence -1 must be positive"),
        ("uncompiled", "--target cpu:8 --rows 8 --sequence 8", "Leave it out"),
        ("build", "--optimizer adm", "Did you mean 'adam'"),
        ("build", "--optimizer optimizer", "Unknown --optimizer 'optimizer'. Write the name"),
        ("build", "--optimizer LossScaleOptimizer", "Unknown --optimizer 'LossScaleOptimizer'. Write the name"),
        ("build", "--optimizer MultiOptimizer", "Unknown --optimizer 'MultiOptimizer'. Write the name"),
        ("forgetful", "", "'forgetful' returned None"),
        ("forgetful", "--optimizer adam", "'forgetful' returned None"),
        ("of_width", "", "of_width(width) needs width"),
        ("uncompiled", "--target cpu:8 --rows 8", 'step="predict"'),
        ("subclassed", "--target cpu:8 --rows 8", "its inputs are unknown"),
        ("nothing", "", "no function 'nothing'"),
    ],
)
def test_wrong_options_of_estimate(language_model, capsys, function, options, message):
    assert main(["estimate", f"{language_model}:{function}", *options.split()]) == 2
    assert message in error_of(capsys)


# ------------------------------------------------------------------------------------------------------ the others


def test_mesh_prints_its_facts_and_its_picture(capsys):
    assert main(["mesh", "data:2,model:-1"]) == 0
    shown = capsys.readouterr().out
    facts, picture = shown.split("\n\n")
    assert picture == kd.create_device_mesh("data:2,model:4").picture() + "\n"
    assert [line.split(maxsplit=2)[2] for line in facts.splitlines()[:2]] == ["8", "8"]
    assert "longest link       data 1 hop, model 1 hop" in facts


def test_mesh_as_json_is_its_info(capsys):
    assert main(["mesh", "data:2,model:2", "--devices", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["total_devices"], shown["available_devices"]) == (4, 8)
    assert shown["longest_link"] == {"data": {"dcn": False, "hops": 1}, "model": {"dcn": False, "hops": 1}}


def test_mesh_of_more_devices_than_there_are_suggests_a_target(capsys):
    assert main(["mesh", "data:4,model:4"]) == 2
    assert "needs 16 devices, but this machine has 8. " in (error := error_of(capsys))
    assert "--target cpu:16" in error


def test_slices_without_a_target_are_refused(capsys):
    assert main(["mesh", "data:8", "--slices", "2"]) == 2
    assert error_of(capsys).startswith("--slices 2 needs --target.")


@pytest.mark.compiler
@needs_libtpu
def test_mesh_of_two_slices(capsys):
    assert main(["mesh", "data:2,model:4", "--target", "v5e:2x2", "--slices", "2"]) == 0
    shown = capsys.readouterr().out
    assert "longest link       data network, model 1 hop" in shown
    assert "slice 1" in shown


def test_devices_of_this_process(capsys):
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "kind", "platform", "process", "memory"]
    assert [line.split()[0] for line in lines[2:]] == kd.list_devices()
    assert main(["devices", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert first == {"name": "cpu:0", "kind": "cpu", "platform": "cpu", "process": 0, "memory_bytes": None}


def test_hardware_is_the_registry(capsys):
    assert main(["devices", "--hardware"]) == 0
    assert capsys.readouterr().out == f"{kd.hardware!r}\n"
    assert main(["devices", "--hardware", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == list(kd.hardware)
    assert shown["v5e"]["flops_per_second"]["bfloat16"] == kd.hardware["v5e"].flops_per_second["bfloat16"]
    assert shown["h100"]["compiler_target"]["compute_capability"] == [9, 0]


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"keras-dist {kd.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["fly"], ["plan"], ["mesh"], ["mesh", "data:8", "--devices", "many"]])
def test_unknown_arguments_are_an_error(arguments, capsys):
    assert main(arguments) == 2
    assert "error: " in capsys.readouterr().err


def test_help_does_not_import_keras():
    code = "import sys; from keras_dist_cli import main; main(['plan', '--help']); print('keras' in sys.modules)"
    assert run(code).stdout.splitlines()[-1] == "False"


def test_unused_axis_is_noted(functions, capsys):
    assert main([*plan_arguments(functions), "--json"]) == 0
    assert "Mesh axis 'model' (size 4) is unused" in json.loads(capsys.readouterr().out)["notes"][0]


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"    {command}" in shown for command in ("plan", "mesh", "devices"))


# ------------------------------------------------------------------------------------------------ its own process


def process(*arguments: str, directory: Path) -> subprocess.CompletedProcess:
    """Runs `python -m keras_dist` in a directory."""
    code = (
        f"import os, runpy, sys; os.chdir({str(directory)!r}); sys.argv = {['keras-dist', *arguments]!r}; "
        "runpy.run_module('keras_dist', run_name='__main__', alter_sys=True)"
    )
    return run(code)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_cpu_devices_of_a_target_are_simulated_before_a_user_module_starts_jax(tmp_path):
    (tmp_path / "early.py").write_text(f"import jax; jax.numpy.zeros(1); print('loud')\n{FUNCTIONS}")
    arguments = ["plan", "early:build", "--target", "cpu:6", "--mesh", "data:6", "--batch", "6", "--json"]
    done = process(*arguments, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["devices"] == 6
    assert "loud" in done.stderr


@pytest.mark.multiprocess
def test_exit_status_of_an_error_in_a_process(tmp_path):
    done = process("mesh", "data:5", "--target", "cpu:4", directory=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("keras-dist: error: ")


def test_report_prints_on_a_terminal_without_unicode(functions, monkeypatch, capsys):
    import io

    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert main(plan_arguments(functions)) == 0
    narrow.flush()
    assert b"mlp, train step" in narrow.buffer.getvalue()
