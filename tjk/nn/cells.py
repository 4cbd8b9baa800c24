"""The five cells of the ssm suite: what mixes a sequence's positions, (B, L, D) -> (B, L, D).

`init_<cell>(key, config)` makes a cell's parameters (float32), `<cell>(params, config, x, scans,
reverse)` applies it in x's dtype. With `reverse` everything that looks back in time looks ahead.
Scans and convolutions are called through `scans`, whatever computes them.

    lru     Orvieto et al.: Resurrecting Recurrent Neural Networks for Long Sequences,
            https://arxiv.org/abs/2303.06349
    mamba   the selective scan alone of Gu, Dao: Mamba: Linear-Time Sequence Modeling with Selective
            State Spaces, https://arxiv.org/abs/2312.00752
    ssd     the scan alone, and
    mamba2  the block of Dao, Gu: Transformers are SSMs, https://arxiv.org/abs/2405.21060
    gdn     Yang, Kautz, Hatamizadeh: Gated Delta Networks, https://arxiv.org/abs/2412.06464
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tjk.nn.layers import Params, at_least_float32, init_linear, linear, rms_norm

if TYPE_CHECKING:
    from tjk.nn.ssm import Config

CellParams = dict[str, Params | Array]


class Scans(NamedTuple):
    """The operations that the cells call, each with the arguments of its namesake in `tjk.ops`."""

    linear_scan: Callable[..., Array]
    selective_scan: Callable[..., Array]
    ssd_scan: Callable[..., Array]
    gated_delta_rule: Callable[..., Array]
    causal_conv1d: Callable[..., Array]


def init_lru(key: Array, config: Config) -> CellParams:
    """Eigenvalues in a ring, 0.9 <= |lambda| <= 0.999, of phases up to pi / 10.

    {"B", "C"} {"real", "imag"}, (D, N) and (N, D); "D" {"weight"} (D, D); "nu", "theta" and "gamma"
    (N,): lambda = exp(-exp(nu) + i exp(theta)), the input scaled by exp(gamma).
    """
    D, N = config.width, config.state
    keys = jax.random.split(key, 7)
    # Of unit variance together: |B x| and |C h| have two parts each.
    half = jax.nn.initializers.variance_scaling(0.5, "fan_in", "truncated_normal")
    radius = jnp.sqrt(
        jax.random.uniform(keys[0], (N,), jnp.float32, minval=0.9**2, maxval=0.999**2)
    )
    phase = jax.random.uniform(keys[1], (N,), jnp.float32, minval=1e-3, maxval=jnp.pi / 10)
    return {
        "B": {
            "real": half(keys[2], (D, N), jnp.float32),
            "imag": half(keys[3], (D, N), jnp.float32),
        },
        "C": {
            "real": half(keys[4], (N, D), jnp.float32),
            "imag": half(keys[5], (N, D), jnp.float32),
        },
        "D": init_linear(keys[6], D, D, bias=False),
        "nu": jnp.log(-jnp.log(radius)),
        "theta": jnp.log(phase),
        "gamma": jnp.log1p(-jnp.square(radius)) / 2,
    }


def lru(params: CellParams, config: Config, x: Array, scans: Scans, reverse: bool) -> Array:
    """h_t = lambda h_{t-1} + exp(gamma) B x_t,  y_t = Re(C h_t) + D x_t; h complex."""
    nu, theta, gamma = (_full(params[name], x) for name in ("nu", "theta", "gamma"))
    decay = jnp.exp(jax.lax.complex(-jnp.exp(nu), jnp.exp(theta)))  # (N,)
    scale = jnp.exp(gamma)
    inputs = [
        scale * at_least_float32(x @ params["B"][part].astype(x.dtype)) for part in ("real", "imag")
    ]
    h = scans.linear_scan(decay, jax.lax.complex(*inputs), reverse=reverse)  # (B, L, N)
    real, imag = (
        part(h).astype(x.dtype) @ params["C"][name].astype(x.dtype)
        for part, name in ((jnp.real, "real"), (jnp.imag, "imag"))
    )
    return real - imag + linear(params["D"], x)


def init_mamba(key: Array, config: Config) -> CellParams:
    """{"B", "C", "delta"} {"weight", "bias"}; "A_log" (D, R), "D" (D,)."""
    D, R = config.width, config.state
    keys = jax.random.split(key, 4)
    delta = init_linear(keys[2], D, D)
    return {
        "B": init_linear(keys[0], D, R),
        "C": init_linear(keys[1], D, R),
        "delta": {"weight": delta["weight"], "bias": _init_step_bias(keys[3], D)},
        "A_log": jnp.log(jnp.broadcast_to(jnp.arange(1, R + 1, dtype=jnp.float32), (D, R))),
        "D": jnp.ones((D,), jnp.float32),
    }


def mamba(params: CellParams, config: Config, x: Array, scans: Scans, reverse: bool) -> Array:
    """The selective scan of x, with B, C and delta biased projections of x."""
    B, C, delta = (linear(params[name], x) for name in ("B", "C", "delta"))
    A, D = -jnp.exp(_full(params["A_log"], x)), _full(params["D"], x)
    return scans.selective_scan(x, delta, A, B, C, D, delta_softplus=True, reverse=reverse)


def init_ssd(key: Array, config: Config) -> CellParams:
    """{"query", "key", "value", "dt"} {"weight"}; "A_log", "dt_bias", "D" (H,)."""
    D, H, R = config.width, config.heads, config.state
    keys = jax.random.split(key, 5)
    return {
        "query": init_linear(keys[0], D, R, bias=False),
        "key": init_linear(keys[1], D, R, bias=False),
        "value": init_linear(keys[2], D, D, bias=False),
        "dt": init_linear(keys[3], D, H, bias=False),
        **_init_heads(keys[4], H),
    }


def ssd(params: CellParams, config: Config, x: Array, scans: Scans, reverse: bool) -> Array:
    """The scan of linear attention with decays: queries are its C, keys its B, values its x."""
    C, B, value, dt = (linear(params[name], x) for name in ("query", "key", "value", "dt"))
    y = _scan_heads(params, config, (value, dt, B, C), scans, reverse)
    return y.reshape(x.shape)


def init_mamba2(key: Array, config: Config) -> CellParams:
    """{"z", "x", "B", "C", "dt", "out"} {"weight"}; {"conv_x", "conv_B", "conv_C"} {"weight",
    "bias"}; "A_log", "dt_bias", "D" (H,); "norm" {"scale"} (expand D,)."""
    D, inner, H, R = config.width, config.inner, config.heads, config.state
    keys = iter(jax.random.split(key, 10))
    return {
        **{
            name: init_linear(next(keys), D, size, bias=False)
            for name, size in (("z", inner), ("x", inner), ("B", R), ("C", R), ("dt", H))
        },
        **{
            name: _init_convolution(next(keys), size, config.conv_width)
            for name, size in (("conv_x", inner), ("conv_B", R), ("conv_C", R))
        },
        **_init_heads(next(keys), H),
        "norm": {"scale": jnp.ones((inner,), jnp.float32)},
        "out": init_linear(next(keys), inner, D, bias=False),
    }


def mamba2(params: CellParams, config: Config, x: Array, scans: Scans, reverse: bool) -> Array:
    """Projections, causal convolutions of what the scan takes, the scan, a gated norm."""
    # Products and convolutions apart, not one cut in pieces: each output is contiguous.
    z, inner, B, C, dt = (linear(params[name], x) for name in ("z", "x", "B", "C", "dt"))
    inner, B, C = (
        _convolution(params[name], a, scans, reverse)
        for name, a in (("conv_x", inner), ("conv_B", B), ("conv_C", C))
    )
    y = _scan_heads(params, config, (inner, dt, B, C), scans, reverse)
    gated = y.reshape(z.shape) * jax.nn.silu(z)  # (B, L, expand D)
    return linear(params["out"], rms_norm(params["norm"], gated, epsilon=config.epsilon))


def init_gdn(key: Array, config: Config) -> CellParams:
    """{"query", "key", "value", "gate", "decay", "beta", "out"} {"weight"}; {"conv_query",
    "conv_key", "conv_value"} {"weight", "bias"}; "A_log", "dt_bias", "beta_bias" (H,); "norm"
    {"scale"} (D / H,)."""
    D, H = config.width, config.heads
    keys = iter(jax.random.split(key, 11))
    square = {
        name: init_linear(next(keys), D, D, bias=False)
        for name in ("query", "key", "value", "gate", "out")
    }
    per_head = {name: init_linear(next(keys), D, H, bias=False) for name in ("decay", "beta")}
    convolutions = {
        name: _init_convolution(next(keys), D, config.conv_width)
        for name in ("conv_query", "conv_key", "conv_value")
    }
    heads = _init_heads(next(keys), H)
    return {
        **square,
        **per_head,
        **convolutions,
        "A_log": heads["A_log"],
        "dt_bias": heads["dt_bias"],
        "beta_bias": jnp.zeros((H,), jnp.float32),
        "norm": {"scale": jnp.ones((D // H,), jnp.float32)},
    }


def gdn(params: CellParams, config: Config, x: Array, scans: Scans, reverse: bool) -> Array:
    """The gated delta rule between causal convolutions and a gated norm of each head."""
    heads = (*x.shape[:2], config.heads, config.width // config.heads)
    query, key, value = (
        _convolution(params[f"conv_{name}"], linear(params[name], x), scans, reverse).reshape(heads)
        for name in ("query", "key", "value")
    )  # (B, L, H, K)
    raw = at_least_float32(linear(params["decay"], x)) + _full(params["dt_bias"], x)
    decay = -jnp.exp(_full(params["A_log"], x)) * jax.nn.softplus(raw)  # (B, L, H)
    raw = at_least_float32(linear(params["beta"], x)) + _full(params["beta_bias"], x)
    beta = jax.nn.sigmoid(raw)  # (B, L, H)
    y = scans.gated_delta_rule(query, key, value, decay, beta, l2_normalize=True, reverse=reverse)
    gate = linear(params["gate"], x).reshape(heads)
    y = rms_norm(params["norm"], y, epsilon=config.epsilon) * jax.nn.silu(gate)
    return linear(params["out"], y.reshape(x.shape))


def _full(parameter: Array, x: Array) -> Array:
    """A parameter that no matrix product takes: float32, or float64 where x is."""
    return parameter.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def _init_heads(key: Array, heads: int) -> dict[str, Array]:
    """-A uniform in [1, 16], D one, the step's bias: (H,) each."""
    key_A, key_bias = jax.random.split(key)
    return {
        "A_log": jnp.log(jax.random.uniform(key_A, (heads,), jnp.float32, minval=1.0, maxval=16.0)),
        "dt_bias": _init_step_bias(key_bias, heads),
        "D": jnp.ones((heads,), jnp.float32),
    }


