"""FLOP and memory traffic of one instruction."""

import math
import re

from keras_dist.planning.hlo.kernel_costs import fractions_of_grouped_product, kernel_flops
from keras_dist.planning.hlo.parser import Computation, Instruction, Module
from keras_dist.planning.hlo.shapes import Array, bits, leaves, numbers

# Instructions without memory traffic of their own: aliases, and callers of computations that are counted themselves.
FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "async",
    "after-all", "add-dependency", "domain", "opt-barrier", "partition-id", "replica-id", "infeed", "outfeed",
    "get-dimension-size",
})  # fmt: skip
# Custom calls of the TPU compiler that only allocate, alias or annotate. ZeroCrop pads in place.
_ASYNC_START, _ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_FREE_CUSTOM_CALLS = frozenset({"PrepareAsyncCallStart", "PrepareAsyncCallDone",
    "AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "SliceId",
    "ZeroCrop", _ASYNC_START, _ASYNC_DONE,
})  # fmt: skip
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})


def flops(computation: Computation, instruction: Instruction) -> tuple[str, float] | None:
    """Returns the wider operand's element type and the FLOP (2 per multiply-add) of a dot or convolution, else None.

    A convolution counts multiply-adds with elements of the image, not with padding or with the gaps of a dilated image.
    So a forward pass and each of its two gradients cost the same, and a dot that TPUs write as a dilated convolution
    costs as much as the dot.

    Source: `HandleDot` and `HandleConvolution` of XLA's `HloCostAnalysis` count the same multiply-adds.
    """
    target = instruction.target
    if target and (flops := kernel_flops(computation, instruction)):
        return flops
    is_dot = instruction.opcode in ("dot", "ragged-dot") or target.startswith(("__cublas$", "__onednn$matmul"))
    is_convolution = instruction.opcode == "convolution" or target.startswith("__cudnn$conv")
    operands = (next(leaves(shape), None) for shape in computation.operand_shapes(instruction))
    left, right = (*operands, None, None)[:2]
    if target == "tpu_custom_call":
        # A Pallas kernel has a cost estimate if its author gave one. That of a grouped product is for padding, too.
        estimate = re.search(r'"cost_estimate":\{[^{}]*?"flops":"?(\d+)', instruction.backend_config)
        fraction, _ = fractions_of_grouped_product(computation, instruction)
        return (left.dtype, fraction * float(estimate[1])) if estimate and left else None
    if not (is_dot or is_convolution) or left is None or right is None:
        return None
    result = next(leaves(instruction.shape))  # a library call returns its scratch space too
    if is_dot:
        multiply_adds = result.elements * _contracted(instruction, left, target)
    elif target.startswith("__cudnn$convBackwardInput"):
        multiply_adds = _convolution(instruction, result, right, left)
    elif target.startswith("__cudnn$convBackwardFilter"):
        multiply_adds = _convolution(instruction, left, result, right)
    else:
        multiply_adds = _convolution(instruction, left, right, result)
    return max(left.dtype, right.dtype, key=bits), 2.0 * multiply_adds


def is_opaque(instruction: Instruction) -> bool:
    """Whether an instruction is a custom call that computes an unknown number of FLOP."""
    target = instruction.target
    known = target in _FREE_CUSTOM_CALLS or target.startswith(("__cublas$", "__cudnn$conv", "__onednn$matmul"))
    return bool(target) and not known and '"cost_estimate"' not in instruction.backend_config


def _contracted(instruction: Instruction, left: Array, target: str) -> int:
    """Number of products in the sum that gives one element of a dot's result."""
    if not target:
        return math.prod(left.dims[dim] for dim in instruction.integers("lhs_contracting_dims"))
    contracting_dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.backend_config)
    if contracting_dims:
        return math.prod(left.dims[dim] for dim in numbers(contracting_dims[1]))
    return left.dims[-2 if '"transpose_a":true' in instruction.backend_config else -1]


