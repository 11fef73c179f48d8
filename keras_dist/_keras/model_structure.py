"""The layers of a model, their weights, the graphs of functional models, and why a model is not compiled."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import keras

from keras_dist._keras.internals import missing_names_are_errors, stored_dtype

with missing_names_are_errors():
    from keras.src.models import functional
    from keras.src.utils.naming import to_snake_case

# Keras excludes them from compilation since TensorFlow's compiler lacks an operation that JAX's has.
_COMPILED_BY_JAX = (
    *(keras.layers.RandomPerspective, keras.layers.RandomRotation, keras.layers.RandomShear),
    *(keras.layers.RandomTranslation, keras.layers.RandomZoom),
)


def child_layers(layer) -> list:
    """Returns the layers that a layer consists of, without theirs."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def all_layers(layer) -> list:
    """Returns a layer and all layers in it."""
    return list(layer._flatten_layers())


def layers_with_weights(layer) -> list:
    """Returns those of a layer and all layers in it that train weights of their own."""
    return [each for each in all_layers(layer) if each._trainable_variables]


def functional_graph(layer) -> Any:
    """Returns the functional model of which a layer consists, such as that of a sequential model; else the layer."""
    return getattr(layer, "_functional", None) or layer


def graph_nodes(graph) -> list | None:
    """Returns the calls of a functional model in order, without those of inputs; None for other layers."""
    if not hasattr(graph, "_nodes_by_depth"):
        return None
    nodes = [node for depth in sorted(graph._nodes_by_depth, reverse=True) for node in graph._nodes_by_depth[depth]]
    return [node for node in nodes if node.operation and not node.is_input]


