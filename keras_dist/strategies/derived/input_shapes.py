"""The shapes of a model's inputs to trace it with: those of a batch that the user passes, or sizes to try."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras

Shape = tuple[int | None, ...]

# Sizes to try for an unknown dim: this or less, then a few more, such as samples of audio.
_LENGTH, LONG_LENGTHS = 128, (256, 1024, 4096)


def is_shape(value: Any) -> bool:
    """Whether a value is a shape: a tuple of sizes, some of which may be None."""
    sizes = [size for size in value if size is not None] if isinstance(value, tuple) else []
    return len(sizes) > 0 and all(isinstance(size, int) for size in sizes)


def is_spec(value: Any) -> bool:
    """Whether a value gives the shape of an array: a shape, an array or a `jax.ShapeDtypeStruct`."""
    return is_shape(value) or hasattr(value, "shape")


def symbolic(specs: Any) -> Any:
    """Returns the tensors of Keras with these shapes and dtypes, on which models and layers can be called."""
    return jax.tree.map(lambda spec: keras.KerasTensor(spec.shape, str(spec.dtype)), specs)


def is_full(shape: Shape) -> bool:
    """Whether a shape has all sizes, and rows; another dim may be empty, as of a prompt that is not given."""
    return shape[:1] != (0,) and all(size is not None and size >= 0 for size in shape)


def advice_on_batch(inputs: Any) -> str:
    """Returns a sentence that shows the argument `batch` for a model of these symbolic inputs, None if not known."""
    if inputs is None:
        example = "batch=(1, 128), or batch={'a': (1, 128), 'b': (1, 128)} for arguments a and b"
        return f"Pass the shapes that it is called on, the number of rows first, for example {example}."
    shapes = [(*(rows or 1 for rows in tensor.shape[:1]), *tensor.shape[1:]) for tensor in jax.tree.leaves(inputs)]
    example = dict(zip(_names(inputs), shapes, strict=True)) if len(shapes) > 1 else shapes[0]
    return f"Pass batch={example}, with a size for each None." if "None" in str(example) else f"Pass batch={example}."


def batch_specs(inputs: Any, batch: Any, axis_size: int) -> Any:
    """Returns `jax.ShapeDtypeStruct`s for x of a batch, which is x, (x, y) or (x, y, sample_weight).

    The number of rows is multiplied so that `axis_size` divides it. `inputs` are the model's symbolic inputs, None if
    they are not known. Raises ValueError if x gives no shapes; whether they fit the model, it decides itself.

    Example:

    >>> inputs = [keras.Input((None,), name="tokens"), keras.Input((None, 8, 8, 3), name="images")]
    >>> batch = {"tokens": (2, 32), "images": (2, 1, 8, 8, 3)}
    >>> jax.tree.map(lambda spec: spec.shape, batch_specs(inputs, batch, axis_size=4))
    {'images': (4, 1, 8, 8, 3), 'tokens': (4, 32)}
    """
    x: Any = batch[0] if isinstance(batch, tuple) and batch and not is_shape(batch) else batch
    names = _names(inputs) if isinstance(x, dict) and inputs is not None else []
    missing = [name for name in names if name not in x]
    if names and not missing:
        x = {name: x[name] for name in names}  # fit ignores other entries, too
    leaves, structure = jax.tree.flatten(x, is_leaf=is_spec)
    shapes = [tuple(leaf if is_shape(leaf) else leaf.shape) for leaf in leaves if is_spec(leaf)]
    if missing or not shapes or len(shapes) < len(leaves) or not all(map(is_full, shapes)):
        fault = f"this one has no {missing}" if missing else f"got {str(batch)[:200]} ({type(batch).__name__})"
        raise ValueError(
            f"A batch must give the shape of each input, with the number of rows first, but {fault}. "
            f"{advice_on_batch(inputs)}"
        )
    are_rows_fixed = any(tensor.shape[:1] != (None,) for tensor in jax.tree.leaves(inputs))
    numbers = [rows for shape in shapes for rows in shape[:1]]
    factor = 1 if are_rows_fixed else axis_size // math.gcd(axis_size, *numbers)

    def spec(leaf: Any, shape: tuple, tensor: Any) -> jax.ShapeDtypeStruct:
        known = getattr(tensor, "dtype", keras.config.floatx()) if is_shape(leaf) else leaf.dtype
        dtype = jax.dtypes.canonicalize_dtype(keras.backend.standardize_dtype(known))
        return jax.ShapeDtypeStruct((*(rows * factor for rows in shape[:1]), *shape[1:]), dtype)

    return jax.tree.unflatten(structure, list(map(spec, leaves, shapes, counterparts(x, inputs))))


def counterparts(values: Any, known: Any) -> list[Any]:
    """Returns, for each array or shape of a structure, what has its name or else its place in another; None if nothing.

    >>> inputs = [keras.Input((4,), name="a"), keras.Input((4,), dtype="int32", name="b")]
    >>> [tensor.dtype for tensor in counterparts({"b": (1, 4), "a": (1, 4)}, inputs)]  # JAX sorts keys
    ['float32', 'int32']
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(values, is_leaf=is_spec)[0]]
    leaves = jax.tree.leaves(known)
    named: dict[Any, Any] = dict(zip(_names(known), leaves, strict=True))
    placed = leaves if len(leaves) == len(paths) else [None] * len(paths)
    return [
        named.get(getattr(path[0], "key", None), leaf) if len(path) == 1 else leaf
        for path, leaf in zip(paths, placed, strict=True)
    ]