def _convolution(instruction: Instruction, image: Array, kernel: Array, result: Array) -> int:
    """Multiply-adds of a convolution of an image with a kernel."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels") or "")
    if not labels:
        return 0
    window, spatial = instruction.attribute("window") or "", sorted(set(labels[1]) - {"b", "f"})
    labelled = zip(labels.groups(), (image, kernel, result), strict=True)
    image_sizes, kernel_sizes, result_sizes = (dict(zip(names, array.dims, strict=False)) for names, array in labelled)

    def values(key: str, default: int) -> list[int]:
        match = re.search(rf"\b{key}=(\S+?)[\s}}]", window)
        return [int(part.split("_")[0]) for part in match[1].split("x")] if match else [default] * len(spatial)

    sizes = ([dims[label] for label in spatial] for dims in (image_sizes, kernel_sizes, result_sizes))
    options = values("stride", 1), values("pad", 0), values("lhs_dilate", 1), values("rhs_dilate", 1)
    # The kernel's input features are those of one group.
    return result_sizes["b"] * result_sizes["f"] * kernel_sizes["i"] * math.prod(map(taps, *sizes, *options))


def taps(image: int, kernel: int, result: int, stride: int, pad: int, image_dilation: int, kernel_dilation: int) -> int:
    """Pairs of an output position and a kernel position, along one dim, that hit an element of the image."""
    common = math.gcd(stride, image_dilation)
    period = image_dilation // common
    pairs = 0
    for position in range(kernel):
        # The output at p reads the dilated image at p * stride + shift, which must be one of the image's elements.
        shift = position * kernel_dilation - pad
        low = max(0, -(shift // stride))
        high = min(result - 1, ((image - 1) * image_dilation - shift) // stride)
        if high < low or shift % common:
            continue
        first = (-shift // common) * pow(stride // common, -1, period) % period
        pairs += (high - first) // period - (low - 1 - first) // period
    return pairs


def memory_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Estimates the bytes that an instruction outside of fusions reads from and writes to device memory.

    A slice reads only the slice, and an in-place update reads and writes only the update. A grouped product of few
    rows reads the weights of as many experts. Values in other memories (VMEM of a TPU, the host) cause no traffic, but
    copies to and from them do. Caches are ignored.

    On CPUs this agrees with XLA's `cost_analysis()["bytes accessed"]` within 0.01% for 34 of 35 programs without loops;
    for one XLA reports twice as much, because it counts the full operand of a fused slice. On TPUs XLA also counts
    VMEM, and asynchronous copies both at their start and at their end. With VMEM included, this estimate is 0.65 to
    1.00 of XLA's (v5e and v5p, 33 programs each), and equal for the half of them without such copies.
    """
    opcode = instruction.base_opcode
    if opcode in ("send", "recv"):
        # The results are the array that is sent or received, scalars and tokens.
        array = next(leaves(instruction.shape))
        return array.stored_bytes if array.is_in_memory else 0
    if opcode in FREE or opcode.endswith(("-done", "-update")) or instruction.target in _FREE_CUSTOM_CALLS:
        return 0
    operands = computation.operand_shapes(instruction)
    sizes = [sum(leaf.stored_bytes for leaf in leaves(shape) if leaf.is_in_memory) for shape in operands]
    written = written_arrays(module, computation, instruction)
    size_of_result = sum(update.stored_bytes for array, update in written if array.is_in_memory)
    if opcode in _SLICES:
        read = sum(leaf.stored_bytes for leaf in _results(instruction)) if sizes and sizes[0] else 0
        sizes = [read, *sizes[1:]]
    elif opcode == "dynamic-update-slice":
        sizes = sizes[1:]
    elif opcode == "scatter":
        # scatter(arrays..., indices, updates...) reads and writes only the elements that it updates.
        arrays = (len(sizes) - 1) // 2
        sizes, size_of_result = sizes[arrays:], sum(sizes[arrays + 1 :]) if size_of_result else 0
    elif instruction.target == "tpu_custom_call":
        _, fraction = fractions_of_grouped_product(computation, instruction)
        sizes = [
            size * (fraction if isinstance(shape, Array) and len(shape.dims) == 3 else 1.0)
            for size, shape in zip(sizes, operands, strict=True)
        ]
    elif opcode == "fusion":
        fused = module.called(instruction)
        sizes = [min(size, _read(module, fused, fused.parameters[number].name)) for number, size in enumerate(sizes)]
    return size_of_result + sum(sizes)


def host_copy(computation: Computation, instruction: Instruction) -> tuple[float, bool] | None:
    """Returns the bytes that an instruction copies from host memory to the device, or back, and whether to the host."""
    opcode = instruction.base_opcode
    if opcode not in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
        return None
    source = next(leaves(computation.operand(instruction, 0).shape))
    if opcode == "dynamic-update-slice":
        update = next(leaves(computation.operand(instruction, 1).shape))
        return (update.bytes, source.is_on_host) if update.is_on_host != source.is_on_host else None
    arrays = list(leaves(instruction.shape))
    # The start of a copy returns the result, the source and its state; that of a slice the source first.
    result = arrays[-2] if instruction.opcode.endswith("slice-start") else arrays[0]
    return (result.bytes, result.is_on_host) if result.is_on_host != source.is_on_host else None


