"""The accelerators a plan can be made for: memory, bandwidth, arithmetic and allocator granularity.

Planning needs a device's figures, not the device: for a GPU that is absent they come from the table below, or
from a JSON file of your own (see :func:`load_device`). ``"cpu"`` is a fixed reference processor with this
machine's memory, so that plans and overheads are comparable between machines; ``"cuda"`` is the GPU that is
present.

FLOP/s are the makers' dense peak figures (no structured sparsity), matrix units included where a
dtype has them, with 32-bit accumulation. ``memory_bytes`` is what CUDA reports as the total of the
device (the figure in PyTorch's out-of-memory messages), which is less than the figure on the box; it
differs by driver, and the table has the least that was seen.

The table names the maker's document of each figure, and a page on which the figures were checked. Figures
marked "not seen" were found on no such page; the maker's document is their only source.
"""

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import platformdirs
import torch

from planner.errors import PlannerError

GIB = 1 << 30
# What a file may say: it is data from outside.
_LARGEST_FILE = 1 << 20
_MOST_CHARACTERS = 200
_MOST_BYTES = 1 << 50
_SLOWEST, _FASTEST = 1e3, 1e21
"""Of FLOP/s and of bytes per second."""
# PyTorch's CUDA caching allocator rounds every block up to 512 bytes (kMinBlockSize).
CUDA_ROUNDING_BYTES = 512
# A CUDA context with PyTorch's kernels takes 300 to 550 MiB: it depends on card, driver and CUDA version;
# 693 on an H200 with CUDA 13.0, of which 527 are there before the first kernel.
CUDA_CONTEXT_BYTES = 500 << 20
CUDA_CONTEXT_BYTES_HOPPER = 700 << 20
CUDA_LAUNCH_SECONDS = 4e-6  # kernels shorter than this are bound by their launch
# PyTorch gives cuBLAS a workspace from the caching allocator for every thread that multiplies matrices (the
# one that runs the forward and autograd's), which it keeps: :4096:2:16:8, 32 MiB from Hopper on (an upper
# bound where a version of PyTorch gives Blackwell the former). hipBLAS gets 32 MiB, and 128 on gfx94, the
# MI300's: parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp.
CUBLAS_THREADS = 2
CUBLAS_WORKSPACE_BYTES = 2 * (4096 << 10) + 8 * (16 << 10)
CUBLAS_WORKSPACE_BYTES_HOPPER = 32 << 20
HIPBLAS_WORKSPACE_BYTES_GFX94 = 128 << 20
LINKS = {7: 15.75e9, 8: 31.5e9, 9: 63e9}
"""Bytes per second in each direction of the links by which cards of a compute capability, or a later one, are
connected: PCI Express x16, 3.0 for Volta and Turing, 4.0 for Ampere and Ada, 5.0 from Hopper on (NVIDIA's
datasheets; the PCI-SIG's rates of 8, 16 and 32 GT/s a lane with 128b/130b encoding)."""


