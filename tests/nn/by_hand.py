"""The layers' formulas in NumPy, and parameters that all have an effect."""

import jax
import numpy as np


def disturbed(params, scale, seed=1):
    """The parameters plus noise, so that none is zero or one and each of them shows."""
    rng = np.random.default_rng(seed)  # JAX would compile a program for each shape
    return jax.tree.map(
        lambda x: x + np.asarray(scale * rng.standard_normal(x.shape), x.dtype), params
    )


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def relative_error(x, expected):
    return np.abs(np.asarray(x).astype(np.float64) - expected).max() / np.abs(expected).max()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def affine(p, x):
    return x @ p["weight"] + p.get("bias", 0)


def normalized(p, x, epsilon):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * p["scale"] + p["bias"]


def transformer_block(p, config, x, modulate=lambda name, n: n):
    """One head of one sequence at a time."""
    head_width = config.width // config.heads
    n = modulate("norm_attention", normalized(p["norm_attention"], x, config.epsilon))
    query, key, value = (affine(p[name], n) for name in ("query", "key", "value"))
    attended = np.empty_like(x)
    for b in range(len(x)):
        for head in range(config.heads):
            columns = slice(head * head_width, (head + 1) * head_width)
            q, k, v = (a[b][:, columns] for a in (query, key, value))
            weights = np.exp(q @ k.T / np.sqrt(head_width))
            attended[b][:, columns] = weights / weights.sum(-1, keepdims=True) @ v
    x = x + affine(p["output"], attended)
    n = modulate("norm_mlp", normalized(p["norm_mlp"], x, config.epsilon))
    return x + affine(p["mlp_out"], gelu(affine(p["mlp_in"], n)))