def written_arrays(module: Module, computation: Computation, instruction: Instruction) -> list[tuple[Array, Array]]:
    """Returns the resulting arrays of an instruction, each with what is written: the update if it is updated in place.

    Values that a fusion only passes through are left out. The start of an asynchronous instruction returns the arrays
    that it will write.
    """
    arrays = _results(instruction)
    if instruction.base_opcode != "fusion":
        update = _update_in_place(module, computation, instruction)
        return [(array, update or array) for array in arrays]
    fused = module.called(instruction)
    root = fused.instructions[fused.root]
    if root.target in (_ASYNC_START, _ASYNC_DONE):
        # The start of a fragmented collective also returns its operand; its end returns what is already written.
        return [(array, array) for array in arrays[1:]] if root.target == _ASYNC_START else []
    parts = [fused.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(parts) != len(arrays):
        return [(array, array) for array in arrays]
    return [
        (array, _update_in_place(module, fused, part) or array)
        for array, part in zip(arrays, parts, strict=True)
        if part.opcode != "parameter" and not _is_later_fragment(fused, part)
    ]


def _results(instruction: Instruction) -> list[Array]:
    shape = instruction.shape
    if not instruction.opcode.endswith("-start") or isinstance(shape, Array) or instruction.base_opcode == "all-reduce":
        arrays = list(leaves(shape))
        # A library returns its scratch space last, of which it uses what the shapes that it multiplies need.
        has_scratch = instruction.target.startswith(("__cublas$", "__cudnn$")) and arrays[-1].dtype in ("s8", "u8")
        return arrays[:-1] if has_scratch and len(arrays) > 1 else arrays
    # (result, operand, context) for copies, ((operands), result, context...) for the others.
    return list(leaves(shape[0 if instruction.base_opcode == "copy" else 1]))


def chain(instruction: Instruction) -> tuple[str, str | None] | None:
    """Returns a key shared by the fragments that TPUs split one collective into; None for an unfragmented one."""
    match = re.search(r'[{,]chain_id="([^"]*)"', instruction.attribute("frontend_attributes") or "")
    return (match[1], instruction.attribute("channel_id")) if match else None


def starts_chain(computation: Computation) -> bool:
    """Whether a fusion contains the first fragment of a collective."""
    return computation.instructions[computation.root].target == _ASYNC_START


def _is_later_fragment(fused: Computation, instruction: Instruction) -> bool:
    return chain(instruction) is not None and not starts_chain(fused)


def _read(module: Module, fused: Computation, name: str) -> float:
    """Bytes that a fusion reads of a value: the sum of its slices, or infinity if it reads all of the value."""
    total = 0.0
    for user in fused.users.get(name, []):
        opcode = user.opcode
        is_first = user.operands.index(name) == 0 and user.operands.count(name) == 1
        is_passed_through = (opcode == "tuple" and user.name == fused.root) or user.target == _ASYNC_DONE
        if is_passed_through or _is_later_fragment(fused, user) or (opcode == "dynamic-update-slice" and is_first):
            continue
        if opcode == "bitcast" or (opcode == "fusion" and _is_bitcast(module.called(user))):
            total += _read(module, fused, user.name)
        elif opcode == "get-tuple-element":
            total += sum(leaf.stored_bytes for leaf in leaves(user.shape))
        elif opcode in _SLICES and is_first:
            # TPUs convert what a slice reads.
            (part,), (source,) = leaves(user.shape), leaves(fused.instructions[name].shape)
            total += part.stored_bytes * bits(source.dtype) / bits(part.dtype)
        elif opcode == "fusion":
            inner = module.called(user)
            parameters = [inner.parameters[n] for n, operand in enumerate(user.operands) if operand == name]
            total += sum(_read(module, inner, parameter.name) for parameter in parameters)
        else:
            return math.inf
    return total


def _is_bitcast(fused: Computation) -> bool:
    return all(each.opcode in ("parameter", "bitcast") for each in fused.instructions.values())


def _update_in_place(module: Module, computation: Computation, instruction: Instruction) -> Array | None:
    """The update, if an instruction updates a slice of its operand in place."""
    while instruction.opcode == "bitcast":
        instruction = computation.operand(instruction, 0)
    if instruction.opcode == "fusion":
        fused = module.called(instruction)
        return _update_in_place(module, fused, fused.instructions[fused.root])
    if instruction.opcode != "dynamic-update-slice":
        return None
    return next(leaves(computation.operand(instruction, 1).shape))