class DeviceError(PlannerError, ValueError):
    """A device name is unknown, ambiguous, or names hardware that this machine does not have."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The figures of one device, for the cost model and the memory model.

    Attributes:
        name: For people and plan files.
        kind: ``"cuda"`` (also AMD's, under ROCm) or ``"cpu"``.
        memory_bytes: Total memory of the device.
        bandwidth: Bytes per second between memory and processor.
        flops: FLOP/s by dtype name (``"float32"``, ``"bfloat16"``, ...); ``"tf32"`` is for ``float32``
            matrix products where TF32 is allowed.
        launch_seconds: Time that every kernel takes at least.
        allocation_rounding_bytes: Every allocation is rounded up to a multiple of this.
        context_bytes: Memory in use before the first tensor exists.
        library_bytes: Memory that matrix libraries allocate once and keep.
        capability: CUDA compute capability, which decides the attention kernels; None where it has none.
        cudnn: Whether cuDNN's kernels run on it: on NVIDIA's GPUs, not on AMD's.
        figures: The source of the figures: "published", or "calibrated" (measured).
        to_host, from_host: Bytes per second of its link to the host's memory, in each direction; of the CPU,
            to and from a disk.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    launch_seconds: float
    allocation_rounding_bytes: int
    context_bytes: int
    library_bytes: int = 0
    capability: tuple[int, int] | None = None
    cudnn: bool = True
    figures: str = "published"
    to_host: float = 2e9
    from_host: float = 3e9

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type is int:  # files write whole numbers as 5e8 too
                object.__setattr__(self, each.name, int(getattr(self, each.name)))

    def flops_of(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """FLOP/s for matrix arithmetic in `dtype`; a dtype that is not listed counts as ``float32``."""
        if tf32 and dtype is torch.float32 and "tf32" in self.flops:
            return self.flops["tf32"]
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])


def round_bytes(device: Device, count: int) -> int:
    """Returns the bytes that an allocation of `count` bytes takes on `device`."""
    rounding = device.allocation_rounding_bytes
    return -(-count // rounding) * rounding


def _gpu(
    name: str,
    gib: float,
    bandwidth_gb: float,
    float64: float,
    float32: float,
    tf32: float | None,
    float16: float,
    bfloat16: float | None,
    float8: float | None,
    capability: tuple[int, int] | None,
) -> Device:
    """`gib` as CUDA reports it; `bandwidth_gb` in 10^9 bytes/s; the dtypes in TFLOP/s."""
    amd, hopper = name.startswith("MI"), (capability or (0, 0)) >= (9, 0)
    library = CUBLAS_WORKSPACE_BYTES_HOPPER if hopper else CUBLAS_WORKSPACE_BYTES
    if amd and capability == (9, 4):
        library = HIPBLAS_WORKSPACE_BYTES_GFX94
    generation = 8 if name == "MI250" else min(max((capability or (8, 0))[0], min(LINKS)), max(LINKS))
    tera = {"float64": float64, "float32": float32, "float16": float16, "bfloat16": bfloat16 or float32}
    if tf32 is not None:
        tera["tf32"] = tf32
    if float8 is not None:
        tera |= {"float8_e4m3fn": float8, "float8_e5m2": float8}
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=int(gib * GIB),
        bandwidth=bandwidth_gb * 1e9,
        flops={dtype: figure * 1e12 for dtype, figure in tera.items()},
        launch_seconds=CUDA_LAUNCH_SECONDS,
        allocation_rounding_bytes=CUDA_ROUNDING_BYTES,
        context_bytes=CUDA_CONTEXT_BYTES_HOPPER if hopper and not amd else CUDA_CONTEXT_BYTES,
        library_bytes=CUBLAS_THREADS * library,
        capability=capability,
        cudnn=not amd,
        to_host=LINKS[generation],
        from_host=LINKS[generation],
    )


_CPU = Device(
    name="cpu",
    kind="cpu",
    memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    bandwidth=10e9,
    flops=dict.fromkeys(("float64", "float32", "float16", "bfloat16", "complex64", "complex128"), 125e9),
    launch_seconds=2e-6,
    allocation_rounding_bytes=1,
    context_bytes=0,
)

# fmt: off
_TABLE = tuple(_gpu(*row) for row in (
    # name, GiB, GB/s; TFLOP/s in float64, float32, TF32, float16, bfloat16, float8; compute capability
    # (NVIDIA's list of CUDA GPUs)
    # NVIDIA V100 datasheet, SXM2. No bfloat16 units: it runs at the float32 rate. TFLOP/s:
    # https://github.com/avensun/deep-learning-benchmark; float64:
    # https://fudzilla.com./news/ai/50832-nvidia-unveils-the-a100-tensor-core-gpu; GiB:
    # https://github.com/liucongg/ChatGLM-Finetuning/issues/73,
    # https://github.com/kchengiva/Shift-GCN/issues/34
    ("V100-16GB", 15.77, 900, 7.8, 15.7, None, 125, None, None, (7, 0)),
    ("V100-32GB", 31.74, 900, 7.8, 15.7, None, 125, None, None, (7, 0)),
    # NVIDIA T4 datasheet: https://sysrqmts.com/en/gpus/nvidia/tesla/t4; GiB (some report 14.76):
    # https://github.com/AlphaGPU/leetgpu-challenges/issues/52
    ("T4", 14.56, 320, 0.25, 8.1, None, 65, None, None, (7, 5)),
    # NVIDIA A10 datasheet: https://sysrqmts.com/ru/gpus/compare/nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000;
    # float16: https://gist.github.com/kimbochen; TF32 not seen; GiB:
    # https://github.com/zai-org/CogVLM/issues/236
    ("A10", 21.99, 600, 0.98, 31.2, 62.5, 125, 125, None, (8, 6)),
    # NVIDIA A100 datasheet, SXM4; float64 outside the matrix units:
    # https://glennklockwood.com/garden/processors/A100; GiB: 39.49 and more of the 40 GB card were seen,
    # 79.25 of the other (https://github.com/HiDream-ai/VAREdit/issues/6), not quite those below.
    ("A100-40GB", 39.39, 1555, 9.7, 19.5, 156, 312, 312, None, (8, 0)),
    ("A100-80GB", 79.15, 2039, 9.7, 19.5, 156, 312, 312, None, (8, 0)),
    # NVIDIA L4 and L40S datasheets; figures with sparsity halved; float64 at 1/64 of float32:
    # https://fpsbench.com/compare/gpu/nvidia-l4-vs-nvidia-tesla-m40,
    # https://grokipedia.com/page/NVIDIA_L4_vs_L40S, https://www.mullet.se/product.html?product_id=355414;
    # GiB of the L4 not seen, of the L40S: https://github.com/stepfun-ai/Step-Video-T2V/issues/8
    ("L4", 22.03, 300, 0.47, 30.3, 60, 121, 121, 242, (8, 9)),
    ("L40S", 44.4, 864, 1.43, 91.6, 183, 362, 362, 733, (8, 9)),
    # NVIDIA H100 and H200 datasheets, SXM; with sparsity halved:
    # https://glennklockwood.com/garden/processors/h100,
    # https://itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html; GiB of the H100:
    # https://github.com/vllm-project/vllm/issues/27508; of the H200 as measured (docs/results/gpu.md).
    ("H100", 79.1, 3350, 34, 67, 494, 989, 989, 1979, (9, 0)),
    ("H200", 139.8, 4800, 34, 67, 494, 989, 989, 1979, (9, 0)),
    # NVIDIA Blackwell datasheet, one GPU of an HGX B200, with sparsity halved:
    # https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html; GiB: a little less than
    # nvidia-smi's 179 (https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview).
    ("B200", 178.3, 7700, 37, 75, 1100, 2250, 2250, 4500, (10, 0)),
    # NVIDIA GA102, Ada and RTX Blackwell whitepapers; matrix products with 32-bit accumulation (of the 3090
    # and the 5090 half and a quarter of
    # https://holynerdvana.blogspot.com/2022/10/nvidia-geforce-rtx-3090-specifications.html and
    # https://www.spheron.network/blog/nvidia-rtx-5090-specs/, which are of 16-bit accumulation, the latter
    # with sparsity); https://waredb.com/processor/nvidia-geforce-rtx-4090; float64 of the 3090 and the 5090
    # not seen. GiB: https://github.com/3DTopia/Phidias-Diffusion/issues/8,
    # https://github.com/TrajectoryCrafter/TrajectoryCrafter/issues/20
    ("RTX3090", 23.69, 936, 0.56, 35.6, 35.6, 71, 71, None, (8, 6)),
    ("RTX4090", 23.64, 1008, 1.29, 82.6, 82.6, 165.2, 165.2, 330.3, (8, 9)),
    ("RTX5090", 31.36, 1792, 1.64, 104.8, 104.8, 209.5, 209.5, 419, (12, 0)),
    # AMD Instinct MI250 datasheet, one of its two dies: that is the device PyTorch sees, with gfx90a
    # reported as capability 9.0, by which attention kernels are chosen. float32 and float64 on the matrix
    # cores: https://zexron.com/amd-mi250-x-aldebaran-as-mcm-with-up-to-479-teraflop-s-and-560-watt-tdp; GiB
    # not seen.
    ("MI250", 63.98, 1638, 45.3, 45.3, None, 181, 181, None, (9, 0)),
    # AMD Instinct MI300X datasheet; float32 and float64 on the matrix cores. Bandwidth and float8:
    # https://localaimaster.com/blog/mi300x-deep-dive; the other TFLOP/s and GiB not seen.
    ("MI300X", 191.9, 5300, 163.4, 163.4, 654, 1307, 1307, 2615, (9, 4)),
))
# fmt: on

DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in (*_TABLE, _CPU)})


def find_device(
    name: str | torch.device | Device | None,
    model_device: torch.device | None = None,
    *,
    calibrated: bool = True,
) -> Device:
    """Finds the device that a plan is for.

    Args:
        name: A name from the table (``"A100-80GB"``; case, spaces, ``-`` and ``_`` do not matter), ``"cpu"``,
            ``"cuda"`` or ``"cuda:1"`` for a GPU that is present, a :class:`torch.device`, a
            :class:`Device` of one's own, the path of a ``.json`` file that :func:`load_device` reads, or
            ``None`` for the device the model is on. A name may have its memory behind it (``"H100-80GB"``).
        model_device: Where the model's parameters are; used when `name` is ``None``. A model on the
            meta device counts as on the CPU.
        calibrated: For a GPU that is present, take the figures that ``python -m planner calibrate`` measured,
            if there are some.

    Raises:
        DeviceError: The name is unknown (near matches are listed), fits several devices, or is that of a GPU
            that this machine does not have.
    """
    if isinstance(name, Device):
        return name
    if name is None:
        name = model_device if model_device is not None and model_device.type != "meta" else "cpu"
    if isinstance(name, torch.device):
        name = str(name)
    if not isinstance(name, str):
        raise DeviceError(
            f'device= is a {type(name).__name__}: expected a name such as "A100-80GB", "cpu" or "cuda", a '
            "torch.device, or a Device"
        )
    if name.endswith(".json"):
        return load_device(name)
    wanted = _plain(name)
    if re.fullmatch(r"cpu(:0)?", wanted):
        return _CPU
    if match := re.fullmatch(r"cuda(?::(\d+))?", wanted):
        return _present_gpu(int(match[1]) if match[1] else None, calibrated)
    exact = [d for d in DEVICES.values() if _plain(d.name) == wanted or _named_with_memory(d, name)]
    if exact:
        return exact[0]
    near = [device.name for device in DEVICES.values() if wanted and _plain(device.name).startswith(wanted)]
    if near:
        raise DeviceError(f"device {name!r} could be any of {', '.join(near)}: name one of them")
    names = {_plain(known): known for known in DEVICES}
    close = [names[plain] for plain in difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise DeviceError(
        f"unknown device {name!r}: {hint}known are {', '.join(DEVICES)} and 'cuda' for the GPU that is here"
    )


def _named_with_memory(device: Device, name: str) -> bool:
    """Whether a name is a device's with its gigabytes. Sellers say up to a tenth more than there are."""
    match = re.fullmatch(r"(.+)[-_ ]([1-9]\d*) ?gb", name.strip(), re.IGNORECASE)
    if match is None or _plain(match[1]) != _plain(device.name):
        return False
    return 0.9 <= device.memory_bytes / GIB / int(match[2]) <= 1.0


