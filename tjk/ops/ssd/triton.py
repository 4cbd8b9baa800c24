"""The scan in Triton: launches and the choice of their tiles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_triton import ssd as kernels
from tjk import executors
from tjk.launch import Launch
from tjk.ops.ssd.operands import Operands
from tjk.ops.ssd.tiles import Kernel, Tile, choose
from tjk.precision import input_precision, products


def forward(
    operands: Operands, *, chunk_size: int, dt_softplus: bool, reverse: bool, precision: str
) -> tuple[Array, Array, Array]:
    """y, the final state, and the states at the starts of chunks: (B, chunks, H, P, R)."""
    problem = Problem(operands, chunk_size, dt_softplus, reverse, precision)
    (steps,) = executors.run(problem.steps())
    (added,) = executors.run(problem.chunk_states(operands.x, operands.B, steps, to_end=True))
    states, last = executors.run(problem.pass_states(added, steps))
    gate = "none" if operands.z is None else "forward"
    y, _ = executors.run(problem.outputs(steps, states, gate))
    return y, last, states


def backward(
    operands: Operands,
    states: Array,
    d_y: Array,
    d_final_state: Array,
    *,
    chunk_size: int,
    dt_softplus: bool,
    reverse: bool,
    precision: str,
) -> Operands:
    """The gradients of the operands, in their dtypes; None for runs."""
    problem = Problem(operands, chunk_size, dt_softplus, reverse, precision)
    (steps,) = executors.run(problem.steps())
    d_z = None
    if operands.z is not None:
        d_z, d_y = executors.run(problem.outputs(steps, states, "backward", d_y))
    (d_added,) = executors.run(problem.chunk_states(d_y, operands.C, steps, to_end=False))
    launch = problem.pass_d_states(d_added, d_final_state, states, steps)
    d_states, d_first, carried = executors.run(launch)
    d_C, from_state, crossing = executors.run(problem.d_C(d_y, steps, states))
    d_x, d_B, tokens = executors.run(problem.d_inputs(d_y, steps, d_states))
    launch = problem.d_steps(steps, tokens, crossing, from_state, carried)
    d_dt, d_heads = executors.run(launch)
    d_A, d_dt_bias, d_D = jnp.sum(d_heads, axis=(0, 1))
    d_B, d_C = (jnp.sum(a, axis=3).astype(operands.x.dtype) for a in (d_B, d_C))
    gradients = Operands(d_x, d_dt, d_A, d_B, d_C, d_D, d_z, d_dt_bias, d_first)
    return Operands(
        *(None if given is None else gradient for given, gradient in zip(operands, gradients))
    )


@dataclasses.dataclass(frozen=True)
class Problem:
    """One scan: each method describes one launch of it.

    `steps` (B, H, 3, L), and what the kernels' docstrings name, go from launch to launch.
    """

    operands: Operands
    chunk: int
    dt_softplus: bool
    reverse: bool
    precision: str

    def steps(self) -> Launch:
        """The launch that makes the steps and the sums of logarithms of decays."""
        batch, _, H, _ = self.operands.x.shape
        return self._launch(
            kernels.ssd_steps,
            (self.operands.dt, self._heads()),
            (jax.ShapeDtypeStruct((batch, H, 3, self._time), jnp.float32),),
            programs=self._chunks * H,
            constexprs={"SOFTPLUS": self.dt_softplus},
        )

    def chunk_states(self, x: Array, B: Array, steps: Array, *, to_end: bool) -> Launch:
        """The launch that makes what each chunk adds to the state, or to its gradient."""
        _, L, H, P = x.shape
        R = B.shape[3]
        tile = self._tile("states")
        block_p, block_r = min(tile.block_m, _power(P)), min(128, _power(R))
        tiles = -(-P // block_p) * -(-R // block_r)
        return self._launch(
            kernels.ssd_chunk_states,
            (x, B, steps, self._runs(steps)),
            (self._states,),
            programs=self._chunks * H * tiles,
            tile=tile,
            constexprs={
                **{"TO_END": to_end, "BLOCK_T": tile.block_n},
                **{"BLOCK_P": block_p, "BLOCK_R": block_r},
            },
            flops=2 * self.operands.x.shape[0] * H * L * tiles * block_p * block_r,
        )

    def pass_states(self, added: Array, steps: Array) -> Launch:
        """The launch that passes the state over the chunks."""
        first = self.operands.initial_state
        last = jax.ShapeDtypeStruct((added.shape[0], *added.shape[2:]), jnp.float32)
        block = self._pass_block
        return self._launch(
            kernels.ssd_pass_states,
            (added, steps if first is None else first, steps, self._runs(steps)),
            (self._states, last),
            programs=last.shape[1] * -(-self._size // block),
            constexprs={"HAS_FIRST": first is not None, "SIZE": self._size, "BLOCK": block},
        )

    def pass_d_states(self, d_added: Array, d_last: Array, states: Array, steps: Array) -> Launch:
        """The launch that passes the state's gradient over the chunks, backwards."""
        block = self._pass_block
        tiles = -(-self._size // block)
        carried = jax.ShapeDtypeStruct((*states.shape[:3], tiles), jnp.float32)
        return self._launch(
            kernels.ssd_pass_d_states,
            (d_added, d_last, states, steps, self._runs(steps)),
            (self._states, jax.ShapeDtypeStruct(d_last.shape, jnp.float32), carried),
            programs=d_last.shape[1] * tiles,
            constexprs={"SIZE": self._size, "BLOCK": block},
        )

    def outputs(self, steps: Array, states: Array, gate: str, d_y: Array | None = None) -> Launch:
        """The launch that makes y, or, with the gate "backward", d_z and d_y before the gate."""
        x, B, C, z = (getattr(self.operands, name) for name in "xBCz")
        tile = self._tile("outputs")
        like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
        nothing = jax.ShapeDtypeStruct((0,), x.dtype)
        tiles = self.chunk // tile.block_m
        return self._launch(
            kernels.ssd_outputs,
            (
                *(x, B, C, x if z is None else z, x if d_y is None else d_y),
                *(self._heads(), steps, self._runs(steps), states),
            ),
            (like_x, nothing if d_y is None else like_x),
            programs=self._chunks * x.shape[2] * tiles,
            tile=tile,
            constexprs={"GATE": gate, "BLOCK_M": tile.block_m, **self._blocks(tile)},
            flops=self._flops(tile.block_m, pairs=1, states=1),
        )

    def d_C(self, d_y: Array, steps: Array, states: Array) -> Launch:
        """The launch that makes the gradient of C, and what each token takes from the state."""
        x, B, C = (getattr(self.operands, name) for name in "xBC")
        batch, _, H, _ = x.shape
        tile = self._tile("d_C")
        tiles = self.chunk // tile.block_m
        splits = self._splits(tiles)
        return self._launch(
            kernels.ssd_d_C,
            (x, B, C, d_y, steps, self._runs(steps), states),
            (
                self._per_group(splits),
                jax.ShapeDtypeStruct((batch, H, self._time), jnp.float32),
                jax.ShapeDtypeStruct((batch, H, tiles, self._time), jnp.float32),
            ),
            programs=self._chunks * B.shape[2] * splits * tiles,
            heads=H // (B.shape[2] * splits),
            tile=tile,
            constexprs={"SPLITS": splits, "BLOCK_M": tile.block_m, **self._blocks(tile)},
            flops=self._flops(tile.block_m, pairs=1, states=1),
        )

    def d_inputs(self, d_y: Array, steps: Array, d_states: Array) -> Launch:
        """The launch that makes the gradients of x and B, and pieces of that of the steps."""
        x, B, C = (getattr(self.operands, name) for name in "xBC")
        batch, _, H, _ = x.shape
        tile = self._tile("d_inputs")
        tiles = self.chunk // tile.block_m
        splits = self._splits(tiles)
        return self._launch(
            kernels.ssd_d_inputs,
            (x, B, C, d_y, self._heads(), steps, self._runs(steps), d_states),
            (
                jax.ShapeDtypeStruct(x.shape, x.dtype),
                self._per_group(splits),
                jax.ShapeDtypeStruct((batch, H, 3, self._time), jnp.float32),
            ),
            programs=self._chunks * B.shape[2] * splits * tiles,
            heads=H // (B.shape[2] * splits),
            tile=tile,
            constexprs={"SPLITS": splits, "BLOCK_M": tile.block_m, **self._blocks(tile)},
            flops=self._flops(tile.block_m, pairs=2, states=2),
        )

    def d_steps(
        self, steps: Array, tokens: Array, crossing: Array, from_state: Array, carried: Array
    ) -> Launch:
        """The launch that makes the gradients of dt and, chunk by chunk, of A, dt_bias and D."""
        dt = self.operands.dt
        batch, _, H = dt.shape
        return self._launch(
            kernels.ssd_d_steps,
            (dt, self._heads(), steps, tokens, crossing, from_state, carried),
            (
                jax.ShapeDtypeStruct(dt.shape, dt.dtype),
                jax.ShapeDtypeStruct((batch, self._chunks, 3, H), jnp.float32),
            ),
            programs=self._chunks * H,
            constexprs={
                **{"PARTS": crossing.shape[2], "TILES": carried.shape[3]},
                "SOFTPLUS": self.dt_softplus,
            },
        )

    def _launch(
        self,
        kernel: Any,
        inputs: tuple[Array, ...],
        outputs: tuple[jax.ShapeDtypeStruct, ...],
        *,
        programs: int,
        constexprs: dict[str, Any],
        heads: int | None = None,
        tile: Tile | None = None,
        flops: int = 0,
    ) -> Launch:
        """A launch of `programs` a sequence, each for so many heads, if the kernel takes a number.

        Arrays that stand in for absent ones are not counted twice.
        """
        batch, L, H, P = self.operands.x.shape
        G, R = self.operands.B.shape[2:]
        known = {"H": H, "G": G, "P": P, "R": R, "CHUNK": self.chunk, "REVERSE": self.reverse}
        known |= {"HAS_RUNS": self.operands.runs is not None}
        kind = products(self.operands.x.dtype, self.precision, executors.architecture())
        known |= {"PRECISION": input_precision(kind)}
        known = {name: value for name, value in known.items() if name in kernel.arg_names}
        moved = (*{id(a): a for a in inputs}.values(), *outputs)
        return Launch(
            kernel=kernel,
            inputs=inputs,
            scalars=(L, self._chunks) if heads is None else (L, self._chunks, heads),
            outputs=outputs,
            grid=(batch * programs,),
            constexprs=known | constexprs,
            num_warps=4 if tile is None else tile.num_warps,
            num_stages=2 if tile is None else tile.num_stages,
            batched=True,
            flops=flops,
            bytes=sum(a.size * a.dtype.itemsize for a in moved),
            arch=executors.architecture(),
        )

    @property
    def _chunks(self) -> int:
        return -(-self.operands.x.shape[1] // self.chunk)

    @property
    def _time(self) -> int:
        """L, up to whole chunks."""
        return self._chunks * self.chunk

    @property
    def _size(self) -> int:
        """Elements of one head's state."""
        return self.operands.x.shape[3] * self.operands.B.shape[3]

    @property
    def _states(self) -> jax.ShapeDtypeStruct:
        batch, _, H, P = self.operands.x.shape
        shape = batch, self._chunks, H, P, self.operands.B.shape[3]
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def _heads(self) -> Array:
        """A, bias and D of each head, for each sequence, so that `jax.vmap` can fold: (B, 3, H)."""
        A = self.operands.A
        given = (
            a if a is not None else jnp.zeros_like(A)
            for a in (A, self.operands.dt_bias, self.operands.D)
        )
        return jnp.broadcast_to(jnp.stack([*given]), (self.operands.x.shape[0], 3, len(A)))

    def _runs(self, steps: Array) -> Array:
        return steps if self.operands.runs is None else self.operands.runs

    def _per_group(self, splits: int) -> jax.ShapeDtypeStruct:
        """d_B or d_C: in x's dtype, or float32 where parts of a group's heads are to be added."""
        B = self.operands.B
        dtype = B.dtype if splits == 1 else jnp.float32
        return jax.ShapeDtypeStruct((*B.shape[:3], splits, B.shape[3]), dtype)

    def _splits(self, tiles: int) -> int:
        """In how many parts a group's heads go to programs: as few as fill the card twice."""
        batch, _, H, _ = self.operands.x.shape
        G = self.operands.B.shape[2]
        programs = batch * self._chunks * G * tiles
        divisors = [d for d in range(1, H // G + 1) if H // G % d == 0]
        enough = (d for d in divisors if programs * d >= 2 * executors.multiprocessors())
        return next(enough, H // G)

    @property
    def _pass_block(self) -> int:
        """Elements of a program that passes states: as many as leave two programs a processor."""
        batch, _, H, _ = self.operands.x.shape
        per_program = batch * H * self._size // (2 * executors.multiprocessors())
        return max(128, min(1024, 1 << max(0, per_program.bit_length() - 1)))

    def _tile(self, kernel: Kernel) -> Tile:
        arch = executors.architecture()
        kind = products(self.operands.x.dtype, self.precision, arch)
        width = max(self.operands.x.shape[3], self.operands.B.shape[3])
        return choose(kernel, kind, width, self.chunk, arch)

    def _blocks(self, tile: Tile) -> dict[str, int]:
        P, R = self.operands.x.shape[3], self.operands.B.shape[3]
        ieee = products(self.operands.x.dtype, self.precision, executors.architecture()) == "ieee"
        blocks = {"BLOCK_N": tile.block_n, "BLOCK_K": 16 if ieee else 32}
        return blocks | {"BLOCK_P": _power(P), "BLOCK_R": _power(R)}

    def _flops(self, block: int, *, pairs: int, states: int) -> int:
        """Of products for pairs of tokens, each one of P and one of R terms, and with states."""
        batch, L, H, P = self.operands.x.shape
        P, R = _power(P), _power(self.operands.B.shape[3])
        full, tail = self.chunk // block, -(-(L % self.chunk) // block)
        whole = L // self.chunk
        tiles = whole * full + tail
        tile_pairs = whole * full * (full + 1) // 2 + tail * (tail + 1) // 2
        per_head = tile_pairs * block**2 * pairs * (P + R) + tiles * block * states * P * R
        return 2 * batch * H * per_head


def _power(width: int) -> int:
    """The next power of two, at least 16, the least that tensor cores take."""
    return max(16, 1 << (width - 1).bit_length())
