"""The scan as asked for, in float64, and in plain JAX, with its gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import assert_within_budget
from tjk.ops.ssd import reference, ssd_scan

TF32_EPSILON = 2.0**-10  # truncation, not rounding


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and flags of one scan; chunks of 16 tokens, so that few tokens are several chunks."""

    B: int = 1
    L: int = 37
    H: int = 2
    P: int = 5
    G: int = 1
    R: int = 6
    D: bool = True
    z: bool = True
    bias: bool = True
    softplus: bool = True
    state: bool = True
    segments: bool = False
    reverse: bool = False
    chunk: int | None = 16

    def flags(self) -> dict[str, bool]:
        """Arguments that the scan and its definition share."""
        return {"dt_softplus": self.softplus, "reverse": self.reverse}


@functools.cache
def inputs(problem: Problem, seed: int = 0) -> dict[str, np.ndarray | None]:
    """The operands in float64 (ids int32), and the cotangents d_y and d_state."""
    p = problem
    rng = np.random.default_rng(seed)
    draw = rng.standard_normal
    dt = draw((p.B, p.L, p.H))
    return {
        "x": draw((p.B, p.L, p.H, p.P)),
        "dt": dt if p.softplus else np.abs(dt),
        "A": -np.exp(rng.uniform(-3, 1, p.H)),
        "B": draw((p.B, p.L, p.G, p.R)) / p.R**0.5,
        "C": draw((p.B, p.L, p.G, p.R)),
        "D": draw(p.H) if p.D else None,
        "z": draw((p.B, p.L, p.H, p.P)) if p.z else None,
        "dt_bias": np.abs(draw(p.H)) if p.bias else None,
        "initial_state": draw((p.B, p.H, p.P, p.R)) if p.state else None,
        "segment_ids": np.cumsum(rng.random((p.B, p.L)) < 0.15, 1).astype(np.int32)
        if p.segments
        else None,
        "d_y": draw((p.B, p.L, p.H, p.P)),
        "d_state": draw((p.B, p.H, p.P, p.R)),
    }


