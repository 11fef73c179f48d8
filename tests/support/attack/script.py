"""`render`: a draw as a program of its own, which raises what goes wrong."""

import inspect
import math
import re

from support.attack import models

HEAD = '''"""{title}"""
import tempfile
import keras_dist as kd
kd.simulate_devices(8)
import jax, jax.numpy as jnp, keras, numpy as np
from keras import layers, ops
'''

ARRAYS = {
    "normal(": "normal = lambda *shape: random.normal(size=shape).astype('float32')\n",
    "classes(": "classes = lambda *shape: random.integers(0, 4, shape)\n",
    "tokens(": "tokens = lambda *shape: random.integers(1, 32, shape)\n",
    "mask(": "mask = lambda *shape: (np.arange(shape[1]) < random.integers(2, 6, (shape[0], 1))).astype('int32')\n",
}

SOURCES = {
    "arrays": "",
    "tf.data": "import tensorflow as tf\n"
    "batches = lambda: tf.data.Dataset.from_tensor_slices((x, y{weight})).batch({batch})",
    "grain": "import grain\nrow = lambda i: keras.tree.map_structure(lambda a: a[i], (x, y{weight}))\n"
    "batches = lambda: grain.MapDataset.range({rows}).map(row).batch({batch})",
    "generator": "def batches():\n    for start in range(0, {rows}, {batch}):\n"
    "        yield keras.tree.map_structure(lambda a: a[start:start + {batch}], (x, y{weight}))",
    "PyDataset": "class Batches(keras.utils.PyDataset):\n    def __len__(self):\n        return -(-{rows} // {batch})\n"
    "    def __getitem__(self, i):\n"
    "        return keras.tree.map_structure(lambda a: a[{batch} * i:{batch} * (i + 1)], (x, y{weight}))\n"
    "batches = lambda: Batches()",
}

MODEL = """
def compile(model):
    model.compile({optimizer}, {loss}, {metrics}{compile_arguments})
    return model

def build():
{names}    return compile({model}({arguments}))

def distribution():
{distribution}

def use(model):
{calls}
    yield "weights", [v.numpy() for v in model.weights if "float" in v.dtype]
    yield "optimizer", [v.numpy() for v in model.optimizer.variables]
"""

FUNCTION = """@keras.saving.register_keras_serializable("attack")
class Function(keras.Layer):
    def call(self, x):
        return {text}

"""

HELPERS = {
    "first(": """
def first(rows, tree=None):
    return keras.tree.map_structure(lambda a: a[:rows], x if tree is None else tree)
""",
    "move(": """
def move(model, distribution):
    if kd.distribution() is not None:
        kd.set_distribution(distribution)
        kd.redistribute(model)
""",
    "resume(": """
def resume(model, x, y, **arguments):
    if kd.distribution() is None:
        model.fit(x, y, epochs=2, **arguments)
        return model
    model.fit(x, y, epochs=1, callbacks=[kd.TrainingCheckpoint(f"{folder}/run")], **arguments)
    model = build()
    model.fit(x, y, epochs=2, callbacks=[kd.TrainingCheckpoint(f"{folder}/run")], **arguments)
    return model
""",
}

COMPARE = """
def run(distribution, noise=0.0, seed=0):
    global folder
    folder = tempfile.mkdtemp()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    kd.set_distribution(distribution)
    model = build()
    rounding = np.random.default_rng(seed)
    for v in model.trainable_variables if noise else ():
        v.assign(v * (1 + noise * rounding.normal(size=v.shape)))
    return [(name, [np.asarray(a, "float64") for a in keras.tree.flatten(tree)]) for name, tree in use(model)]

def errors(some, others):
    for (name, a), (_, b) in zip(some, others, strict=True):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            np.testing.assert_equal(one.shape, other.shape, f"shape of number {i} of {name}")
            yield f"{name} {i}", np.abs(one - other).max(initial=0), max(1e-3, np.abs(one).max(initial=0))

expected = run(None)
assert all(np.isfinite(a).all() for _, tree in expected for a in tree)
found = run(distribution())
if any(not error <= TOLERANCE * scale for _, error, scale in errors(expected, found)):
    # More than rounding? The same on one device, where it begins with weights whose last digits differ, three times:
    # one more right answer, of few, is a step that one of them may not make.
    rounded = [errors(expected, run(None, NOISE, seed)) for seed in range(3)]
    # XLA:CPU computes some programs with wrong numbers on one device, too, so also without compilation.
    with jax.disable_jit():
        rounded.append(errors(expected, run(None)))
    for (name, error, scale), *others in zip(errors(expected, found), *rounded, strict=True):
        limit = (TOLERANCE if "int8" not in name else max(TOLERANCE, 0.02)) * scale
        limit += 10 * max(error for _, error, _ in others)
        assert error <= limit, f"{name}: differs by {error:.2g}, of {scale:.2g}; rounding explains {limit:.2g}"
print("equal")
"""


