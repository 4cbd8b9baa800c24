"""GPUs as XLA's compiler sees them: `target_config` lets it compile for a card that is absent."""

from dataclasses import dataclass

from tjk.executors.architectures import SHARED_MEMORY

_RESERVED = 1024  # bytes of a multiprocessor's shared memory that CUDA keeps for each block


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU's limits.

    Attributes:
        name: as the driver reports it.
        capability: CUDA compute capability without its dot, 86 for 8.6.
        cores: number of streaming multiprocessors.
        clock_ghz: boost clock.
        bandwidth: bytes per second from and to device memory.
        l2: bytes of level 2 cache.
        memory: bytes of device memory.
        threads: resident threads of a multiprocessor.
        fpus: float32 units of a multiprocessor.
    """

    name: str
    capability: int
    cores: int
    clock_ghz: float
    bandwidth: int
    l2: int
    memory: int
    threads: int = 2048
    fpus: int = 128


CARDS = {
    "rtx3090": Card(
        name="NVIDIA GeForce RTX 3090",
        capability=86,
        cores=82,
        clock_ghz=1.695,
        bandwidth=936_096_000_000,
        l2=6_291_456,
        memory=25_447_170_048,
        threads=1536,
    ),
    "a6000": Card(
        name="NVIDIA RTX A6000",
        capability=86,
        cores=84,
        clock_ghz=1.8,
        bandwidth=768_000_000_000,
        l2=6_291_456,
        memory=51_041_271_808,
        threads=1536,
    ),
    "a100": Card(
        name="NVIDIA A100-SXM4-80GB",
        capability=80,
        cores=108,
        clock_ghz=1.41,
        bandwidth=2_039_000_000_000,
        l2=41_943_040,
        memory=85_100_068_864,
        fpus=64,
    ),
    "h100": Card(
        name="NVIDIA H100 80GB HBM3",
        capability=90,
        cores=132,
        clock_ghz=1.98,
        bandwidth=3_352_000_000_000,
        l2=52_428_800,
        memory=84_929_347_584,
    ),
    "h200": Card(
        name="NVIDIA H200",
        capability=90,
        cores=132,
        clock_ghz=1.98,
        bandwidth=4_800_000_000_000,
        l2=52_428_800,
        memory=151_397_597_184,
    ),
    "b200": Card(
        name="NVIDIA B200",
        capability=100,
        cores=148,
        clock_ghz=1.965,
        bandwidth=7_672_000_000_000,
        l2=132_644_864,
        memory=191_514_411_008,
    ),
}


def target_config(card: Card) -> str:
    """The card as XLA's GpuTargetConfigProto in text form."""
    major, minor = divmod(card.capability, 10)
    shared = SHARED_MEMORY[card.capability]
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {shared}
          shared_memory_per_core: {shared + _RESERVED}
          threads_per_core_limit: {card.threads}
          core_count: {card.cores}
          fpus_per_core: {card.fpus}
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          memory_bandwidth: {card.bandwidth}
          l2_cache_size: {card.l2}
          clock_rate_ghz: {card.clock_ghz}
          device_memory_size: {card.memory}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{card.name}"
    """
