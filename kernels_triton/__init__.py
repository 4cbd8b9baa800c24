"""Triton kernels, and nothing else: this package imports triton only.

Conventions:
    Parameters stand in the order inputs, scalars, outputs, constexprs. `x_ptr` is a pointer, `x` a
    loaded tile, `offs_m` the row numbers of a tile, `BLOCK_M` its height. Sizes are capitals:
    B batch, T query length, S key length, N query heads, K key heads, H query and key width,
    V value width. Arrays are C-contiguous, so shapes imply strides.
    A width is cut into two tiles of powers of two (80 = 64 + 16), so that little is padded; the
    second is absent where its constexpr is 0.
    Row numbers become int64 before they multiply a stride; offsets inside a tile stay int32.
"""
