"""Whole models in plain JAX on top of `tjk.ops`, one module per suite.

Each suite module holds `Config` (a frozen dataclass), `init(key, config) -> params` and
`apply(params, config, x, *, dtype, implementation)`. Parameters are nested dicts of float32 arrays.
"""