def _init_step_bias(key: Array, size: int) -> Array:
    """softplus of it, the step of a zero projection, is log-uniform in [0.001, 0.1]."""
    log_step = jax.random.uniform(
        key, (size,), jnp.float32, minval=math.log(1e-3), maxval=math.log(1e-1)
    )
    step = jnp.exp(log_step)
    return step + jnp.log(-jnp.expm1(-step))


def _scan_heads(
    params: CellParams,
    config: Config,
    inputs: tuple[Array, Array, Array, Array],
    scans: Scans,
    reverse: bool,
) -> Array:
    """x (B, L, H P), dt (B, L, H), B and C (B, L, R), one group -> (B, L, H, P)."""
    x, dt, B, C = inputs
    A, bias, D = (_full(params[name], x) for name in ("A_log", "dt_bias", "D"))
    return scans.ssd_scan(
        x.reshape(*x.shape[:2], config.heads, config.head_width),
        dt,
        -jnp.exp(A),
        B[:, :, None],
        C[:, :, None],
        D,
        dt_bias=bias,
        dt_softplus=True,
        reverse=reverse,
    )


def _init_convolution(key: Array, channels: int, width: int) -> Params:
    """Weight (D, W) of variance 1 / W, bias (D,) zero."""
    weight = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0)(
        key, (channels, width), jnp.float32
    )
    return {"weight": weight, "bias": jnp.zeros((channels,), jnp.float32)}


def _convolution(params: Params, x: Array, scans: Scans, reverse: bool) -> Array:
    weight, bias = _full(params["weight"], x), _full(params["bias"], x)
    return scans.causal_conv1d(x, weight, bias, activation="silu", reverse=reverse)


CELLS: dict[str, tuple[Callable[..., Any], Callable[..., Array]]] = {
    "lru": (init_lru, lru),
    "mamba": (init_mamba, mamba),
    "ssd": (init_ssd, ssd),
    "mamba2": (init_mamba2, mamba2),
    "gdn": (init_gdn, gdn),
}
