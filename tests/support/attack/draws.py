"""`draw`: everything that a script needs to know, chosen by a seed and a number, and by nothing that is installed."""

import dataclasses
import inspect
from random import Random

from support.attack import functions, models

# In turn, so that as many draws in a row have all of them.
STRATEGIES = ("DP", "ZeRO-1", "FSDP", "HSDP", "TP", "TP, SP", "FSDP x TP", "rules", "CP", "CP x FSDP", "CP x TP, SP")

MESHES = {
    "DP": ("data:8", "data:4", "data:3", "data:2", "data:7", "data:1"),
    "ZeRO-1": ("data:8", "data:4", "data:5"),
    "FSDP": ("fsdp:8", "fsdp:4", "fsdp:2", "fsdp:6"),
    "HSDP": ("replica:2,fsdp:4", "replica:4,fsdp:2", "replica:3,fsdp:2", "replica:2,fsdp:2"),
    "TP": ("data:4,model:2", "data:2,model:4", "data:2,model:2", "data:1,model:2", "data:3,model:2"),
    "TP, SP": ("data:4,model:2", "data:2,model:4", "data:2,model:2"),
    "FSDP x TP": ("data:4,model:2", "data:2,model:2", "data:2,model:4"),
    "rules": ("data:4,model:2", "data:2,model:4", "model:4,data:1"),
    "CP": ("data:2,context:4", "data:4,context:2", "data:2,context:2", "data:1,context:3"),
    "CP x FSDP": ("data:2,context:4", "data:4,context:2", "data:2,context:2"),
    "CP x TP, SP": ("data:2,context:2,model:2", "data:1,context:2,model:2", "data:1,context:4,model:2"),
}

OPTIMIZERS = (
    "SGD(0.05{})",
    "SGD(0.05, momentum=0.9, nesterov=True{})",
    "RMSprop(0.01, momentum=0.5, centered=True{})",
    "Adam(0.01{})",
    "Adam(0.01, amsgrad=True{})",
    "Adam(keras.optimizers.schedules.CosineDecay(0.01, 10, warmup_target=0.02, warmup_steps=2){})",
    "AdamW(0.01{})",
    "Adadelta(0.5{})",
    "Adagrad(0.05{})",
    "Adamax(0.01{})",
    "Adafactor(0.01{})",
    "Nadam(0.01{})",
    "Ftrl(0.05, l1_regularization_strength=0.001{})",
    "Lion(0.001{})",
    "Lamb(0.01{})",
    "Muon(0.01{})",
    "ScheduleFreeAdamW(0.01{})",
)
ARGUMENTS = (
    "use_ema=True, ema_momentum=0.8",
    "use_ema=True, ema_overwrite_frequency=2",
    "gradient_accumulation_steps=2",
    "gradient_accumulation_steps=3, use_ema=True",
    "clipnorm=0.5",
    "global_clipnorm=0.5",
    "clipvalue=0.1",
    "weight_decay=0.02",
)
CALLBACKS = (
    "keras.callbacks.EarlyStopping('loss', patience=0, restore_best_weights=True)",
    "keras.callbacks.ReduceLROnPlateau('loss', patience=0)",
    "keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (1 + epoch))",
    "keras.callbacks.ModelCheckpoint(f'{folder}/best.keras', 'loss', save_best_only=True)",
    "keras.callbacks.BackupAndRestore(f'{folder}/backup')",
    "keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: logs['loss'])",
)
MICROBATCHES = ("microbatches=2", "microbatches=3", "microbatches=2, reduce_gradients='microbatch'")
DTYPES = ("optimizer_state_dtype='bfloat16'", "reduce_dtype='float32'", "reduce_dtype='bfloat16'")
REMATS = ("remat='full'", "remat='dots'", "remat='dots', offload='activations'", "remat='attention'", "remat='auto'")
# Of logits of each token.
LOSSES = (
    models.CLASSES,
    models.CLASSES.replace(")", ", ignore_class=3)"),
    "with_z_loss",
    "focal",
    "bounded",
)
TOP_K = '["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3)]'
SOURCES = ("arrays", "arrays", "arrays", "tf.data", "PyDataset", "generator", "grain")

