"""GroupNorm over the positions and channels of a group, forward and backward.

    y = a(xhat scale + bias)          xhat = (x - mean) rstd          rstd = (var + epsilon)^-1/2

    e = d_y a'(xhat scale + bias) scale
    d_x = rstd (e - mean of e - xhat mean of e xhat)
    d_bias = sum of d_y a'              d_scale = sum of d_y a' xhat

x, y (B, S, C), S positions; scale, bias (B / BATCH, C), BATCH examples share a row; mean, rstd
(B, C / W) float32, W channels a group. a is the identity or silu. All arithmetic is float32.

A program takes a slab of channels: GROUPS whole groups, or one of PIECES pieces of a wide group. A
group is padded to WIDTH lanes, a power of two, so that it can be summed up by a reshape.

Memory-bound. Where the slab of an example fits into the registers of one program (PARTIALS = 0)
that one loads x once and does everything. Else positions are cut into PARTS of LENGTH; one launch
makes sums of each part, a second one puts them together, always in the same order, and applies
them. Variances are sums of squared deviations from running means (Welford), put together as by
Chan, Golub and LeVeque: a mean far from 0 costs them no digits.

Sources: Wu, He: Group Normalization, https://arxiv.org/abs/1803.08494. Chan, Golub, LeVeque:
Algorithms for Computing the Sample Variance, https://doi.org/10.1080/00031305.1983.10483115.
"""

import triton
import triton.language as tl

from kernels_triton.activation import activation


