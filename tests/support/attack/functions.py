"""What the layer `Function` of a draw computes of `x`, (rows, length, 8): sources, with a field for the axis."""

OF_AN_AXIS = """
ops.sort(x, axis={axis})
ops.take_along_axis(x, ops.argsort(x, axis={axis}), axis={axis})
x - ops.median(x, axis={axis}, keepdims=True)
x - ops.quantile(x, 0.3, axis={axis}, keepdims=True)
x - ops.max(x, axis={axis}, keepdims=True)
x / (1 + ops.std(x, axis={axis}, keepdims=True))
x + ops.logsumexp(x, axis={axis}, keepdims=True)
ops.softmax(x, axis={axis})
x + ops.flip(x, axis={axis})
x + ops.roll(x, 1, axis={axis})
ops.cumsum(x, axis={axis})
ops.associative_scan(ops.add, x, axis={axis})
x + ops.take(x, [0], axis={axis})
x + ops.take_along_axis(x, ops.expand_dims(ops.argmin(x, axis={axis}), {axis}), axis={axis})
ops.stack(ops.unstack(x, axis={axis})[::-1], axis={axis})
ops.repeat(x, 2, axis={axis})[:x.shape[0], :x.shape[1], :8]
ops.concatenate([x, ops.tanh(x)], axis={axis})[-x.shape[0]:, -x.shape[1]:, -8:]
x * ops.cast(ops.any(x > 1, axis={axis}, keepdims=True), x.dtype) + ops.expand_dims(ops.amax(x, axis={axis}), {axis})
x / (1 + ops.norm(x, axis={axis}, keepdims=True))
ops.pad(x, [(1, 1)] * 3)[1:-1, 1:-1, 1:-1] + ops.expand_dims(ops.min(x, axis={axis}), {axis})
jnp.sort(x, axis={axis})
jnp.median(x, axis={axis}, keepdims=True) * x
jnp.cumsum(x, axis={axis})
jnp.take(x, jnp.arange(x.shape[{axis}])[::-1], axis={axis})
jax.lax.associative_scan(jnp.maximum, x, axis={axis})
jax.lax.rev(x, ({axis},)) + jnp.roll(x, 2, axis={axis})
x + jax.lax.cummax(x, axis={axis})
""".strip().splitlines()