FIT = "yield 'fit', model.fit({data}, verbose=0{fit}).history"
CALLS = (
    "yield 'evaluate', model.evaluate({data}, verbose=0, return_dict=True)",
    "yield 'predict', model.predict(first({some}), batch_size={batch}, verbose=0)",
    "yield 'train_on_batch', model.train_on_batch(*first({some}, (x, y{weight})), return_dict=True)",
    "yield 'test_on_batch', model.test_on_batch(*first({some}, (x, y{weight})), return_dict=True)",
    "yield 'predict_on_batch', model.predict_on_batch(first({some}))",
    "yield 'call', model(first({some}))",
    "model.save(f'{{folder}}/model.keras'); model = keras.saving.load_model(f'{{folder}}/model.keras')",
    "model.save_weights(f'{{folder}}/w.weights.h5'); model = build(); model(first(1)); "
    "model.load_weights(f'{{folder}}/w.weights.h5')",
    "model.set_weights([0.9 * w if w.dtype.kind == 'f' else w for w in model.get_weights()])",
    "model.layers[-1].trainable = False; compile(model)",
    "model.optimizer.learning_rate = 0.003",
    "move(model, {moved})",
)
# With a distribution, the second half of the training is that of another model, which goes on from a checkpoint.
RESUME = "model = resume(model, x, y, batch_size={batch}, shuffle=False, verbose=0)"
MOVED = (
    "None",
    "kd.DataParallel()",
    "kd.DataParallel(kd.create_device_mesh('data:3', devices=3), shard_optimizer_state=True)",
    "kd.FullyShardedDataParallel(min_shard_bytes=0)",
    "kd.FullyShardedDataParallel(kd.create_device_mesh('replica:2,fsdp:2', devices=4), min_shard_bytes=0)",
)


# By policy: the largest error, relative to the largest number of an array. If it is exceeded, the model runs again on
# one device, with the second number as relative noise in its first weights: how far rounding takes it is measured, not
# guessed. Options that round to bfloat16 are compared as bfloat16 is, and float64 as float32: Keras computes means,
# losses and batch normalization of float64 in float32.
ROUNDING = {"float32": (1e-5, 1e-7), "float64": (1e-5, 1e-7), "mixed_bfloat16": (2e-2, 4e-3)}


@dataclasses.dataclass(frozen=True)
class Draw:
    """What a script does. Texts are Python expressions, or arguments."""

    seed: int
    number: int
    model: str
    arguments: str
    function: str
    policy: str
    is_x64: bool
    rows: int
    length: int
    source: str
    batch_size: int
    weight: str
    optimizer: str
    loss: str
    metrics: str
    compile_arguments: str
    strategy: str
    mesh: str
    strategy_arguments: str
    calls: tuple[str, ...]
    tolerance: float
    noise: float


def draw(seed, number):
    """Returns the draw of this number; the same one in every process and on every version of anything."""
    random = Random(f"{seed}/{number}")

    def some(chance, values, otherwise=""):
        return random.choice(values) if random.random() < chance else otherwise

    strategy = STRATEGIES[number % len(STRATEGIES)]
    names = [name for name, model in models.MODELS.items() if model.kind == "sequences" or "CP" not in strategy]
    name = random.choices(names, [9 if n == "function" else 0.5 if models.MODELS[n].backbone else 1 for n in names])[0]
    model = models.MODELS[name]
    function, mixes_rows = _function(random) if name == "function" else ("", model.mixes_rows)

    is_x64 = random.random() < 0.1
    policy = random.choice(("float32", "float64")) if is_x64 else some(0.15, ("mixed_bfloat16",), "float32")
    if policy == "mixed_bfloat16" and name in ("function", "experts", "Mixtral", "QwenMoe"):
        policy = "float32"  # Values that bfloat16 rounds to equal ones are in no particular order.

    split = some(0.5, MICROBATCHES) if not mixes_rows and name != "own_step" else ""
    gather = some(0.3, ("gather_weights='update'",)) if split and "FSDP" in strategy else ""
    remat = some(0.5, REMATS) if model.repeats else ""
    dtype = some(0.35, DTYPES) if "reduce_gradients" not in split else ""
    offload = some(0.1, ("offload='optimizer'",)) if "offload" not in remat else ""
    chunk, loss, metrics = _loss(Random(f"{seed}/{number}/loss"), model)
    options = ", ".join(filter(None, (split, gather, remat, dtype, offload, chunk)))

    rows, batch = random.choice((16, 24, 13, 13, 7, 9, 3, 1)), random.choice((8, 8, 16, 5))
    weight = some(0.3, ("sample_weight", "class_weight") if model.y == "classes({rows})" else ("sample_weight",))
    if model.y.startswith(("(", "{")):
        weight = ""  # Several outputs have several weights.
    source = random.choice(SOURCES) if weight != "class_weight" else "arrays"
    compile_arguments = some(0.2, ("steps_per_execution=2", "steps_per_execution=3", "jit_compile=True"))
    if model.kind == "vectors":
        compile_arguments = some(0.08, ("run_eagerly=True",), compile_arguments)
    tolerance, noise = ROUNDING["mixed_bfloat16" if "bfloat16" in dtype else policy]
    return Draw(
        seed=seed,
        number=number,
        model=name,
        arguments=_arguments(random, model, strategy, bool(split)),
        function=function,
        policy=policy,
        is_x64=is_x64,
        rows=rows,
        length=random.choice((8, 8, 12, 9, 5)),
        source=source,
        batch_size=batch,
        weight=weight,
        optimizer=_optimizer(random, some),
        loss=loss,
        metrics=metrics,
        compile_arguments=compile_arguments,
        strategy=strategy,
        mesh=random.choice(MESHES[strategy]),
        strategy_arguments=_strategy_arguments(some, strategy, options),
        calls=_calls(random, some, rows, batch, source, weight),
        tolerance=tolerance,
        noise=noise,
    )