def same_processor(one: Device, other: Device) -> bool:
    """Whether kernels run alike on two devices, whatever their names and memory.

    ``"H100"`` is the processor that the driver calls "NVIDIA H100 80GB HBM3".
    """

    def figures(device: Device) -> tuple[object, ...]:
        return device.kind, device.bandwidth, dict(device.flops), device.capability

    if one.name == other.name or (one.kind == "cuda" and figures(one) == figures(other)):
        return True
    # Measured figures equal no other device's: the names decide.
    alike = one.kind == other.kind == "cuda" and one.capability == other.capability
    measured = "calibrated" in (one.figures, other.figures)
    return alike and measured and (_names(one.name, other) or _names(other.name, one))


def calibrated_path(product: str) -> Path:
    """The file for the measured figures of a GPU, by the name that its driver gives it."""
    plain = re.sub(r"[^a-z0-9]+", "-", product.lower()).strip("-")
    return Path(platformdirs.user_cache_dir("torch-checkpoint-planner")) / "devices" / f"{plain}.json"


def load_device(path: str | os.PathLike[str]) -> Device:
    """Reads a device of your own from a JSON file.

    The file holds one object with fields of :class:`Device`. ``"like"`` names a known device whose
    figures hold for every field that is not given::

        {"name": "A100 capped", "like": "A100-80GB", "memory_bytes": 42949672960}

    Raises:
        DeviceError: The file cannot be read, or a field is missing, unknown or of the wrong type.
    """
    shown = f"device file {os.fspath(path)!r}"
    try:
        given = _read_object(path)
    except ValueError as error:
        raise DeviceError(f"device file {os.fspath(path)!r}{error}") from None
    known = {f.name for f in fields(Device)}
    values = {f.name: f.default for f in fields(Device) if f.default is not MISSING}
    if "like" in given:
        like = given.pop("like")
        if not isinstance(like, str) or like.endswith(".json"):  # a file could refer to itself
            raise DeviceError(f"{shown}: 'like' is {like!r:.100}, expected the name of a known device")
        values = _fields_of(find_device(like[:_MOST_CHARACTERS]))
    if unknown := set(given) - known:
        raise DeviceError(
            f"{shown}: unknown field {sorted(unknown)[0]!r:.100}; expected some of "
            f"{', '.join(sorted(known))} and 'like'"
        )
    values |= given
    if missing := ", ".join(f.name for f in fields(Device) if f.name not in values):
        raise DeviceError(f"{shown}: missing {missing}; or name a device under 'like'")
    if (wrong := _wrong_figure(values)) is not None:
        name, expected = wrong
        raise DeviceError(f"{shown}: {name} is {values[name]!r:.100}, expected {expected}")
    if values["capability"] is not None:
        values["capability"] = tuple(values["capability"])
    return Device(**values)


