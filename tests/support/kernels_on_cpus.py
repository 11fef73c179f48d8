"""Makes CPUs compute attention as TPUs or GPUs do."""

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

import keras_dist as kd
from keras_dist.attention import attention
from keras_dist.attention import kernels as attention_kernels

KERNEL = {"tpu": "splash attention", "gpu": "cuDNN"}
DEVICES = {"cpu": jax.devices("cpu"), "tpu": kd.mock_tpus("v5e:2x4"), "gpu": kd.mock_gpus(1, 8)}


def use_kernel_of(platform, monkeypatch):
    """Makes distributions use the kernel of a platform, in a form that CPUs can run.

    The TPU kernel runs in Pallas's interpreter; in the place of cuDNN runs XLA with cuDNN's arguments.
    """
    monkeypatch.setattr(attention, "kernel_platform", lambda mesh: platform)
    monkeypatch.setattr(attention, "_warned", set())
    monkeypatch.setattr(attention_kernels, "_has_capability", lambda capability: platform == "gpu")
    make_kernel = splash_attention_kernel.SplashAttentionKernel

    def in_interpreter(*args, **kwargs):
        return make_kernel(*args, **(kwargs | {"interpret": True}))

    monkeypatch.setattr(splash_attention_kernel, "SplashAttentionKernel", in_interpreter)
    dot_product_attention = jax.nn.dot_product_attention

    def as_cudnn(query, key, value, bias=None, mask=None, *, implementation, **kwargs):
        if implementation == "cudnn" and (query.shape[1] % 2 or key.shape[1] % 2):
            raise NotImplementedError("JAX differentiates cuDNN's attention for even lengths only")
        return dot_product_attention(query, key, value, bias, mask, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", as_cudnn)