def _function(random):
    """What `Function` computes, and whether it mixes rows."""
    which = random.choice((functions.OF_AN_AXIS, functions.OF_A_ROW, functions.OF_A_ROW, functions.OF_ALL_ROWS))
    axis = random.choice((0, 1, 2))
    text = random.choice(which).format(axis=axis) if which is functions.OF_AN_AXIS else random.choice(which)
    return text, which is functions.OF_ALL_ROWS or (which is functions.OF_AN_AXIS and axis == 0)


def _loss(random, model):
    """How a loss is computed, the loss and the metrics."""
    if model.y != models.TOKENS or random.random() < 0.3:
        return "", model.loss, model.metrics
    chunk = random.choice(("", "loss_chunk=1", "loss_chunk=3", "loss_chunk=16"))
    return chunk, random.choice(LOSSES), random.choice((model.metrics, TOP_K))


def _arguments(random, model, strategy, is_split):
    """Arguments of the function of a model. Rules are derived from models that are built."""
    values = {
        "rate": random.choice(("0.0", "0.2")),
        "whole_batch": "True",
        "is_built": random.choice(("True", "False")),
    }
    if is_split:
        values |= {"rate": "0.0", "whole_batch": "False"}
    if "TP" in strategy or strategy == "rules":
        values |= {"is_built": "True"}
    if model.backbone:
        return f"keras_hub.models.{model.backbone.format(rate=values['rate'])}"
    return ", ".join(f"{name}={values[name]}" for name in inspect.signature(model.build).parameters)


def _optimizer(random, some):
    arguments = some(0.4, ARGUMENTS)
    text = random.choice(OPTIMIZERS).format(f", {arguments}" if arguments else "")
    text = f"keras.optimizers.{text}"
    return some(0.07, (f"keras.optimizers.LossScaleOptimizer({text}, initial_scale=64.0)",), text)


def _strategy_arguments(some, strategy, options):
    arguments = []
    if "FSDP" in strategy or strategy == "HSDP":
        arguments += ["min_shard_bytes=0", some(0.3, ("reshard_after_forward=True",))]
    if strategy == "ZeRO-1" or (strategy == "CP" and some(0.5, ("ZeRO-1",))):
        arguments.append("shard_optimizer_state=True")
    if "CP" in strategy:
        arguments += ["sequence_dim_name='context'", some(0.2, ("sequence_exchange='all_gather'",))]
    if options:
        arguments.append(f"step_options=kd.StepOptions({options})")
    return ", ".join(filter(None, arguments))


def _calls(random, some, rows, batch, source, weight):
    """The calls of a model, the first of which is usually `fit`."""
    fit = {"arrays": f", shuffle={some(0.3, (True,), False)}, epochs={random.choice((1, 2))}"}.get(source, "")
    if source == "generator":
        fit = f", steps_per_epoch={-(-rows // batch)}"
    validation = [", validation_data=(x, y), validation_batch_size=5"]
    if source == "arrays" and rows > 4:
        validation.append(", validation_split=0.25")
    fit += some(0.25, validation) + some(0.2, [f", callbacks=[{callback}]" for callback in CALLBACKS])
    if weight == "class_weight":
        fit += ", class_weight={0: 0.5, 1: 2.0}"
    weighted = weight == "sample_weight"
    fields = {"fit": fit, "batch": batch, "weight": ", weight" if weighted else "", "data": "batches()"}
    if source == "arrays":
        fields["data"] = f"x, y, batch_size={batch}" + (", sample_weight=weight" if weighted else "")
    texts = [FIT, *random.sample(CALLS, random.choice((1, 2, 2, 3))), some(0.3, (FIT,))]
    if random.random() < 0.4:
        random.shuffle(texts)
    if source == "arrays" and not weight:
        texts.insert(0, some(0.1, (RESUME,)))  # the model that goes on is a new one, with nothing frozen
    texts.append(some(0.06, ("model.quantize('int8'); yield 'int8', model.predict(x, verbose=0)",)))
    return tuple(
        text.format(some=random.choice((rows, 8, 7, 1)), moved=random.choice(MOVED), **fields)
        for text in filter(None, texts)
    )
