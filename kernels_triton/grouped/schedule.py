"""Which rows a program of a grouped product works on, found on the device from the group sizes.

The rows of all groups lie one behind the other. Each group is cut into tiles of BLOCK_M rows, the
last of which may be short; a tile never crosses into the next group, so all of its rows share one
right operand. Rows behind the last group form one more, numbered G, which has no right operand and
whose product is zero. No operand is padded, and nothing but the tiles that exist is visited.
"""

import triton
import triton.language as tl


@triton.jit
def group_bounds(group_sizes_ptr, M, G: tl.constexpr, GROUPS: tl.constexpr):
    """First row and end of each group, (GROUPS,) int32 each, GROUPS > G a power of two.

    Group G has the rows that are left; those behind it are empty. Whatever the sizes are, negative
    or of too large a sum, the bounds lie between 0 and M.
    """
    offs_g = tl.arange(0, GROUPS)
    sizes = tl.load(group_sizes_ptr + offs_g, mask=offs_g < G, other=0)
    sizes = tl.minimum(tl.maximum(sizes, 0), M)
    ends = tl.cumsum(sizes, 0)
    starts = tl.minimum(tl.maximum(ends - sizes, 0), M)
    ends = tl.minimum(tl.maximum(ends, 0), M)
    return starts, tl.where(offs_g < G, ends, M)


@triton.jit
def tile_bounds(starts, ends, BLOCK_M: tl.constexpr):
    """The tiles of all groups, numbered through.

    Returns the number of the tile behind each group's last one, (GROUPS,); the row at which each
    group's tile number 0 would begin, (GROUPS,); and how many tiles there are.
    """
    tiles = tl.cdiv(tl.maximum(ends - starts, 0), BLOCK_M)
    tile_ends = tl.cumsum(tiles, 0)
    return tile_ends, starts - (tile_ends - tiles) * BLOCK_M, tl.sum(tiles, 0)


@triton.jit
def swizzle(t, tiles_m, tiles_n):
    """Tile (m, n) number t, in bands of eight m: the tiles that run at one time share operands."""
    BAND: tl.constexpr = 8
    band = t // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    inside = t % (BAND * tiles_n)
    return band * BAND + inside % height, inside // height


@triton.jit
def tile_rows(m, ends, tile_ends, origins, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Group of tile m, its first row, and the end of that group's rows."""
    group = tl.sum((tile_ends <= m).to(tl.int32), 0)
    mine = tl.arange(0, GROUPS) == group
    first = tl.sum(tl.where(mine, origins, 0), 0) + m * BLOCK_M
    return group, first, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def terms(group, G: tl.constexpr, K: tl.constexpr):
    """How many terms the products of a group have: K, and none for the rows behind the last group.

    So written, the compiler does not see that there are only these two values, for each of which it
    would unroll the loop.
    """
    return tl.minimum(tl.maximum(G - group, 0) * K, K)