OF_A_ROW = """
ops.fft2((x, 0 * x))[0]
ops.ifft2(ops.fft2((x, ops.tanh(x))))[1]
ops.irfft(tuple(0.5 * t for t in ops.rfft(x)))
ops.transpose(ops.rfft(ops.transpose(x, (0, 2, 1)))[0], (0, 2, 1))[:, :1] + x
ops.top_k(x, 8)[0]
ops.take_along_axis(x, ops.top_k(x, 8)[1], axis=-1)
ops.segment_sum(ops.reshape(x, (-1, 8)), ops.arange(x.shape[0] * x.shape[1]) // x.shape[1], x.shape[0])[:, None] + x
ops.scatter_update(ops.zeros_like(x), [[0, 0, 0]], x[0, 0, :1]) * 0 + x
ops.slice_update(x, (0, 0, 2), ops.tanh(x[..., :3]))
ops.slice(x, (0, 0, 2), (x.shape[0], x.shape[1], 3)) @ ops.ones((3, 8), x.dtype)
ops.where(x > 0, x, 0.1 * x)
ops.einsum("bld,bmd->blm", x, x) @ x
ops.tril(ops.einsum("bld,bmd->blm", x, x)) @ x
x @ ops.inv(ops.einsum("bld,ble->bde", x, x) + 8 * ops.eye(8))
ops.transpose(ops.solve(ops.einsum("bld,ble->bde", x, x) + 8 * ops.eye(8), ops.transpose(x, (0, 2, 1))), (0, 2, 1))
x @ ops.cholesky(ops.einsum("bld,ble->bde", x, x) + 8 * ops.eye(8))
x + ops.qr(x + 3)[1][:, :1] if x.shape[1] >= 8 else x
ops.sum(ops.extract_sequences(ops.transpose(x, (0, 2, 1)), 2, 1), axis=(2, 3))[:, None] + x
ops.vectorized_map(lambda row: row * ops.max(row), x)
ops.map(lambda row: ops.tanh(row) * ops.sum(row), x)
ops.swapaxes(ops.scan(lambda c, v: (0.5 * c + v, 0.5 * c + v), x[:, 0], ops.swapaxes(x, 0, 1))[1], 0, 1)
ops.fori_loop(0, 3, lambda i, v: ops.tanh(v) + 0.1 * v, x)
ops.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, ops.tanh(v)), (0, ops.stop_gradient(x)))[1] + x
ops.cond(ops.shape(x)[0] > 2, lambda: 2 * x, lambda: x)
ops.image.resize(x[..., None], (4, 8))[:, :1, :, 0] + x
ops.reshape(ops.transpose(ops.reshape(x, (-1, x.shape[1], 2, 4)), (0, 1, 3, 2)), (-1, x.shape[1], 8))
ops.reshape(ops.reshape(x, (-1, 8)) @ ops.ones((8, 8), x.dtype), (-1, x.shape[1], 8))
ops.erf(x) + ops.log1p(ops.exp(x)) + ops.sign(x) * ops.sqrt(1e-2 + ops.abs(x))
ops.logical_and(x > 0, x < 1) * x + ops.cast(ops.floor(4 * x), x.dtype)
x + ops.take(ops.ones((32, 8), x.dtype), ops.cast(ops.clip(4 * x[..., 0], 0, 31), "int32"), axis=0)
x * ops.unravel_index(ops.arange(x.shape[1]) % 4, (2, 2))[0][None, :, None]
ops.stop_gradient(x) + ops.custom_gradient(lambda v: (v * v, lambda *args, upstream=None: upstream))(x)
ops.depthwise_conv(x, ops.ones((3, 8, 1), x.dtype), padding="same")
ops.conv(x, ops.ones((2, 8, 8), x.dtype), padding="same")
ops.average_pool(x, 2, 1, padding="same") + ops.max_pool(x, 3, 1, padding="same")
ops.batch_normalization(x, ops.mean(x[0], axis=0) * 0, ops.ones((8,), x.dtype), axis=-1)
ops.dot_product_attention(*[x[:, :, None]] * 3)[:, :, 0]
ops.stft(ops.transpose(x, (0, 2, 1)), 4, 2, 4)[0][:, :1, 0, :1] + x
jax.lax.scan(lambda c, v: (c * 0.5 + v, c), x[:, 0], x.swapaxes(0, 1))[1].swapaxes(0, 1)
jax.lax.conv_general_dilated(x, jnp.ones((3, 8, 8), x.dtype), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), "SAME")
jax.lax.top_k(x, 8)[0]
jax.lax.dynamic_slice_in_dim(jnp.concatenate([x, x], 1), 1, x.shape[1], axis=1)
jax.vmap(lambda row: row[::-1] - row.mean())(x)
jax.checkpoint(lambda v: jnp.tanh(v @ v.swapaxes(1, 2) @ v))(x)
jax.lax.fori_loop(0, 3, lambda i, v: jnp.tanh(v) + i, x)
jax.lax.map(lambda row: row * row.sum(), x)
jax.nn.one_hot(x.argmax(-1), 8) @ jnp.ones((8, 8)) + jax.nn.gelu(x)
jnp.ones((32, 8))[(x[..., 0] * 4).astype(int) % 32] * x
x.at[:, 0].set(0.0) + x.at[:, ::2].add(1.0)
x.at[..., jnp.array([1, 1, 2])].add(x[..., :3])
jnp.einsum("bld,bmd->blm", x, x) @ x + jnp.linalg.norm(x, axis=-1, keepdims=True)
jnp.real(jnp.fft.ifft(jnp.fft.fft(x, axis=1) * 0.5, axis=1))
jnp.linalg.solve(jnp.einsum("bld,ble->bde", x, x) + 8 * jnp.eye(8), x.swapaxes(1, 2)).swapaxes(1, 2)
jnp.searchsorted(jnp.linspace(-1, 1, 8), x) + x
jnp.tile(x, (1, 2, 1))[:, ::2] + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
""".strip().splitlines()

OF_ALL_ROWS = """
(ops.softmax(ops.matmul(x[:, 0], ops.transpose(x[:, 0]))) @ x[:, 0])[:, None] + x
ops.reshape(ops.sort(ops.reshape(x, (-1, 8)), axis=0), ops.shape(x))
ops.reshape(ops.cumsum(ops.reshape(x, (-1,))), ops.shape(x)) * 0.01
ops.reshape(ops.segment_max(ops.reshape(x, (-1, 8)), ops.arange(x.shape[0] * x.shape[1]) % 3, 3)[:1], (1, 1, 8)) + x
ops.broadcast_to(ops.mean(x, axis=0, keepdims=True), ops.shape(x)) + x[::-1]
x + ops.take(x, ops.argsort(x[:, 0, 0]), axis=0)
x + ops.sum(ops.top_k(ops.reshape(x, (-1,)), 3)[0])
ops.reshape(ops.transpose(x, (1, 0, 2)), ops.shape(x)) + x
x + jnp.bincount(jnp.abs(x[:, 0, 0]).astype(int), length=8)
ops.scatter(ops.arange(x.shape[0])[::-1, None], x, ops.shape(x)) + x
x[jnp.argsort(x[:, 0, 0])] + x
x + x[x.shape[0] // 2]
jnp.zeros((4, 8)).at[jnp.arange(x.shape[0]) % 4].add(x[:, 0])[:1] + x
jnp.concatenate([x[1:], x[:1]]) - x.mean(0)
jax.lax.scan(lambda c, v: (c * 0.5 + v, c), x[0], x)[1]
x.reshape(-1)[::-1].reshape(x.shape)
jnp.roll(x.reshape(-1, 8), 3, axis=0).reshape(x.shape)
jnp.where(jnp.isnan(x), 0, x) + jax.random.normal(jax.random.key(0), x.shape)
jax.lax.cond(x.shape[0] > 2, jnp.tanh, jnp.sin, x)
""".strip().splitlines()