def _fields_of(device: Device) -> dict[str, Any]:
    return {f.name: getattr(device, f.name) for f in fields(Device)}


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _present_gpu(index: int | None, calibrated: bool) -> Device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise DeviceError("no CUDA device is here: plan for one by its name, for example device='A100-80GB'")
    if index is None:
        index = torch.cuda.current_device()
    if index >= count:
        raise DeviceError(f"device 'cuda:{index}' does not exist: this machine has {count}, numbered from 0")
    properties = torch.cuda.get_device_properties(index)
    path = calibrated_path(properties.name)
    if calibrated and path.exists():
        return replace(load_device(path), memory_bytes=properties.total_memory)
    return described_gpu(properties.name, properties.total_memory, properties)


def described_gpu(product: str, memory_bytes: int, properties: object = None) -> Device:
    """The device for a GPU that the driver calls `product` (``"NVIDIA A100-SXM4-80GB"``).

    Its figures come from the table where it is listed, and are estimated from `properties` (those of
    :func:`torch.cuda.get_device_properties`) where it is not. Its memory is always `memory_bytes`.
    """
    listed = [device for device in _TABLE if _names(product, device)]
    if listed:
        nearest = min(listed, key=lambda device: abs(device.memory_bytes - memory_bytes))
        return replace(nearest, name=product, memory_bytes=memory_bytes)
    return replace(_estimated(properties), name=product, memory_bytes=memory_bytes)