def direct_variables(layer) -> list:
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _with_paths(layer, as_keras: bool, owner: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yields a layer and all layers in it, each once, with its path: that of its owner, and its own name.

    With `as_keras`, a layer that was called has the path that Keras gave it at its first call.
    """
    seen = set() if seen is None else seen
    if id(layer) not in seen:
        seen.add(id(layer))
        parent = layer._parent_path if as_keras and layer._parent_path is not None else owner
        path = f"{parent}/{layer.name}" if parent else layer.name
        yield path, layer
        for inner in child_layers(layer):
            yield from _with_paths(inner, as_keras, path, seen)


def weight_paths(model) -> dict[int, str]:
    """Returns the path of each weight by its id, from the names of the model and of all layers that contain it."""
    paths: dict[int, str] = {}
    for path, layer in _with_paths(model, as_keras=False):
        for variable in direct_variables(layer):
            paths.setdefault(id(variable), f"{path}/{variable.name}")
    return paths


def why_not_compiled(model: keras.Model) -> str | None:
    """Returns the layer because of which Keras does not compile a model, and the fix; None if it is not a layer."""
    layers = [layer for layer in model._flatten_layers() if not layer.supports_jit]
    if not layers or model.run_eagerly or model.jit_compile:
        return None
    layer = next((layer for layer in layers if not isinstance(layer, _COMPILED_BY_JAX)), layers[0])
    fix = (
        "JAX can compile this layer: set supports_jit = True on it before model.compile()"
        if isinstance(layer, _COMPILED_BY_JAX)
        else "Remove it from the model, and apply it to the data before fit"
    )
    return f"Keras does not compile models that contain layer {layer.name!r} ({type(layer).__name__}). {fix}."


def seed_generator_states(model) -> list:
    return [generator.state for layer in model._flatten_layers() for generator in layer._seed_generators]


def automatic_names(model) -> set[str]:
    """Returns the names that Keras gives to a model and its layers where the user gives none, without numbers."""
    return {to_snake_case(type(layer).__name__) for layer in model._flatten_layers()}


def pack_outputs(graph, outputs: list) -> Any:
    return keras.tree.pack_sequence_as(graph._outputs_struct, outputs)


def last_layers(model) -> list:
    """Returns the layers that compute the outputs of a functional or sequential model; none for other models."""
    _, outputs = inputs_and_outputs(model)
    return [tensor._keras_history.operation for tensor in jax.tree.leaves(outputs)]


def embedding_table(layer) -> Any:
    return layer._embeddings


def reversible_embeddings(model) -> set[int]:
    """Returns the ids of the embedding tables that can also be used as an output head (ReversibleEmbedding)."""
    return {id(embedding_table(layer)) for layer in model._flatten_layers() if hasattr(layer, "tie_weights")}


def tied_tables(model) -> set[int]:
    """Returns the ids of the tables in which layers look up rows and with which they may multiply.

    A tied `ReversibleEmbedding` only looks up rows where all that a model computes is a graph that says so.
    """
    layers = list(model._flatten_layers())
    graphs = functional.Functional, keras.Sequential
    is_graph = all(isinstance(layer, graphs) for layer in layers if isinstance(layer, keras.Model))
    parents = [layer for layer in layers if not isinstance(layer, keras.Model)]
    used_by_layers = {id(part) for parent in parents for part in parent._layers}

    def only_looks_up(layer) -> bool:
        nodes = layer._inbound_nodes
        reverses = any(len(n.arguments.args) > 1 or n.arguments.kwargs.get("reverse") for n in nodes)
        return is_graph and bool(nodes) and not reverses and id(layer) not in used_by_layers

    tied = [each for each in layers if isinstance(each, keras.layers.ReversibleEmbedding) and each.tie_weights]
    return {id(embedding_table(layer)) for layer in tied if not only_looks_up(layer)}


def casts_rows_to_fewer_bytes(layer) -> bool:
    table_dtype = jax.numpy.dtype(stored_dtype(embedding_table(layer)))
    return jax.numpy.dtype(layer.compute_dtype).itemsize < table_dtype.itemsize


def is_built(model) -> bool:
    """Returns whether a model and all its layers are built. `model.built` alone can be True with unbuilt layers.

    A functional model consists of the layers of its graph. Others that it has need not be built: the preprocessor of a
    task of KerasHub is so when it has first been called.
    """
    parts = model.layers if isinstance(model, functional.Functional) else [model]
    return model.built and all(layer.built for part in parts for layer in part._flatten_layers())


def layers_by_path(model) -> dict[str, Any]:
    """Returns a model and all its layers by path, as Keras spells it when it asks for layouts of outputs."""
    layers: dict[str, Any] = {}
    for path, layer in _with_paths(model, as_keras=True):
        layers.setdefault(path, layer)
    return layers


def inputs_and_outputs(model) -> tuple:
    """Returns the structures of symbolic inputs and outputs of a functional or sequential model, else Nones."""
    graph = functional_graph(model)
    return getattr(graph, "_inputs_struct", None), getattr(graph, "_outputs_struct", None)


def name_without_number(model) -> str | None:
    """Returns the name of a model without the number that Keras appends; None if Keras has not chosen the name."""
    name = to_snake_case(type(model).__name__)
    return name if re.fullmatch(rf"{re.escape(name)}(_\d+)?", model.name) else None


def compute_dtypes(model) -> dict[int, str]:
    """Returns the dtype in which layers compute with a weight, the widest of several, by the id of the weight."""
    found: dict[int, str] = {}
    for layer in model._flatten_layers():
        # Embeddings read their table as it is, and cast the rows.
        casts = layer.autocast or isinstance(layer, keras.layers.Embedding)
        for each in direct_variables(layer):
            dtype = layer.compute_dtype if casts else stored_dtype(each)
            found[id(each)] = max(found.get(id(each), dtype), dtype, key=lambda name: jax.numpy.dtype(name).itemsize)
    return found


def may_have_experts(layer: keras.Layer) -> bool:
    """Whether a layer has a weight (E, inputs, outputs) and one (inputs, E) or (outputs, E), as a router's is."""
    shapes = {tuple(variable.shape) for variable in layer.weights}
    return any(len(shape) == 3 and any((size, shape[0]) in shapes for size in shape[1:]) for shape in shapes)