def cast(arrays: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The operands in the dtypes that go with x's."""
    wide = "float64" if dtype == "float64" else "float32"
    dtypes = dict.fromkeys(("x", "dt", "B", "C", "z", "d_y"), dtype) | {"segment_ids": "int32"}
    return {
        name: a if a is None else jnp.asarray(np.asarray(a), dtypes.get(name, wide))
        for name, a in arrays.items()
    }


def gradients(scan: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """y, the final state and the gradients of all operands by name; scan gives both outputs."""
    arrays = dict(arrays)
    ids, d_y, d_state = (arrays.pop(name) for name in ("segment_ids", "d_y", "d_state"))
    (y, state), vjp = jax.vjp(lambda arrays: scan(**arrays, segment_ids=ids), arrays)
    (d_arrays,) = vjp((d_y, d_state))
    return {"y": y, "state": state} | {
        f"d_{name}": a for name, a in d_arrays.items() if a is not None
    }


def definition(
    arrays: dict[str, Any], *, dt_softplus: bool, reverse: bool
) -> tuple[dict[str, Any], dict[str, float]]:
    """What `gradients` gives, token by token in float64 and NumPy: nothing to compile.

    And, of the gradients that are sums over all tokens, the norm of what they sum.
    """
    a = {
        name: x if x is None else np.asarray(x, np.int32 if name == "segment_ids" else np.float64)
        for name, x in arrays.items()
    }
    x, A, D, z, ids = (a[name] for name in ("x", "A", "D", "z", "segment_ids"))
    heads = x.shape[2] // a["B"].shape[2]
    B, C = (np.repeat(a[name], heads, axis=2) for name in "BC")  # (B, L, H, R)
    raw = a["dt"] if a["dt_bias"] is None else a["dt"] + a["dt_bias"]
    dt = np.logaddexp(raw, 0) if dt_softplus else raw
    state = a["initial_state"]
    state = np.zeros_like(a["d_state"]) if state is None else state
    order = range(x.shape[1])[::-1] if reverse else range(x.shape[1])
    before, previous = {}, None
    y = np.zeros_like(x)
    passes = np.ones(x.shape[:2])  # 0 where a segment begins
    for t in order:
        if previous is not None and ids is not None:
            passes[:, t] = ids[:, t] == ids[:, previous]
        before[t], previous = state * passes[:, t, None, None, None], t
        state = np.exp(dt[:, t] * A)[..., None, None] * before[t]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        y[:, t] = np.einsum("bhpr,bhr->bhp", state, C[:, t])
    out = {"state": state}
    y = y if D is None else y + D[:, None] * x
    d_y = a["d_y"]
    if z is not None:
        share = 1 / (1 + np.exp(-z))
        out["d_z"] = d_y * y * (share + z * share * (1 - share))
        y, d_y = y * z * share, d_y * z * share
    d_x, d_dt, d_logs = np.zeros_like(x), np.zeros_like(dt), np.zeros_like(dt)
    d_B, d_C, d_state = np.zeros_like(B), np.zeros_like(C), a["d_state"].copy()
    for t in reversed(order):
        decay = np.exp(dt[:, t] * A)
        outer = x[:, t, :, :, None] * B[:, t, :, None]
        after = decay[..., None, None] * before[t] + dt[:, t, :, None, None] * outer
        d_C[:, t] = np.einsum("bhpr,bhp->bhr", after, d_y[:, t])
        d_state += d_y[:, t, :, :, None] * C[:, t, :, None]
        d_dt[:, t] = np.sum(d_state * outer, (2, 3))
        d_logs[:, t] = decay * np.sum(d_state * before[t], (2, 3))
        d_x[:, t] = dt[:, t, :, None] * np.einsum("bhpr,bhr->bhp", d_state, B[:, t])
        d_B[:, t] = dt[:, t, :, None] * np.einsum("bhpr,bhp->bhr", d_state, x[:, t])
        d_state = d_state * (decay * passes[:, t, None])[..., None, None]
    d_dt = (d_dt + A * d_logs) * (1 / (1 + np.exp(-raw)) if dt_softplus else 1)
    out |= {"y": y, "d_x": d_x if D is None else d_x + D[:, None] * d_y, "d_dt": d_dt}
    summands = {"d_A": dt * d_logs, "d_dt_bias": d_dt, "d_D": np.sum(d_y * x, 3)}
    out |= {name: terms.sum((0, 1)) for name, terms in summands.items()}
    out |= {"d_initial_state": d_state}
    grouped = (*x.shape[:2], -1, heads, B.shape[3])
    out |= {"d_B": d_B.reshape(grouped).sum(3), "d_C": d_C.reshape(grouped).sum(3)}
    absent = [f"d_{name}" for name, array in arrays.items() if array is None]
    return {name: array for name, array in out.items() if name not in absent}, {
        name: np.linalg.norm(terms) for name, terms in summands.items()
    }


@functools.cache
def compiled(problem: Problem, implementation: str, precision: str | None = "highest") -> Any:
    """Jitted `gradients` of ssd_scan, of its definition ("reference"), or `quadratic`."""
    scan = {"reference": reference.ssd_scan, "quadratic": quadratic}.get(implementation)
    options = problem.flags()
    if scan is None:
        scan = ssd_scan
        options |= {"return_final_state": True, "chunk_size": problem.chunk}
        options |= {"implementation": implementation, "precision": precision}
    # Compiling takes most of these tests' time, and half of that are optimisations.
    return jax.jit(
        functools.partial(gradients, functools.partial(scan, **options)),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def quadratic(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, *, dt_bias: Any, dt_softplus: bool,
    initial_state: Any, segment_ids: Any, reverse: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """The scan as one chunk: attention with decays. Operands of products in x's dtype."""
    if reverse:
        x, dt, B, C, z, segment_ids = (
            a if a is None else jnp.flip(a, 1) for a in (x, dt, B, C, z, segment_ids)
        )
    product = functools.partial(jnp.einsum, preferred_element_type=A.dtype, precision="highest")
    dt = dt.astype(A.dtype)
    dt = dt if dt_bias is None else dt + dt_bias
    dt = jax.nn.softplus(dt) if dt_softplus else dt
    B, C = (jnp.repeat(a, x.shape[2] // a.shape[2], axis=2) for a in (B, C))
    total = jnp.cumsum(dt * A, axis=1)  # (B, L, H)
    L = x.shape[1]
    reached, kept = jnp.ones(x.shape[:2], bool), jnp.ones(x.shape[:2], bool)
    visible = jnp.tril(jnp.ones((L, L), bool))[None]
    if segment_ids is not None:
        visible = visible & (segment_ids[:, :, None] == segment_ids[:, None])
        reached, kept = visible[:, :, 0], visible[:, -1]
    carried = reached[:, -1]

    def remaining(log, mask):
        return jnp.where(mask, jnp.exp(jnp.where(mask, log, jnp.zeros_like(log))), 0)

    by_head = total.swapaxes(1, 2)
    between = remaining(by_head[..., None] - by_head[:, :, None], visible[:, None])
    weights = product("bihr,bjhr->bhij", C, B) * between * dt.swapaxes(1, 2)[:, :, None]
    y = product("bhij,bjhp->bihp", weights.astype(x.dtype), x)
    to_end = remaining(total[:, -1:] - total, kept[..., None]) * dt
    entering = (x.astype(A.dtype) * to_end[..., None]).astype(x.dtype)
    state = product("bjhp,bjhr->bhpr", entering, B)
    if initial_state is not None:
        from_state = product("bihr,bhpr->bihp", C, initial_state.astype(x.dtype))
        y += from_state * remaining(total, reached[..., None])[..., None]
        state += initial_state * remaining(total[:, -1], carried[:, None])[..., None, None]
    wide = x.astype(A.dtype)
    y = y if D is None else y + D[:, None] * wide
    y = y if z is None else y * jax.nn.silu(z.astype(A.dtype))
    return (jnp.flip(y, 1) if reverse else y).astype(x.dtype), state


def check(
    problem: Problem,
    dtype: str,
    implementation: str,
    *,
    precision: str | None = "highest",
    arrays: dict[str, Any] | None = None,
    inherent: float = 0.0,
) -> None:
    """Fails unless outputs and gradients are within the budget.

    Kernels round operands of products to 16 bits, or cut them to TF32, which the definition does
    not; there the plain computation is `quadratic`, of operands with TF32's bits in that case.

    Args:
        problem: sizes and flags.
        dtype: x's.
        implementation: which one is tested.
        precision: of its products.
        arrays: the operands, if other than the problem's random ones.
        inherent: error that the algorithm implies, relative to the largest value.
    """
    operands = cast(inputs(problem) if arrays is None else arrays, dtype)
    actual = compiled(problem, implementation, precision)(operands)
    exact, norms = definition(operands, **problem.flags())
    tf32 = implementation == "triton" and dtype == "float32" and precision is None
    rounds = implementation == "triton" and dtype != "float32"
    plain_operands = operands
    if tf32:
        plain_operands = operands | {name: truncate(operands[name]) for name in ("x", "B", "C")}
    plain = compiled(problem, "quadratic" if tf32 or rounds else "reference")(plain_operands)
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        largest = np.abs(exact[name]).max(initial=0)
        error = (inherent + 2 * TF32_EPSILON * tf32) * largest
        if rounds:  # d_y times the gate, and that times decays, where plain rounds their product
            error += float(jnp.finfo(dtype).eps) * largest
        if name in norms:
            # Each summand is rounded once; few sums, so plain's error may be small by chance.
            error += float(jnp.finfo(dtype if rounds else "float32").eps) * norms[name]
        assert_within_budget(name, value, exact[name], plain[name], inherent=error)


def check_float32(problem: Problem, implementation: str) -> None:
    """Fails unless float32 results are within 32 epsilons of the largest value: cheaper."""
    operands = cast(inputs(problem), "float32")
    actual = compiled(problem, implementation)(operands)
    exact, _ = definition(operands, **problem.flags())
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        tolerance = 32 * float(jnp.finfo(jnp.float32).eps) * np.abs(exact[name]).max(initial=0)
        np.testing.assert_allclose(value, exact[name], rtol=0, atol=tolerance, err_msg=name)


def truncate(x: Any) -> np.ndarray:
    """x with the bits that TF32 has."""
    return (np.asarray(x, np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)
