"""Bad arguments: the same error for every implementation, at trace time."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from tjk.ops import flash_attention


def arguments(**changes):
    """query, key, value of fitting shapes, with some replaced by (shape, dtype)."""
    structs = {
        "query": ((2, 8, 4, 16), "float32"),
        "key": ((2, 6, 2, 16), "float32"),
        "value": ((2, 6, 2, 24), "float32"),
    }
    return {k: jax.ShapeDtypeStruct(*v) for k, v in (structs | changes).items()}


SHAPES = {
    "query must have shape (B, T, N, H) or (T, N, H), got (8, 16)": {"query": ((8, 16), "float32")},
    "key must have shape (B, S, K, H) with B=2, H=16, got (2, 6, 2, 32)": {
        "key": ((2, 6, 2, 32), "float32")
    },
    "key must have shape (B, S, K, H) with B=2, H=16, got (6, 2, 16)": {
        "key": ((6, 2, 16), "float32")
    },
    "value must have shape (B, S, K, V) with B=2, S=6, K=2, got (2, 7, 2, 24)": {
        "value": ((2, 7, 2, 24), "float32")
    },
    "query's heads N must be a positive multiple of key's heads K, and widths positive, "
    "got N=3, K=2, H=16, V=24": {"query": ((2, 8, 3, 16), "float32")},
    "widths positive, got N=4, K=2, H=16, V=0": {"value": ((2, 6, 2, 0), "float32")},
    "bias must have three or four axes that broadcast to (B, N, T, S)=(2, 4, 8, 6), "
    "got (2, 1, 8, 7)": {"bias": ((2, 1, 8, 7), "float32")},
    "mask must have three or four axes that broadcast to": {"mask": ((8, 6), "bool")},
    "query_seq_lengths must have shape (B,) with B=2, got (3,)": {
        "query_seq_lengths": ((3,), "int32")
    },
    "key_value_seq_lengths must have shape (B,) with B=2, got ()": {
        "key_value_seq_lengths": ((), "int32")
    },
    "segment_ids of keys must have shape (2, 6), got (2, 8)": {"segment_ids": ((2, 8), "int32")},
    "sinks must have shape (N,) with N=4, got (2,)": {"sinks": ((2,), "float32")},
}


@pytest.mark.parametrize(("message", "changes"), SHAPES.items(), ids=str)
def test_shape(implementation, message, changes):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        jax.eval_shape(
            lambda **x: flash_attention(**x, implementation=implementation), **arguments(**changes)
        )
    assert str(error.value).startswith("flash_attention: ")


DTYPES = {
    "query must have dtype float32 or bfloat16 or float16": {"query": ((2, 8, 4, 16), "int32")},
    "key must have the dtype of query (float32), got bfloat16": {
        "key": ((2, 6, 2, 16), "bfloat16")
    },
    "value must have the dtype of query (float32), got float16": {
        "value": ((2, 6, 2, 24), "float16")
    },
    "sinks must have dtype float32, got bfloat16": {"sinks": ((4,), "bfloat16")},
    "segment_ids must be integers, got float32": {"segment_ids": ((2, 8), "float32")},
    "mask must have dtype bool, got int32": {"mask": ((2, 4, 8, 6), "int32")},
    "bias must have dtype float32 or bfloat16": {"bias": ((2, 4, 8, 6), "int32")},
    "query_seq_lengths must have dtype int32, got float32": {
        "query_seq_lengths": ((2,), "float32")
    },
}


@pytest.mark.parametrize(("message", "changes"), DTYPES.items(), ids=str)
def test_dtype(implementation, message, changes):
    with pytest.raises(TypeError, match=re.escape(message)):
        jax.eval_shape(
            lambda **x: flash_attention(**x, implementation=implementation), **arguments(**changes)
        )


OPTIONS = {
    "implementation must be None, 'triton' or 'xla', got 'cudnn'": {"implementation": "cudnn"},
    "local_window_size must be an int or a pair of ints, got (1, 2, 3)": {
        "local_window_size": (1, 2, 3)
    },
    "precision must be None, 'default', 'high', 'highest' or a jax.lax.Precision, got 'double'": {
        "precision": "double"
    },
    "logits_soft_cap must be positive, got 0.0": {"logits_soft_cap": 0.0},
    "dropout_rate must be from 0 to below 1, got 1.0": {"dropout_rate": 1.0},
    "dropout_key must be given where dropout_rate is not 0, got None": {"dropout_rate": 0.1},
}


@pytest.mark.parametrize(("message", "options"), OPTIONS.items(), ids=str)
def test_option(message, options):
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(lambda **x: flash_attention(**x, **options), **arguments())


LACKING = {
    "a bias with deterministic=True": {"bias": ((2, 4, 8, 6), "float32")},
    "a width above 256 (257)": {"value": ((2, 6, 2, 257), "float32")},
}


@pytest.mark.parametrize(("name", "changes"), LACKING.items(), ids=str)
def test_triton_by_name_never_falls_back(name, changes):
    attend = functools.partial(flash_attention, deterministic=True)
    message = f"implementation='triton' does not take {name}"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        jax.eval_shape(functools.partial(attend, implementation="triton"), **arguments(**changes))
    structs = arguments(**changes)
    output = jax.eval_shape(attend, **structs)
    assert output.shape == (2, 8, 4, structs["value"].shape[-1])


def test_triton_has_no_float64():
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.float64)
        with pytest.raises(TypeError, match=r"query must have dtype float32 .*, got float64"):
            jax.eval_shape(lambda x: flash_attention(x, x, x, implementation="triton"), x)
        assert jax.eval_shape(lambda x: flash_attention(x, x, x), x).dtype == jnp.float64


@pytest.mark.parametrize("precision", ["highest", "float32", jax.lax.Precision.HIGHEST])
def test_precision_reaches_the_kernel(precision):
    from tjk.launch import recording

    x = jax.ShapeDtypeStruct((1, 16, 1, 16), jnp.float32)

    def constexprs(**options):
        with recording() as launches:
            jax.eval_shape(lambda x: flash_attention(x, x, x, **options), x)
        return dict(launches[0].constexprs)["PRECISION"]

    assert constexprs(precision=precision) == "ieee"
    assert constexprs() == "tf32"
    with jax.default_matmul_precision("highest"):
        assert constexprs() == "ieee"