def _names(product: str, device: Device) -> bool:
    words = re.sub(r"[\s_-]+", " ", product).lower().replace("rtx ", "rtx")
    model = device.name.split("-")[0].lower()
    # "A10" is no name of an A100, "L4" none of an L40, "H200" none of a GH200.
    return re.search(rf"(?<![a-z0-9]){model}(?![0-9])", words) is not None


def _estimated(properties: object) -> Device:
    """A device estimated from clocks and counts.

    It has 128 fused multiply-adds per clock and multiprocessor, and double data rate memory.
    """
    units = int(getattr(properties, "multi_processor_count", 0) or 40)
    clock = float(getattr(properties, "clock_rate", 0) or 1.5e6) * 1e3
    memory_clock = float(getattr(properties, "memory_clock_rate", 0) or 0) * 1e3
    bus_bits = float(getattr(properties, "memory_bus_width", 0) or 0)
    float32 = units * 128 * 2 * clock / 1e12
    bandwidth = 2 * memory_clock * bus_bits / 8 / 1e9 or 500.0
    half = 4 * float32
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    capability = None if major is None or minor is None else (int(major), int(minor))
    return _gpu("", 0, bandwidth, float32 / 32, float32, None, half, half, None, capability)


def _read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: The file cannot be read, or holds no object.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise ValueError("it is too large for a device")
        given = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f" cannot be read: {str(error)[:300]}") from None
    if not isinstance(given, dict):
        raise ValueError(": a device is a JSON object")
    return given