def render(draw):
    """Returns the source of the program of a draw."""
    model = models.MODELS[draw.model]
    weight = ", weight" if draw.weight == "sample_weight" else ""
    fields = {"rows": draw.rows, "length": draw.length, "batch": draw.batch_size, "weight": weight}
    x, y = model.x.format(**fields), model.y.format(**fields)
    head = HEAD.format(title=f"Seed {draw.seed}, number {draw.number}: {draw.model}, {draw.strategy}")
    if model.backbone:
        head += "import keras_hub\n"
    if draw.is_x64:
        head += 'jax.config.update("jax_enable_x64", True)\n'
    head += f'keras.config.set_floatx("{"float64" if draw.policy == "float64" else "float32"}")\n'
    head += f'keras.config.set_dtype_policy("{draw.policy}")\n'
    head += f"TOLERANCE, NOISE = {draw.tolerance}, {draw.noise}\n"
    data = "\nrandom = np.random.default_rng(0)\n"
    data += "".join(text for name, text in ARRAYS.items() if name in x + y) + f"x = {x}\ny = {y}\n"
    if weight:
        shape = "y.shape[:-1]" if "normal" in y else "y.shape"  # a weight for each summand of the loss
        data += f"weight = random.uniform(0.5, 2, {shape}).astype('float32')\n"
    call_lines = "\n".join(f"    {line}" for line in draw.calls)
    has_rules = "TP" in draw.strategy or draw.strategy == "rules"  # for names that every model begins with anew
    body = MODEL.format(
        names="    keras.utils.clear_session(free_memory=False)\n" if has_rules else "",
        optimizer=draw.optimizer,
        loss=draw.loss,
        metrics=f"metrics={draw.metrics}",
        compile_arguments=f", {draw.compile_arguments}" if draw.compile_arguments else "",
        model=model.build.__name__,
        arguments=draw.arguments,
        distribution=_distribution(draw),
        calls=call_lines,
    )
    helpers = "".join(text for name, text in HELPERS.items() if name in call_lines)
    source = SOURCES[draw.source].format(**fields) + "\n"
    return head + data + source + _model(draw) + helpers + body + COMPARE


def _model(draw):
    """The sources of the model and of the layers that it names."""
    source = inspect.getsource(models.MODELS[draw.model].build)
    source = source[source.index("def ") :]
    for name in dict.fromkeys(re.findall(r"(?<![.\w])[A-Z]\w+(?=\()", source)):
        if name == "Function":
            source = FUNCTION.format(text=draw.function) + source
        elif hasattr(models, name):
            source = f"{inspect.getsource(getattr(models, name))}\n\n{source}"
    if draw.loss.isidentifier():
        source = f"{inspect.getsource(getattr(models, draw.loss))}\n\n{source}"
    return f"\n{source}"


def _distribution(draw):
    count = math.prod(map(int, re.findall(r"\d+", draw.mesh)))
    lines = [f"mesh = kd.create_device_mesh('{draw.mesh}', devices={count})"]
    batch = "batch_dim_name='data'"
    if "TP" in draw.strategy:
        context = ", sequence_dim_name='context'" if "CP" in draw.strategy else ""
        lines.append(
            f"rules = kd.tensor_parallel_layout_map(build, mesh, 'model', sequence_parallel={'SP' in draw.strategy}"
            f"{context}, batch=x)"
        )
    if draw.strategy == "rules":
        size = int(re.search(r"model:(\d+)", draw.mesh)[1])
        lines += [
            "rules = kd.LayoutMap(mesh)",
            "with kd.deferred():",
            "    weights = build().trainable_variables",
            "for v in weights:",
            f"    dims = [dim for dim, size in enumerate(v.shape) if size % {size} == 0][-1:]",
            "    rules[v.path] = ['model' if dim in dims else None for dim in range(len(v.shape))]",
        ]
    kind, first = {
        "DP": ("DataParallel", "mesh"),
        "ZeRO-1": ("DataParallel", "mesh"),
        "CP": ("DataParallel", "mesh"),
        "FSDP": ("FullyShardedDataParallel", "mesh"),
        "HSDP": ("FullyShardedDataParallel", "mesh"),
        "CP x FSDP": ("FullyShardedDataParallel", "mesh"),
        "FSDP x TP": ("FullyShardedDataParallel", "layout_map=rules, strict=True"),
    }.get(draw.strategy, ("ModelParallel", f"layout_map=rules, strict=True, {batch}"))
    arguments = f", {draw.strategy_arguments}" if draw.strategy_arguments else ""
    lines.append(f"return kd.{kind}({first}{arguments})")
    return "\n".join(f"    {line}" for line in lines)
