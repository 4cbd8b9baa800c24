"""The gated delta rule in Triton: launches, and the passes over parts of time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_triton import delta_rule as kernels
from tjk import executors
from tjk.launch import Launch
from tjk.ops.delta_rule.operands import Operands
from tjk.ops.delta_rule.tiles import WARPS, block, columns, parts
from tjk.precision import Products, input_precision, products


@dataclasses.dataclass(frozen=True)
class Options:
    """What the public function fixes."""

    chunk_size: int
    scale: float
    l2_normalize: bool
    reverse: bool
    precision: str


def forward(operands: Operands, *, keep: bool, **options: Any) -> tuple[Array, Array, Array | None]:
    """o (B, L, H, V), the final state, and the state before each chunk, if it is to be kept."""
    passes = _Passes(operands, Options(**options))
    count = passes.parts()
    initial = operands.initial_state
    if count > 1:
        maps = executors.run(passes.compose(count))
        (initial,) = executors.run(passes.states(*maps, initial, count))
    o, states, final_state = executors.run(passes.outputs(initial, count, keep))
    return o, final_state, states if keep else None


def backward(
    operands: Operands, states: Array, d_o: Array, d_state: Array, **options: Any
) -> Operands:
    """The gradients of all operands, in their dtypes."""
    passes = _Passes(operands, Options(**options))
    count = passes.parts()
    entering = d_state
    if count > 1:
        maps, decay, *_ = executors.run(passes.d_compose(d_o, count))
        (entering,) = executors.run(passes.states(maps, decay, d_state, count))
    d_states, d_initial, *kept = executors.run(passes.d_states(d_o, states, entering, count))
    gradients = executors.run(passes.gradients(d_o, states, d_states, *kept))
    return Operands(*gradients, None if operands.initial_state is None else d_initial)


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The launches of one problem. Passes go through the chunks of `count` parts of time."""

    operands: Operands
    options: Options

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """B, L, H, K, V."""
        return (*self.operands.k.shape, self.operands.v.shape[-1])

    @property
    def chunks(self) -> int:
        return -(-self.operands.k.shape[1] // self.options.chunk_size)

    def parts(self) -> int:
        """In how many parts a pass over all of time is cut."""
        B, _, H, K, V = self.sizes
        return parts(B * H * -(-V // columns(K, V)), self.chunks)

    def compose(self, count: int) -> Launch:
        """The launch that makes the map and the decay of each part but the last."""
        B, _, H, K, V = self.sizes
        _, k, v, g, beta, *_ = self.operands
        return self._pass(
            kernels.delta_rule_compose,
            (k, v, g, beta, self._runs),
            ((B, count - 1, H, K, K + V), (B, count - 1, H)),
            count,
            compose=True,
        )

    def states(self, maps: Array, decay: Array, initial: Array | None, count: int) -> Launch:
        """The launch that makes the state before each part."""
        B, _, H, K, V = self.sizes
        kind = products(jnp.float32, self.options.precision, executors.architecture())
        inputs = (maps, decay, _or_empty(initial, B))
        states = jax.ShapeDtypeStruct((B, count, H, K, V), jnp.float32)
        return Launch(
            kernel=kernels.delta_rule_states,
            inputs=inputs,
            scalars=(count,),
            outputs=(states,),
            grid=(B * H * -(-V // 16),),
            constexprs={
                **{"H": H, "K": K, "V": V, "BLOCK_K": block(K), "BLOCK_V": 16},
                **{"HAS_INITIAL": initial is not None, "PRECISION": input_precision(kind)},
            },
            num_warps=WARPS,
            batched=True,
            flops=2 * B * count * H * K * K * V,
            bytes=_bytes(*inputs, states),
            arch=executors.architecture(),
        )

    def outputs(self, initial: Array | None, count: int, keep: bool) -> Launch:
        """The launch that makes o, the state before each chunk if `keep`, and the last one."""
        B, _, H, K, V = self.sizes
        return self._pass(
            kernels.delta_rule_outputs,
            (*self.operands[:5], self._runs, _or_empty(initial, B)),
            (self.operands.v, (B, self.chunks, H, K, V) if keep else (B, 0), (B, H, K, V)),
            count,
            scaled=True,
            constexprs={"HAS_INITIAL": initial is not None, "KEEP": keep},
        )

    def d_compose(self, d_o: Array, count: int) -> Launch:
        """The launch that makes the adjoint map and the decay of each part but the last."""
        B, _, H, K, V = self.sizes
        none = jnp.zeros((B, 0), jnp.float32)
        return self._pass(
            kernels.delta_rule_d_states,
            (*self.operands[:2], d_o[:, :0], *self.operands[3:5], self._runs, d_o, none, none),
            ((B, count - 1, H, K, K + V), (B, count - 1, H), *((B, 0),) * 3),
            count,
            compose=True,
            scaled=True,
            constexprs={"COMPOSE": True},
        )

    def d_states(self, d_o: Array, states: Array, entering: Array, count: int) -> Launch:
        """The launch that makes the gradient of the state behind each chunk and of the initial one.

        The former in the order of the pass; and new, d_right and sums for the gradients.
        """
        B, L, H, K, V = self.sizes
        v = self.operands.v
        # In TF32 wider tiles spill a few bytes on compute capability 8.6 and 9.0.
        block_w = 16 if self._kind == "tf32" else columns(K, V)
        sums = (B, L, H, -(-V // block_w), 4)
        return self._pass(
            kernels.delta_rule_d_states,
            (*self.operands[:5], self._runs, d_o, states, entering),
            ((B, self.chunks, H, K, V), (B, H, K, V), v, v, sums),
            count,
            scaled=True,
            block_w=block_w,
            constexprs={"COMPOSE": False},
        )

    def gradients(
        self, d_o: Array, states: Array, d_states: Array, new: Array, d_right: Array, sums: Array
    ) -> Launch:
        """The launch that makes the gradients of q, k, v, g and beta."""
        *_, K, V = self.sizes
        C = self.options.chunk_size
        q, k, _, g, beta, *_ = self.operands
        return self._launch(
            kernels.delta_rule_gradients,
            (q, k, g, beta, self._runs, d_o, states, d_states, new, d_right, sums),
            self.operands[:5],
            (self.operands.k.shape[1], self.chunks, self.options.scale),
            {"BLOCKS": sums.shape[3], "BLOCK_K": 16, "BLOCK_W": 16},
            programs=self.chunks,
            multiplications=C * C * (5 * K + 2 * V) + 3 * C * K * V,
        )

    def _pass(
        self,
        kernel: Any,
        inputs: tuple[Array, ...],
        outputs: tuple[Any, ...],
        count: int,
        *,
        compose: bool = False,
        scaled: bool = False,
        block_w: int | None = None,
        constexprs: dict[str, Any] | None = None,
    ) -> Launch:
        """A launch of a program for each part and block of columns; the last has no map."""
        _, L, _, K, V = self.sizes
        C, arch = self.options.chunk_size, executors.architecture()
        width = K + V if compose else V
        block_w = block_w or columns(K, width)
        done, per_part = count - 1 if compose else count, -(-self.chunks // count)
        # Three TF32 products make a float32 one; AMD's matrix cores take float32 itself.
        exact = "ieee" if self._kind == "ieee" or not isinstance(arch, int) else "tf32x3"
        gram = C * C * K * -(-width // block_w)
        return self._launch(
            kernel,
            inputs,
            outputs,
            (L, self.chunks, done, per_part, *((self.options.scale,) if scaled else ())),
            {
                **{"BLOCK_K": block(K), "BLOCK_W": block_w, "INVERSE_PRECISION": exact},
                **(constexprs or {}),
            },
            programs=done * -(-width // block_w),
            multiplications=(2 * gram + C * (3 * K + 2 * C) * width)
            if scaled
            else gram + C * (2 * K + C) * width,
        )

    def _launch(
        self,
        kernel: Any,
        inputs: tuple[Array, ...],
        outputs: tuple[Any, ...],
        scalars: tuple[int | float, ...],
        constexprs: dict[str, Any],
        *,
        programs: int,
        multiplications: int,
    ) -> Launch:
        """A launch of so many programs for each head, and multiplications for each of its chunks.

        outputs: like an input, or a shape of float32.
        """
        B, _, H, K, V = self.sizes
        structs = tuple(
            jax.ShapeDtypeStruct(x, jnp.float32)
            if isinstance(x, tuple)
            else jax.ShapeDtypeStruct(x.shape, x.dtype)
            for x in outputs
        )
        return Launch(
            kernel=kernel,
            inputs=inputs,
            scalars=scalars,
            outputs=structs,
            grid=(B * H * programs,),
            constexprs={
                **{"H": H, "K": K, "V": V, "C": self.options.chunk_size},
                **{"BLOCK_P": 16, "HAS_RUNS": self.operands.runs is not None},
                **{"L2_NORMALIZE": self.options.l2_normalize, "REVERSE": self.options.reverse},
                **{"PRECISION": input_precision(self._kind), **constexprs},
            },
            num_warps=WARPS,
            num_stages=1,
            batched=True,
            flops=2 * B * H * self.chunks * multiplications,
            bytes=_bytes(*inputs, *structs),
            arch=executors.architecture(),
        )

    @property
    def _kind(self) -> Products:
        return products(self.operands.k.dtype, self.options.precision, executors.architecture())

    @property
    def _runs(self) -> Array:
        runs = self.operands.runs
        return jnp.zeros((len(self.operands.k), 0), jnp.int32) if runs is None else runs


def _or_empty(state: Array | None, B: int) -> Array:
    return jnp.zeros((B, 0), jnp.float32) if state is None else state


def _bytes(*arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)