def _names(inputs: Any) -> list[str]:
    """Returns a name for each symbolic input of a model: its key in a dict, else the name of its tensor."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(inputs)
    return [getattr(path[0] if path else None, "key", getattr(tensor, "name", "")) for path, tensor in leaves]


def candidate_shapes(shapes: Sequence[Shape], axis_size: int) -> Iterator[list[tuple[int, ...]]]:
    """Yields shapes without unknown dims.

    Dim 0, the batch, has the axis's size. At first all other unknown dims have one size, since inputs that belong
    together (tokens and their mask) must agree. Then one input of rank 4 or more has a single element in dim 1 (one
    image for all tokens), whatever the others have, and then none (no mask to start from). At last come lengths that
    the axis does not divide (a text encoder with fewer positions than the axis has devices), and a single row.

    Example:

    >>> for shapes in candidate_shapes([(None, None), (None, 3)], axis_size=64):
    ...     print(shapes)
    [(64, 128), (64, 3)]
    [(64, 64), (64, 3)]
    [(64, 256), (64, 3)]
    [(64, 1024), (64, 3)]
    [(64, 4096), (64, 3)]
    [(64, 32), (64, 3)]
    [(1, 128), (1, 3)]
    [(1, 64), (1, 3)]
    [(1, 32), (1, 3)]
    """

    def filled(shapes: Sequence[Shape], size: int, rows: int = axis_size) -> list[tuple[int, ...]]:
        return [
            tuple((size if dim else rows) if known is None else known for dim, known in enumerate(shape))
            for shape in shapes
        ]

    if not any(None in shape[1:] for shape in shapes):
        yield filled(shapes, 0)
        return
    multiples = [2**power * axis_size for power in reversed(range(max(1, (_LENGTH // axis_size).bit_length())))]
    yield from (filled(shapes, size) for size in multiples)
    others = [2**power for power in range(8, -1, -1)]
    for elements in (1, 0):
        for size in [*multiples, *(size for size in others if size not in multiples)]:
            for number, shape in enumerate(shapes):
                if len(shape) >= 4 and shape[1] is None:
                    special = shape[0], elements, *shape[2:]
                    yield filled([*shapes[:number], special, *shapes[number + 1 :]], size)
    short = 128, 64, 32
    yield from (filled(shapes, size) for size in (*LONG_LENGTHS, *short) if size not in multiples)
    yield from (filled(shapes, size, rows=1) for size in short)
