"""Training steps of eight models on one GPU: by plain Keras, `keras.distribution`, keras_dist, plain JAX and PyTorch.

Each case and contestant is a process of its own, which trains in `fit` on one NumPy batch that a generator yields again
and again, and prints a line of JSON: milliseconds of a step (of four epochs of 10 steps, the fastest after the first),
rows, tokens or images a second, MFU, peak of memory, and the seconds from the start of the program to the first loss,
split into imports, build, trace, lower and compile. Plain JAX and PyTorch train the Llama only.

Run on a machine with a GPU: pip install ".[cuda12,hub]" tensorflow-cpu && python benchmarks/one_gpu.py
One case, one contestant: python benchmarks/one_gpu.py --case llama --by keras_dist
Small models on any machine: python benchmarks/one_gpu.py --tiny

`--compile h100:1` needs no device. It compiles each step for hardware that is not attached, and prints FLOP, bytes
accessed and temporaries of a device next to those of plain Keras (on several devices: with the same shardings).
"""

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from typing import Any  # noqa: E402

from llama_by_hand import Llama  # noqa: E402

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "jax")

CONTESTANTS = "keras", "keras.distribution", "keras_dist", "jax", "torch"
STEPS, EPOCHS = 10, 4
PHASES = {"jaxpr_trace": "trace", "jaxpr_to_mlir_module": "lower", "backend_compile": "compile"}  # JAX's events
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}  # bfloat16


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        build: Returns the compiled model, of sizes that are keyword arguments.
        batch: Returns x (one input, or several by name) and y. Of each, a pair: the shape, and the number of different
            integers, or 0 for float32 numbers.
        sizes: The sizes of the model and the batch.
        tiny: Those of a tiny one, for tests.
        unit: What is counted per second: "tokens", "images" or "rows".
        tera_flops: Model FLOP of a step, in 1e12, as `--compile h100:1` prints them.
        strategy: The strategy of keras_dist.
        dtype: The dtype policy of the model.
    """

    build: Callable[..., Any]
    batch: Callable[..., tuple]
    sizes: dict[str, int]
    tiny: dict[str, int]
    unit: str
    tera_flops: float | None = None
    strategy: str = "DataParallel"
    dtype: str = "mixed_bfloat16"

    def batch_specs(self) -> tuple:
        """Returns the batch as `jax.ShapeDtypeStruct`s."""
        import jax

        def spec(pair):
            return jax.ShapeDtypeStruct(pair[0], "int32" if pair[1] else "float32")

        x, y = self.batch(**self.sizes)
        return {name: spec(pair) for name, pair in x.items()} if isinstance(x, dict) else spec(x), spec(y)

    def batch_values(self) -> tuple:
        """Returns a batch of random numbers; padding masks leave out the last eighth of each row."""
        import numpy as np

        numbers = np.random.default_rng(0)

        def values(pair, name=""):
            shape, bound = pair
            if name == "padding_mask":
                return np.broadcast_to(np.arange(shape[1]) < shape[1] * 7 // 8, shape).astype("int32")
            return numbers.integers(0, bound, shape, "int32") if bound else numbers.random(shape, "float32")

        x, y = self.batch(**self.sizes)
        return {name: values(pair, name) for name, pair in x.items()} if isinstance(x, dict) else values(x), values(y)

    def num_units(self) -> int:
        """Returns how many tokens, images or rows a step trains on."""
        return self.sizes["rows"] * (self.sizes["length"] if self.unit == "tokens" else 1)


# ---------------------------------------------------------------------------------------------------------- the models


def crossentropy():
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adamw():
    import keras

    return keras.optimizers.AdamW(1e-4)


def token_batch(*, rows, length, vocabulary, **_):
    tokens = (rows, length), vocabulary
    return {"token_ids": tokens, "padding_mask": ((rows, length), 2)}, tokens


def language_model(backbone):
    """Returns a compiled model from the inputs of a backbone to logits."""
    import keras

    model = keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))
    model.compile(adamw(), crossentropy())
    return model


def llama_backbone(*, vocabulary, blocks, width, heads, key_heads, hidden, tied=True, **_):
    import keras_hub

    return keras_hub.models.Llama3Backbone(
        vocabulary_size=vocabulary,
        num_layers=blocks,
        num_query_heads=heads,
        hidden_dim=width,
        intermediate_dim=hidden,
        num_key_value_heads=key_heads,
        tie_word_embeddings=tied,
    )


def build_llama(**sizes):
    return language_model(llama_backbone(**sizes))


def build_generate(**sizes):
    import keras_hub

    model = keras_hub.models.Llama3CausalLM(llama_backbone(tied=False, **sizes), preprocessor=None)
    model.compile(sampler="greedy")
    return model


def build_bert(*, vocabulary, blocks, width, heads, hidden, length, **_):
    import keras
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=vocabulary,
        num_layers=blocks,
        num_heads=heads,
        hidden_dim=width,
        intermediate_dim=hidden,
        max_sequence_length=max(512, length),
    )
    model = keras.Model(backbone.input, keras.layers.Dense(2)(backbone.output["pooled_output"]))
    model.compile(adamw(), crossentropy())
    return model


def bert_batch(*, rows, length, vocabulary, **_):
    x, _ = token_batch(rows=rows, length=length, vocabulary=vocabulary)
    return {**x, "segment_ids": ((rows, length), 2)}, ((rows,), 2)


def build_moe(*, vocabulary, blocks, width, heads, key_heads, hidden, experts, chosen, **_):
    import keras_hub

    return language_model(
        keras_hub.models.Qwen3MoeBackbone(
            vocabulary_size=vocabulary,
            num_layers=blocks,
            num_query_heads=heads,
            num_key_value_heads=key_heads,
            hidden_dim=width,
            intermediate_dim=4 * width,
            moe_intermediate_dim=hidden,
            num_experts=experts,
            head_dim=width // heads,
            top_k=chosen,
            norm_top_k_prob=True,
            tie_word_embeddings=True,
        )
    )


def image_batch(*, rows, side, classes, **_):
    return ((rows, side, side, 3), 0), ((rows,), classes)


def build_resnet(*, side, classes, blocks, **_):
    import keras

    if blocks == 50:
        model = keras.applications.ResNet50(
            weights=None, input_shape=(side, side, 3), classes=classes, classifier_activation=None
        )
    else:  # one convolution of each kind
        x = inputs = keras.Input((side, side, 3))
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 3, 2)(x)))
        model = keras.Model(inputs, keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(x)))
    model.compile("adam", crossentropy())
    return model


def build_vit(*, side, classes, blocks, width, heads, hidden, **_):
    import keras
    import keras_hub

    backbone = keras_hub.models.ViTBackbone(
        image_shape=(side, side, 3),
        patch_size=16,
        num_layers=blocks,
        num_heads=heads,
        hidden_dim=width,
        mlp_dim=hidden,
    )
    model = keras.Model(backbone.input, keras.layers.Dense(classes)(backbone.output[:, 0]))
    model.compile(adamw(), crossentropy())
    return model


def build_lstm(*, length, width, **_):
    import keras

    layers = [keras.layers.LSTM(width, return_sequences=True) for _ in range(2)]
    model = keras.Sequential([keras.Input((length, width // 2)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def build_mlp(*, width, blocks, **_):
    import keras

    layers = [keras.layers.Dense(width, "relu") for _ in range(blocks)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile("adam", "mse")
    return model


_LLAMA = {"vocabulary": 32_768, "blocks": 8, "width": 2048, "heads": 32, "key_heads": 8, "hidden": 8192, "rows": 8}
_BERT = {"vocabulary": 30_522, "blocks": 12, "width": 768, "heads": 12, "hidden": 3072, "rows": 64, "length": 256}
_MOE = {"vocabulary": 32_768, "blocks": 4, "width": 1024, "heads": 16, "key_heads": 8, "hidden": 512}
_MOE |= {"experts": 32, "chosen": 4, "rows": 4, "length": 1024}
_VIT = {"rows": 128, "side": 224, "classes": 1000, "blocks": 12, "width": 768, "heads": 12, "hidden": 3072}
_TINY = {"vocabulary": 64, "blocks": 1, "width": 32, "heads": 2, "key_heads": 1, "hidden": 32, "rows": 4, "length": 16}
_TINY_IMAGES = {"rows": 4, "side": 32, "classes": 10}
CASES = {
    "llama": Case(
        build_llama, token_batch, _LLAMA | {"length": 2048}, _TINY, "tokens", 57.73, strategy="FullyShardedDataParallel"
    ),
    "resnet": Case(
        build_resnet,
        image_batch,
        {"rows": 128, "side": 224, "classes": 1000, "blocks": 50},
        _TINY_IMAGES | {"blocks": 1},
        "images",
        2.933,
    ),
    "vit": Case(build_vit, image_batch, _VIT, _TINY | _TINY_IMAGES, "images", 13.46),
    "bert": Case(build_bert, bert_batch, _BERT, _TINY, "tokens", 8.82),
    "moe": Case(build_moe, token_batch, _MOE, _TINY | {"experts": 4, "chosen": 2}, "tokens", 1.446),
    "lstm": Case(
        build_lstm,
        lambda *, rows, length, width, **_: (((rows, length, width // 2), 0), ((rows, length, 1), 0)),
        {"rows": 256, "length": 256, "width": 512},
        {"rows": 4, "length": 4, "width": 8},
        "rows",
        1.375,
    ),
    "mlp": Case(
        build_mlp,
        lambda *, rows, width, **_: (((rows, width), 0), ((rows, width), 0)),
        {"rows": 64, "width": 128, "blocks": 12},
        {"rows": 4, "width": 8, "blocks": 2},
        "rows",
        7.34e-5,
        dtype="float32",
    ),
    "generate": Case(
        build_generate,
        token_batch,
        _LLAMA | {"length": 512, "prompt": 64},
        _TINY | {"prompt": 4},
        "tokens",
        dtype="bfloat16",
    ),
}


# ---------------------------------------------------------------------------------------------------- the measurement


class Phases:
    """Notes how long JAX traces, lowers and compiles. An event during another one of the same kind counts once."""

    def __init__(self):
        import jax

        self.intervals: dict[str, list[tuple[float, float]]] = {name: [] for name in PHASES.values()}
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_) -> None:
        name = PHASES.get(event.rpartition("/")[2].removesuffix("_duration"))
        if name:
            end = time.perf_counter()
            self.intervals[name].append((end - duration_secs, end))

    def seconds(self, start: float, stop: float) -> dict[str, float]:
        """Returns the seconds of each phase between two times."""
        found = {}
        for name, intervals in self.intervals.items():
            total, reached = 0.0, start
            for begin, end in sorted(intervals):
                end = min(end, stop)
                total += max(0.0, end - max(begin, reached))
                reached = max(reached, end)
            found[name] = total
        return found


@dataclass
class Times:
    """When the imports, the build and the first step of a program had ended, and the seconds of a later step."""

    imported: float
    built: float
    first: float
    step: float


def measure(name: str, case: Case, by: str, epochs: int) -> dict[str, Any]:
    """Trains, or generates, in this process; returns the figures."""
    if by in ("jax", "torch") and name != "llama":
        return {"absent": "written by hand for the Llama only"}
    if by == "torch":
        return figures(case, *measure_torch(case, epochs))
    import jax

    phases = Phases()
    times = measure_jax(case, epochs) if by == "jax" else measure_keras(name, case, by, epochs)
    device = jax.devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return figures(case, times, device.device_kind, peak) | rounded(phases.seconds(times.built, times.first))


def figures(case: Case, times: Times, device: str, peak: int | None) -> dict[str, Any]:
    """Returns the line of JSON of a case."""
    flops, peak_flops = 1e12 * (case.tera_flops or 0), PEAK_FLOPS.get(device)
    found = {
        "device": device,
        "ms": 1e3 * times.step,
        f"{case.unit}/s": case.num_units() / times.step,
        "MFU": flops / times.step / peak_flops if flops and peak_flops else None,
        "peak GB": peak and peak / 1e9,
        "first loss s": times.first - STARTED,
        "imports": times.imported - STARTED,
        "build": times.built - times.imported,
    }
    return rounded(found)


def rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{each:.4g}") if isinstance(each, float) else each for name, each in found.items()}


def measure_keras(name: str, case: Case, by: str, epochs: int) -> Times:
    """Trains or generates with Keras, under the distribution of a contestant."""
    import keras

    scope = contextlib.nullcontext()
    if name in ("llama", "vit", "bert", "moe", "generate"):
        import keras_hub  # noqa: F401
    if by == "keras_dist":
        import keras_dist as kd

        scope = getattr(kd, case.strategy)().scope()
    elif by == "keras.distribution":
        scope = keras.distribution.DataParallel(auto_shard_dataset=False).scope()
    imported = time.perf_counter()
    keras.config.set_dtype_policy(case.dtype)
    keras.utils.set_random_seed(0)
    with scope:
        model = case.build(**case.sizes)
        built = time.perf_counter()
        first, seconds = (generate if name == "generate" else fit)(model, case, epochs)
    return Times(imported, built, first, seconds)


def fit(model: Any, case: Case, epochs: int) -> tuple[float, float]:
    """Returns when the first step had ended, and the seconds of a later one; 0 without epochs."""
    import keras

    class EpochTimes(keras.callbacks.Callback):
        """Notes how long each epoch took. At its end, Keras waits for the last step."""

        def on_epoch_begin(self, epoch, logs=None):
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            seconds.append((time.perf_counter() - self.start) / STEPS)

    def batches() -> Iterator[tuple]:
        while True:
            yield batch

    batch, seconds = case.batch_values(), []
    model.fit(batches(), steps_per_epoch=1, verbose=0)
    first = time.perf_counter()
    if epochs == 0:
        return first, 0.0
    model.fit(batches(), steps_per_epoch=STEPS, epochs=epochs, verbose=0, callbacks=[EpochTimes()])
    return first, min(seconds[1:])


def generate(model: Any, case: Case, epochs: int) -> tuple[float, float]:
    """Returns when the first call had ended, and the seconds of a later one for each position of the new tokens."""
    x, _ = case.batch_values()
    prompt, length = case.sizes["prompt"], case.sizes["length"]
    x["padding_mask"][:] = [[position < prompt for position in range(length)]]
    ends = []
    for _ in range(epochs):
        begin = time.perf_counter()
        model.generate(x, stop_token_ids=None)
        ends.append((begin, time.perf_counter()))
    return ends[0][1], min(end - begin for begin, end in ends[1:])


def timed(step: Callable[[], Any], wait: Callable[[Any], Any], epochs: int) -> tuple[float, float]:
    """Returns when the first of some steps had ended, and the seconds of a later one."""
    wait(step())
    first, seconds = time.perf_counter(), []
    for _ in range(epochs):
        begin = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        wait(loss)
        seconds.append((time.perf_counter() - begin) / STEPS)
    return first, min(seconds[1:])


def measure_jax(case: Case, epochs: int) -> Times:
    """Trains the Llama in plain JAX."""
    import jax
    from llama_by_hand import jax_step, jax_values

    imported, sizes = time.perf_counter(), Llama(**case.sizes)
    state = jax.block_until_ready(jax_values(sizes))
    jitted = jax_step(sizes, "cudnn" if jax.default_backend() == "gpu" else "xla")
    built, (x, y) = time.perf_counter(), case.batch_values()

    def step() -> Any:
        nonlocal state
        state, loss = jitted(state, *jax.device_put((x["token_ids"], y)))
        return loss

    return Times(imported, built, *timed(step, jax.block_until_ready, epochs))


def measure_torch(case: Case, epochs: int) -> tuple[Times, str, int | None]:
    """Trains the Llama in PyTorch; returns also the device and the peak of its memory."""
    import torch
    from llama_by_hand import torch_step

    imported, is_gpu = time.perf_counter(), torch.cuda.is_available()
    step = torch_step(Llama(**case.sizes), "cuda" if is_gpu else "cpu")
    built, (x, y) = time.perf_counter(), case.batch_values()
    times = Times(imported, built, *timed(lambda: step(x["token_ids"], y), lambda loss: loss.item(), epochs))
    if not is_gpu:
        return times, "cpu", None
    return times, torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()


# ---------------------------------------------------------------------------------------------------- the compilation


def compile_case(name: str, case: Case, target: str) -> Iterator[dict[str, Any]]:
    """Compiles the step of a case for hardware that need not be attached; yields a line for each contestant."""
    import jax
    import keras

    import keras_dist as kd
    from keras_dist._keras.active_distribution import no_distribution_in_this_thread
    from keras_dist.planning.compiling.abstract_step import Step, prepared_step
    from keras_dist.planning.compiling.compilation import compile_step
    from keras_dist.planning.plan import hardware_of

    class KerasStep(Step):
        """The step that Keras compiles, without anything of this package, for the same shardings."""

        def trace(self) -> Any:
            state = self.state_specs()
            shardings = tuple([spec.sharding for spec in part] for part in state)
            function = self.model.train_step
            if by == "jax":
                from llama_by_hand import jax_state, jax_step

                sizes = Llama(**case.sizes)
                shardings = jax.tree.map(lambda _: shardings[3][0], jax_state(sizes))
                state = jax.tree.map(lambda spec: spec.update(sharding=shardings[3]), jax_state(sizes))
                (x, y), attention = self.batch, "cudnn" if target.startswith("h100") else "xla"
                return jax_step(sizes, attention).trace(state, x["token_ids"], y)
            with no_distribution_in_this_thread():
                return jax.jit(function, donate_argnums=0, out_shardings=(None, shardings)).trace(state, self.batch)

    mesh = kd.create_device_mesh("data:-1", devices=kd.target(target))
    keras.config.set_dtype_policy(case.dtype)
    chip = hardware_of(mesh.backend_mesh.devices.flat[0])
    first: dict[str, float] = {}
    for by in ("keras", "keras_dist", *(["jax"] if name == "llama" and mesh.devices.size == 1 else [])):
        line = {"case": name, "target": target, "by": by}
        strategy = case.strategy if mesh.devices.size == 1 else "DataParallel"
        distribution = getattr(kd, strategy)(mesh)
        try:
            with prepared_step(lambda: case.build(**case.sizes), distribution, case.batch_specs(), "train") as step:
                if by != "keras_dist":
                    step = KerasStep(**vars(step))
                compiled = compile_step(step, chip, lambda _: None, {})
        except ValueError as error:
            yield line | {"error": str(error)[:300]}
            continue
        numbers = {"TFLOP": compiled.flops / 1e12, "GB accessed": compiled.memory_traffic / 1e9}
        numbers["temporaries, GB"] = compiled.temporaries / 1e9
        first = first or numbers
        ratios = {f"{label} / Keras's": number / first[label] for label, number in numbers.items()}
        forecast = compiled.roofline.forecast
        further = {
            "model TFLOP": compiled.model_flops / 1e12,
            "memory GB": (compiled.argument_bytes + compiled.outputs + compiled.temporaries) / 1e9,
            "bound ms": 1e3 * (compiled.roofline.seconds or 0),
            "forecast ms": 1e3 * forecast.seconds if forecast else None,
            "compile s": compiled.seconds,
        }
        yield line | rounded(numbers | ratios | further)


# ------------------------------------------------------------------------------------------------------- the programs


def in_new_process(name: str, by: str, further: list[str]) -> dict[str, Any]:
    """Runs a case by a contestant in a process of its own, whose peak of memory is its own."""
    call = [sys.executable, __file__, "--case", name, "--by", by, *further]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        return {"case": name, "by": by, "error": done.stderr.strip().rpartition("\n")[2][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs all cases, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES], help="some of the cases")
    parser.add_argument("--by", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS], help="some contestants")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of 10 steps each; the first is not counted")
    parser.add_argument("--tiny", action="store_true", help="small models, for any machine")
    parser.add_argument("--compile", metavar="TARGET", help="compile for this hardware instead, for example h100:1")
    arguments = parser.parse_args()
    further = ["--epochs", str(arguments.epochs), *(["--tiny"] if arguments.tiny else [])]
    for name in arguments.case:
        case = CASES[name]
        if arguments.tiny:
            case = replace(case, sizes=case.tiny, tera_flops=None)
        if arguments.compile:
            if name != "generate":
                for line in compile_case(name, case, arguments.compile):
                    print(json.dumps(line), flush=True)
        elif len(arguments.case) == len(arguments.by) == 1:
            (by,) = arguments.by
            try:
                found = measure(name, case, by, arguments.epochs)
            except ModuleNotFoundError as error:
                found = {"absent": str(error)}
            print(json.dumps({"case": name, "by": by} | found))
        else:
            for by in arguments.by:
                print(json.dumps(in_new_process(name, by, further)), flush=True)


if __name__ == "__main__":
    main()
