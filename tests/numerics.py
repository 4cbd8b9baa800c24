"""The error budget by which all numerics are judged."""

import jax.numpy as jnp
import numpy as np


def assert_within_budget(name: str, actual, reference, plain, *, inherent: float = 0.0) -> None:
    """Fails unless `actual` is about as near to the float64 reference as plain JAX is.

    The largest error may be twice that of `plain`, the textbook computation in the same dtype, plus
    one rounding of the output and a float32 epsilon, both of the largest value. NaN fails, and so
    does an infinity that the reference has not.

    Args:
        name: of the tensor, for the message.
        actual: what is judged.
        reference: the right value, in float64.
        plain: the textbook computation in actual's dtype.
        inherent: error that the algorithm itself implies; give the reason at the call.
    """
    dtype = actual.dtype
    assert actual.shape == reference.shape, f"{name}: {actual.shape} != {reference.shape}"
    actual, plain, reference = (np.asarray(x, np.float64) for x in (actual, plain, reference))
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(actual[~finite], reference[~finite], f"{name}: not finite")
    assert np.isfinite(actual[finite]).all(), f"{name}: NaN or infinity"
    if not finite.any():
        return
    actual, plain, reference = actual[finite], plain[finite], reference[finite]
    epsilon = float(jnp.finfo(dtype).eps) / 2 + float(jnp.finfo(jnp.float32).eps)
    budget = 2 * np.abs(plain - reference).max() + epsilon * np.abs(reference).max() + inherent
    error = np.abs(actual - reference).max()
    assert error <= budget, f"{name}: error {error:.3g} exceeds the budget {budget:.3g}"
