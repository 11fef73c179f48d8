"""The training step of KerasHub's Llama 3 in plain JAX and in PyTorch, as references for `one_gpu.py`.

Both compute what the model of KerasHub does under `mixed_bfloat16`: float32 weights and AdamW, bfloat16 compute, a tied
embedding, grouped heads, rotary positions, SwiGLU. JAX uses cuDNN's attention on GPUs, PyTorch its own fused attention
and optimizer under `torch.compile`.
"""

import functools
from dataclasses import dataclass
from typing import Any

LEARNING_RATE, BETA_1, BETA_2, ADAM_EPSILON, DECAY, NORM_EPSILON = 1e-4, 0.9, 0.999, 1e-7, 0.004, 1e-6


@dataclass(frozen=True)
class Llama:
    """Sizes of the model and of its batch."""

    vocabulary: int = 32_768
    blocks: int = 8
    width: int = 2048
    heads: int = 32
    key_heads: int = 8
    hidden: int = 8192
    rows: int = 8
    length: int = 2048

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights by name."""
        keys = self.key_heads * self.head_size
        block = {
            "norm1": (self.width,),
            "query": (self.width, self.width),
            "key": (self.width, keys),
            "value": (self.width, keys),
            "output": (self.width, self.width),
            "norm2": (self.width,),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }
        shapes = {"embedding": (self.vocabulary, self.width), "norm": (self.width,)}
        return shapes | {f"{number}/{name}": shape for number in range(self.blocks) for name, shape in block.items()}


# ---------------------------------------------------------------------------------------------------------------- JAX


def jax_loss(weights, tokens, targets, sizes: Llama, attention: str, dtype: str = "bfloat16"):
    """Returns the mean cross entropy of all tokens."""
    import jax
    import jax.numpy as jnp

    def norm(x, scale):
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + NORM_EPSILON)
        return (wide * scale).astype(x.dtype)

    angles = jnp.arange(sizes.length)[:, None] * 10_000.0 ** (-jnp.arange(0, sizes.head_size, 2) / sizes.head_size)
    sine, cosine = (function(angles)[:, None, :].astype(dtype) for function in (jnp.sin, jnp.cos))

    def rotated(x):
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)

    x = jnp.take(weights["embedding"], tokens, axis=0)
    for number in range(sizes.blocks):
        block = {name.partition("/")[2]: value for name, value in weights.items() if name.startswith(f"{number}/")}
        y = norm(x, block["norm1"])
        query, key, value = (
            (y @ block[name]).reshape(*y.shape[:2], -1, sizes.head_size) for name in ("query", "key", "value")
        )
        y = jax.nn.dot_product_attention(rotated(query), rotated(key), value, is_causal=True, implementation=attention)
        x += y.reshape(x.shape) @ block["output"]
        y = norm(x, block["norm2"])
        x += (jax.nn.silu(y @ block["gate"]) * (y @ block["up"])) @ block["down"]
    logits = (norm(x, weights["norm"]) @ weights["embedding"].T).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def jax_step(sizes: Llama, attention: str):
    """Returns the jitted step from state (donated), tokens and targets to the new state and the loss."""
    import jax
    import jax.numpy as jnp

    def step(state, tokens, targets):
        weights = {name: value if "norm" in name else value.astype(jnp.bfloat16) for name, value in state[0].items()}
        loss, gradients = jax.value_and_grad(jax_loss)(weights, tokens, targets, sizes, attention)
        count = state[3] + 1
        scale = LEARNING_RATE * jnp.sqrt(1 - BETA_2**count) / (1 - BETA_1**count)

        def adamw(weight, momentum, velocity, gradient):
            gradient = gradient.astype(jnp.float32)
            momentum += (gradient - momentum) * (1 - BETA_1)
            velocity += (jnp.square(gradient) - velocity) * (1 - BETA_2)
            weight -= weight * (DECAY * LEARNING_RATE)
            return weight - momentum * scale / (jnp.sqrt(velocity) + ADAM_EPSILON), momentum, velocity

        new = {name: adamw(*(part[name] for part in state[:3]), gradients[name]) for name in weights}
        weights, momentums, velocities = ({name: part[i] for name, part in new.items()} for i in range(3))
        return (weights, momentums, velocities, count), loss

    return jax.jit(step, donate_argnums=0)


def jax_state(sizes: Llama) -> Any:
    """Returns the shapes of the state of `jax_step`."""
    import jax

    weights = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in sizes.shapes().items()}
    return weights, weights, weights, jax.ShapeDtypeStruct((), "float32")


def jax_values(sizes: Llama) -> Any:
    """Returns a state of `jax_step`."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def initialize(key):
        state = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), jax_state(sizes))
        shapes = sizes.shapes()
        weights = {
            name: 0.02 * jax.random.normal(each, shapes[name]) if len(shapes[name]) > 1 else jnp.ones(shapes[name])
            for name, each in zip(shapes, jax.random.split(key, len(shapes)), strict=True)
        }
        return weights, *state[1:]

    return initialize(jax.random.key(0))


# ------------------------------------------------------------------------------------------------------------ PyTorch


def torch_step(sizes: Llama, device: str):
    """Returns a function of tokens and targets, NumPy arrays, that trains one step and returns the loss."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            linear = functools.partial(nn.Linear, bias=False)
            keys = sizes.key_heads * sizes.head_size
            self.norms = nn.ModuleList(nn.RMSNorm(sizes.width, NORM_EPSILON) for _ in range(2))
            self.query, self.output = (linear(sizes.width, sizes.width) for _ in range(2))
            self.key, self.value = (linear(sizes.width, keys) for _ in range(2))
            self.gate, self.up = (linear(sizes.width, sizes.hidden) for _ in range(2))
            self.down = linear(sizes.hidden, sizes.width)

        def forward(self, x, sine, cosine):
            def rotated(x):
                first, second = x.chunk(2, -1)
                return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

            y = self.norms[0](x)
            query, key, value = (
                each(y).view(*y.shape[:2], -1, sizes.head_size).transpose(1, 2)
                for each in (self.query, self.key, self.value)
            )
            y = functional.scaled_dot_product_attention(
                rotated(query), rotated(key), value, is_causal=True, enable_gqa=True
            )
            x = x + self.output(y.transpose(1, 2).reshape(x.shape))
            y = self.norms[1](x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
            self.blocks = nn.ModuleList(Block() for _ in range(sizes.blocks))
            self.norm = nn.RMSNorm(sizes.width, NORM_EPSILON)
            nn.init.normal_(self.embedding.weight, std=0.02)

        def forward(self, tokens, targets, sine, cosine):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, sine, cosine)
            logits = functional.linear(self.norm(x), self.embedding.weight)
            return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    torch.set_float32_matmul_precision("high")
    model = Model().to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, (BETA_1, BETA_2), ADAM_EPSILON, DECAY, fused=device == "cuda"
    )
    steps = torch.arange(0, sizes.head_size, 2, device=device) / sizes.head_size
    angles = torch.arange(sizes.length, device=device)[:, None] * 10_000.0**-steps
    sine, cosine = angles.sin().bfloat16(), angles.cos().bfloat16()
    compiled = torch.compile(model)

    def step(tokens, targets):
        tokens, targets = (torch.from_numpy(each).long().to(device, non_blocking=True) for each in (tokens, targets))
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(tokens, targets, sine, cosine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step
