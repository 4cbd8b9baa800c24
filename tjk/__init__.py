"""Hand-written Triton kernels for JAX: operations in `tjk.ops`, model suites in `tjk.nn`."""

__version__ = "0.1.0"