@triton.jit
def program(PARTS, C: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Example (int64), part, first group and piece of a program; slabs vary fastest.

    One of B * PARTS * cdiv(C / W, GROUPS) * PIECES.
    """
    pieces: tl.constexpr = (W + WIDTH - 1) // WIDTH
    slabs: tl.constexpr = (C // W + GROUPS - 1) // GROUPS * pieces
    pid = tl.program_id(0)
    slab = pid % slabs
    b = tl.cast(pid // slabs // PARTS, tl.int64)
    return b, pid // slabs % PARTS, slab // pieces * GROUPS, slab % pieces


@triton.jit
def channels(
    group, piece, C: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr
):
    """Channels of a slab's GROUPS * WIDTH lanes, and which of them exist."""
    lanes = tl.arange(0, GROUPS * WIDTH)
    if W == WIDTH:  # plainly contiguous, so that the compiler sees it
        offs_c = group * W + lanes
        return offs_c, offs_c < C
    place = piece * WIDTH + lanes % WIDTH
    offs_c = (group + lanes // WIDTH) * W + place
    return offs_c, (place < W) & (offs_c < C)


@triton.jit
def load_rows(x_ptr, rows, end, offs_c, mask_c, C: tl.constexpr):
    """Rows of an example (S, C) that lie before `end`, 0 elsewhere: (BLOCK_S, lanes) float32."""
    pointers = x_ptr + rows.to(tl.int64)[:, None] * C + offs_c[None, :]
    mask = (rows < end)[:, None] & mask_c[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(y_ptr, y, rows, end, offs_c, mask_c, C: tl.constexpr):
    """The counterpart of `load_rows`."""
    pointers = y_ptr + rows.to(tl.int64)[:, None] * C + offs_c[None, :]
    mask = (rows < end)[:, None] & mask_c[None, :]
    tl.store(pointers, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_channels(x_ptr, offs_c, mask_c):
    """(lanes,) float32, 0 where there is no channel."""
    return tl.load(x_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)


@triton.jit
def group_sum(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Sums of (lanes,) over each group: (GROUPS,)."""
    return tl.sum(tl.reshape(x, [GROUPS, WIDTH]), 1)


@triton.jit
def by_channel(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """(GROUPS,) to the lanes of each group."""
    return tl.reshape(tl.broadcast_to(x[:, None], [GROUPS, WIDTH]), [GROUPS * WIDTH])


@triton.jit
def merge(mean, m2, count, total, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Mean of each group, and its sum of squared deviations, from those of its elements.

    `mean`, `m2` and `count`, how many values each element stands for, are (N, GROUPS * WIDTH);
    `total` is the number of a group's values. The mean is corrected by the mean of the deviations
    from it: it is then as good as its last digit, and that of equal values is that value.
    """
    first = group_sum(tl.sum(count * mean, 0), GROUPS, WIDTH) / total
    deviation = mean - by_channel(first, GROUPS, WIDTH)[None, :]
    rest = group_sum(tl.sum(count * deviation, 0), GROUPS, WIDTH) / total
    m2 = group_sum(tl.sum(m2 + count * deviation * deviation, 0), GROUPS, WIDTH)
    m2 -= total * rest * rest
    return first + rest, tl.where(m2 < 0, 0.0, m2)  # NaN stays


@triton.jit
def load_partials(
    x_ptr, b, group, PARTS,
    C: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    PARTIALS: tl.constexpr,
):  # fmt: skip
    """What the parts and pieces of an example gave for each group, (PARTIALS, GROUPS), else 0.

    x is (B, PARTS * PIECES, C / W).
    """
    pieces: tl.constexpr = (W + WIDTH - 1) // WIDTH
    offs_g = group + tl.arange(0, GROUPS)[None, :]
    offs_p = tl.arange(0, PARTIALS)[:, None]
    pointers = x_ptr + (b * PARTS * pieces + offs_p) * (C // W) + offs_g
    mask = (offs_p < PARTS * pieces) & (offs_g < C // W)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_partial(
    x_ptr, x, b, part, group, piece, PARTS,
    C: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The counterpart of `load_partials`, for one part and piece: (GROUPS,)."""
    pieces: tl.constexpr = (W + WIDTH - 1) // WIDTH
    offs_g = group + tl.arange(0, GROUPS)
    row = (b * PARTS + part) * pieces + piece
    tl.store(x_ptr + row * (C // W) + offs_g, x, mask=offs_g < C // W)


@triton.jit
def group_norm_statistics(
    x_ptr,
    S, PARTS, LENGTH,
    mean_ptr, m2_ptr,
    C: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program makes mean and sum of squared deviations of a part of a slab.

    Each lane of a tile keeps its own, which are merged at the end. mean, m2
    (B, PARTS * PIECES, C / W) float32. Grid: see `program`.
    """
    b, part, group, piece = program(PARTS, C, W, GROUPS, WIDTH)
    offs_c, mask_c = channels(group, piece, C, W, GROUPS, WIDTH)
    x_ptr += b * S * C
    start = part * LENGTH
    end = tl.minimum(start + LENGTH, S)
    mean = tl.zeros([BLOCK_S, GROUPS * WIDTH], tl.float32)
    m2 = tl.zeros([BLOCK_S, GROUPS * WIDTH], tl.float32)
    seen = 0.0
    for first in range(start, end, BLOCK_S):
        rows = first + tl.arange(0, BLOCK_S)
        x = load_rows(x_ptr, rows, end, offs_c, mask_c, C)
        seen += 1.0
        deviation = tl.where((rows < end)[:, None], x - mean, 0.0)
        mean += deviation * (1.0 / seen)
        m2 += deviation * (x - mean)
    count = tl.maximum(end - start - tl.arange(0, BLOCK_S) + BLOCK_S - 1, 0) // BLOCK_S
    count = tl.where(mask_c[None, :], count[:, None], 0).to(tl.float32)
    total = tl.cast(end - start, tl.float32) * tl.minimum(W - piece * WIDTH, WIDTH)
    mean, m2 = merge(mean, m2, count, total, GROUPS, WIDTH)
    store_partial(mean_ptr, mean, b, part, group, piece, PARTS, C, W, GROUPS, WIDTH)
    store_partial(m2_ptr, m2, b, part, group, piece, PARTS, C, W, GROUPS, WIDTH)


@triton.jit
def normalized(deviation, rstd, scale, bias, ACTIVATION: tl.constexpr):
    """y of deviations from the mean."""
    y = deviation * (rstd * scale)[None, :] + bias[None, :]
    if ACTIVATION == "silu":
        y, _ = activation(y, "silu")
    return y


@triton.jit
def group_norm_forward(
    x_ptr, scale_ptr, bias_ptr, means_ptr, m2s_ptr,
    BATCH, S, PARTS, LENGTH, epsilon,
    y_ptr, mean_ptr, rstd_ptr,
    C: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr, PARTIALS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One program makes y of a part of a slab; those of the first part make mean and rstd.

    means, m2s (B, PARTS * PIECES, C / W) are what `group_norm_statistics` made; not read if
    PARTIALS is 0: then BLOCK_S rows are all. Grid: see `program`.
    """
    b, part, group, piece = program(PARTS, C, W, GROUPS, WIDTH)
    offs_c, mask_c = channels(group, piece, C, W, GROUPS, WIDTH)
    pieces: tl.constexpr = (W + WIDTH - 1) // WIDTH
    x_ptr += b * S * C
    y_ptr += b * S * C
    scale = load_channels(scale_ptr + b // BATCH * C, offs_c, mask_c)
    bias = load_channels(bias_ptr + b // BATCH * C, offs_c, mask_c)
    total = tl.cast(S, tl.float32) * W
    start = part * LENGTH
    end = tl.minimum(start + LENGTH, S)
    if PARTIALS == 0:
        rows = tl.arange(0, BLOCK_S)
        x = load_rows(x_ptr, rows, S, offs_c, mask_c, C)
        count = ((rows < S)[:, None] & mask_c[None, :]).to(tl.float32)
        mean, m2 = merge(x, tl.zeros_like(x), count, total, GROUPS, WIDTH)
        rstd = tl.rsqrt(m2 / total + epsilon)
        deviation = x - by_channel(mean, GROUPS, WIDTH)[None, :]
        y = normalized(deviation, by_channel(rstd, GROUPS, WIDTH), scale, bias, ACTIVATION)
        store_rows(y_ptr, y, rows, S, offs_c, mask_c, C)
    else:
        offs_p = tl.arange(0, PARTIALS)
        positions = tl.minimum(S - offs_p // pieces * LENGTH, LENGTH).to(tl.float32)
        count = positions * tl.minimum(W - offs_p % pieces * WIDTH, WIDTH)
        count = tl.where(offs_p < PARTS * pieces, count, 0.0)[:, None]
        means = load_partials(means_ptr, b, group, PARTS, C, W, GROUPS, WIDTH, PARTIALS)
        m2s = load_partials(m2s_ptr, b, group, PARTS, C, W, GROUPS, WIDTH, PARTIALS)
        mean, m2 = merge(means, m2s, count, total, GROUPS, 1)
        rstd = tl.rsqrt(m2 / total + epsilon)
        mean_c = by_channel(mean, GROUPS, WIDTH)
        rstd_c = by_channel(rstd, GROUPS, WIDTH)
        for first in range(start, end, BLOCK_S):
            rows = first + tl.arange(0, BLOCK_S)
            x = load_rows(x_ptr, rows, end, offs_c, mask_c, C)
            y = normalized(x - mean_c[None, :], rstd_c, scale, bias, ACTIVATION)
            store_rows(y_ptr, y, rows, end, offs_c, mask_c, C)
    if (part == 0) & (piece == 0):
        offs_g = group + tl.arange(0, GROUPS)
        tl.store(mean_ptr + b * (C // W) + offs_g, mean, mask=offs_g < C // W)
        tl.store(rstd_ptr + b * (C // W) + offs_g, rstd, mask=offs_g < C // W)


@triton.jit
def load_gradients(
    x_ptr, d_y_ptr, rows, end, offs_c, mask_c, mean, rstd, scale, bias,
    C: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """xhat and d_y a' of rows of an example, (BLOCK_S, lanes)."""
    x = load_rows(x_ptr, rows, end, offs_c, mask_c, C)
    d_y = load_rows(d_y_ptr, rows, end, offs_c, mask_c, C)
    x = (x - mean[None, :]) * rstd[None, :]
    if ACTIVATION == "silu":
        _, slope = activation(x * scale[None, :] + bias[None, :], "silu")
        d_y *= slope
    return x, d_y


@triton.jit
def store_channels(x_ptr, x, row, offs_c, mask_c, C: tl.constexpr):
    """Sums over positions: (lanes,) to a row."""
    tl.store(x_ptr + row * C + offs_c, x, mask=mask_c)


@triton.jit
def group_norm_sums(
    x_ptr, scale_ptr, bias_ptr, mean_ptr, rstd_ptr, d_y_ptr,
    BATCH, S, PARTS, LENGTH,
    d_scale_ptr, d_bias_ptr, total_ptr, moment_ptr,
    C: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One program makes the sums over a part of a slab.

    d_scale, d_bias (B, PARTS, C); total and moment (B, PARTS * PIECES, C / W), the sums of e and
    of e xhat. Grid: see `program`.
    """
    b, part, group, piece = program(PARTS, C, W, GROUPS, WIDTH)
    offs_c, mask_c = channels(group, piece, C, W, GROUPS, WIDTH)
    x_ptr += b * S * C
    d_y_ptr += b * S * C
    scale = load_channels(scale_ptr + b // BATCH * C, offs_c, mask_c)
    bias = load_channels(bias_ptr + b // BATCH * C, offs_c, mask_c)
    mean = load_channels(mean_ptr + b * (C // W), offs_c // W, mask_c)
    rstd = load_channels(rstd_ptr + b * (C // W), offs_c // W, mask_c)
    d_scale = tl.zeros([BLOCK_S, GROUPS * WIDTH], tl.float32)
    d_bias = tl.zeros([BLOCK_S, GROUPS * WIDTH], tl.float32)
    start = part * LENGTH
    end = tl.minimum(start + LENGTH, S)
    for first in range(start, end, BLOCK_S):
        xhat, d_y = load_gradients(
            x_ptr, d_y_ptr, first + tl.arange(0, BLOCK_S), end, offs_c, mask_c,
            mean, rstd, scale, bias, C, ACTIVATION,
        )  # fmt: skip
        d_scale += d_y * xhat
        d_bias += d_y
    d_scale = tl.sum(d_scale, 0)
    d_bias = tl.sum(d_bias, 0)
    store_channels(d_scale_ptr, d_scale, b * PARTS + part, offs_c, mask_c, C)
    store_channels(d_bias_ptr, d_bias, b * PARTS + part, offs_c, mask_c, C)
    total = group_sum(scale * d_bias, GROUPS, WIDTH)
    moment = group_sum(scale * d_scale, GROUPS, WIDTH)
    store_partial(total_ptr, total, b, part, group, piece, PARTS, C, W, GROUPS, WIDTH)
    store_partial(moment_ptr, moment, b, part, group, piece, PARTS, C, W, GROUPS, WIDTH)


@triton.jit
def group_norm_backward(
    x_ptr, scale_ptr, bias_ptr, mean_ptr, rstd_ptr, d_y_ptr, totals_ptr, moments_ptr,
    BATCH, S, PARTS, LENGTH,
    d_x_ptr, d_scale_ptr, d_bias_ptr,
    C: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr, PARTIALS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One program makes d_x of a part of a slab.

    totals, moments (B, PARTS * PIECES, C / W) are what `group_norm_sums` made; not read if PARTIALS
    is 0: then BLOCK_S rows are all, and d_scale and d_bias (B, 1, C), which have no element
    otherwise, are made here. Grid: see `program`.
    """
    b, part, group, piece = program(PARTS, C, W, GROUPS, WIDTH)
    offs_c, mask_c = channels(group, piece, C, W, GROUPS, WIDTH)
    x_ptr += b * S * C
    d_y_ptr += b * S * C
    d_x_ptr += b * S * C
    scale = load_channels(scale_ptr + b // BATCH * C, offs_c, mask_c)
    bias = load_channels(bias_ptr + b // BATCH * C, offs_c, mask_c)
    mean = load_channels(mean_ptr + b * (C // W), offs_c // W, mask_c)
    rstd = load_channels(rstd_ptr + b * (C // W), offs_c // W, mask_c)
    count = tl.cast(S, tl.float32) * W
    if PARTIALS == 0:
        rows = tl.arange(0, BLOCK_S)
        xhat, d_y = load_gradients(
            x_ptr, d_y_ptr, rows, S, offs_c, mask_c, mean, rstd, scale, bias, C, ACTIVATION
        )
        d_scale = tl.sum(d_y * xhat, 0)
        d_bias = tl.sum(d_y, 0)
        store_channels(d_scale_ptr, d_scale, b, offs_c, mask_c, C)
        store_channels(d_bias_ptr, d_bias, b, offs_c, mask_c, C)
        total = by_channel(group_sum(scale * d_bias, GROUPS, WIDTH) / count, GROUPS, WIDTH)
        moment = by_channel(group_sum(scale * d_scale, GROUPS, WIDTH) / count, GROUPS, WIDTH)
        d_x = rstd[None, :] * (scale[None, :] * d_y - total[None, :] - xhat * moment[None, :])
        store_rows(d_x_ptr, d_x, rows, S, offs_c, mask_c, C)
    else:
        totals = load_partials(totals_ptr, b, group, PARTS, C, W, GROUPS, WIDTH, PARTIALS)
        moments = load_partials(moments_ptr, b, group, PARTS, C, W, GROUPS, WIDTH, PARTIALS)
        total = by_channel(tl.sum(totals, 0) / count, GROUPS, WIDTH)
        moment = by_channel(tl.sum(moments, 0) / count, GROUPS, WIDTH)
        start = part * LENGTH
        end = tl.minimum(start + LENGTH, S)
        for first in range(start, end, BLOCK_S):
            rows = first + tl.arange(0, BLOCK_S)
            xhat, d_y = load_gradients(
                x_ptr, d_y_ptr, rows, end, offs_c, mask_c, mean, rstd, scale, bias, C, ACTIVATION
            )
            d_x = rstd[None, :] * (scale[None, :] * d_y - total[None, :] - xhat * moment[None, :])
            store_rows(d_x_ptr, d_x, rows, end, offs_c, mask_c, C)
