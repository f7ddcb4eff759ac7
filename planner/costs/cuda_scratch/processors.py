"""Multiprocessors of the GPUs in the table of devices, by which some kernels size their scratch memory.

Counts are the makers' (NVIDIA's whitepapers of each architecture):
https://hmc-tech.com/gpu/nvidia_v100-vs-nvidia_t40 and https://hmc-tech.com/gpus/nvidia-b200-vs-nvidia-l40
show those of the V100, the L40's chip and the B200; an H200 said 132. Threads of one multiprocessor are
those of its compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability").
"""

from dataclasses import dataclass

from planner.costs.devices import DEVICES, Device, same_processor

_COUNTS = {
    "V100-16GB": 80,
    "V100-32GB": 80,
    "T4": 40,
    "A10": 72,
    "A100-40GB": 108,
    "A100-80GB": 108,
    "L4": 58,
    "L40S": 142,
    "H100": 132,
    "H200": 132,
    "B200": 148,
    "RTX3090": 82,
    "RTX4090": 128,
    "RTX5090": 170,
}
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
_MOST_THREADS = 2048
_LIKELY_COUNT = 108


@dataclass(frozen=True, slots=True)
class Processor:
    """The figures of a GPU by which kernels size their scratch.

    Attributes:
        capability: Its CUDA compute capability.
        multiprocessors: How many there are.
        threads: The most threads that one of them holds.
    """

    capability: tuple[int, int]
    multiprocessors: int
    threads: int


def processor_of(device: Device) -> Processor:
    """The processor of a device of the table, or of one with the same figures; else a likely one."""
    counts = (n for name, n in _COUNTS.items() if same_processor(device, DEVICES[name]))
    capability = device.capability or (9, 0)
    count = _COUNTS.get(device.name) or next(counts, _LIKELY_COUNT)
    return Processor(capability, count, _THREADS.get(capability, _MOST_THREADS))