def _wrong_figure(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first field with a figure that no device has, and what is expected there; None where all are right.

    Args:
        values: All fields of a device.
    """
    name, flops, capability = values["name"], values["flops"], values["capability"]
    if not isinstance(name, str) or not 1 <= len(name) <= _MOST_CHARACTERS:
        return "name", f"a text of at most {_MOST_CHARACTERS} characters"
    if values["kind"] not in ("cpu", "cuda"):
        return "kind", "'cpu' or 'cuda'"
    if not isinstance(flops, Mapping) or "float32" not in flops:
        return "flops", "FLOP/s by dtype, 'float32' among them"
    if not all(_is_number(figure) and _SLOWEST <= figure <= _FASTEST for figure in flops.values()):
        return "flops", f"numbers of at least {_SLOWEST:g}, and at most {_FASTEST:g}"
    for rate in ("bandwidth", "to_host", "from_host"):
        if not _is_number(values[rate]) or not _SLOWEST <= values[rate] <= _FASTEST:
            return rate, f"a number of at least {_SLOWEST:g}, and at most {_FASTEST:g}"
    if not _is_number(values["launch_seconds"]) or not 0 <= values["launch_seconds"] <= 1:
        return "launch_seconds", "a number of at least 0, and at most 1"
    for count, least, most in (
        ("memory_bytes", 1, _MOST_BYTES),
        ("allocation_rounding_bytes", 1, 1 << 30),
        ("context_bytes", 0, _MOST_BYTES),
        ("library_bytes", 0, _MOST_BYTES),
    ):
        value = values[count]
        if not _is_number(value) or not least <= value <= most or value != int(value):
            above = "above 0" if least else "of at least 0"
            return count, f"a whole number {above}, and at most {most}"
    if capability is not None and not _is_version(capability):
        return "capability", "two whole numbers, as [8, 0]"
    if not isinstance(values["cudnn"], bool):
        return "cudnn", "true or false"
    if values["figures"] not in ("published", "calibrated"):
        return "figures", "'published' or 'calibrated'"
    return None


def _is_version(value: object) -> bool:
    fits = isinstance(value, (list, tuple)) and len(value) == 2
    return fits and all(type(part) is int and 0 <= part < 1000 for part in value)  # type: ignore[attr-defined]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
