"""The file that keeps measured workspaces, and the text by which an operator is found in it.

JSON: ``{"format": 8, "environments": {environment: {call: [workspace bytes, output bytes...]}}}``.
A file that cannot be read or written is no error: its entries are measured again.
"""

import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import torch

from planner._torch.fake import concrete_size, whole_storage
from planner._torch.operators import cudnn_version
from planner.errors import PlannerError, printable
from planner.heap import collector_off
from planner.planfile.atomic_file import write_atomically

logger = logging.getLogger(__name__)

CACHE_FORMAT = 8
"""To be raised, too, when operators of the planner's own allocate otherwise than before."""

_LARGEST_FILE = 1 << 30
_MOST = 1 << 50
"""A larger number of bytes or nanoseconds is no measurement: sums of them would be too large for arrays."""

Entries = Mapping[str, Sequence[int]]
"""By call: its workspace bytes, followed by the bytes of its outputs."""


def default_cache_path() -> Path:
    """Where measured workspaces are kept unless another file is given."""
    return Path(platformdirs.user_cache_dir("torch-checkpoint-planner")) / "workspace.json"


def environment(device: torch.device) -> str:
    """The settings that measured workspaces and seconds depend on besides the operator.

    They decide which kernels run, and how many threads have scratch of their own.
    """
    parts = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        parts += [
            str(torch.cuda.get_device_properties(device).name),
            f"cudnn {cudnn_version()} {_cudnn_settings()}",
            f"products {torch.backends.cuda.preferred_blas_library()} {_float32_precisions()}",
            *(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ),
        ]
    else:
        parts += [
            f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            f"{torch.get_num_threads()} threads",
            f"mkldnn {torch.backends.mkldnn.enabled}",
        ]
    parts.append(f"deterministic {torch.are_deterministic_algorithms_enabled()}")
    return "; ".join(parts)


_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def _cudnn_settings() -> str:
    backend = torch.backends.cudnn
    names = ("enabled", "benchmark", "benchmark_limit", "deterministic")
    return " ".join(f"{name} {getattr(backend, name)}" for name in names)


def _float32_precisions() -> str:
    """The arithmetic of products, convolutions and recurrent layers in float32.

    PyTorch has an older and a newer setting for it. Reading the older one raises after the newer one was set;
    the newer one can always be read.
    """
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(cudnn, "conv"):
        parts = {"matmul": products, "conv": cudnn.conv, "rnn": cudnn.rnn}
        # "none", nothing set, means "ieee".
        settings = [f"{n} {part.fp32_precision}".replace("none", "ieee") for n, part in parts.items()]
    else:  # before torch 2.9
        settings = [f"matmul {torch.get_float32_matmul_precision()}", f"cudnn {cudnn.allow_tf32}"]
    reduced = products.allow_fp16_reduced_precision_reduction, products.allow_bf16_reduced_precision_reduction
    return " ".join([*settings, f"reduced {reduced}"])


def call_signature(func: object, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: object = None) -> str:
    """Returns a text for a call, the same in every process; calls with the same text take the same memory.

    Args:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        sizes: The sizes of its results, where data decided them.

    Raises:
        TypeError: An argument has no such text.
        ValueError: A size depends on data.
    """
    named = [f"{name}={_text(value)}" for name, value in sorted(kwargs.items())]
    whole = whole_storage(func, args)
    inside = f" in {whole[0]} from {whole[1]}" if whole is not None else ""
    gives = f" gives {_text(sizes)}" if sizes is not None else ""
    return f"{func}({', '.join([*map(_text, args), *named])}){inside}{gives}"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        place = "" if value.device.type in ("cpu", "meta") else f"@{value.device.type}"
        if value.layout is not torch.strided:
            return f"{dtype} {value.layout}{place}"
        lazy = "*" * value.is_conj() + "-" * value.is_neg()
        return f"{lazy}{dtype}[{_joined(value.shape)}]({_joined(value.stride())}){place}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, torch.SymInt):
        return str(concrete_size(value))
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    raise TypeError(f"an argument of type {type(value).__name__}")


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _joined(sizes: Sequence[int]) -> str:
    return ",".join(str(concrete_size(size)) for size in sizes)


def read_entries(path: Path | None, environment: str) -> Entries:
    """The entries of a file for an environment; none if it is absent, damaged or of another format."""
    return _read(path).get(environment, {})


def write_entries(path: Path | None, environment: str, entries: Entries) -> None:
    """Adds entries to a file; a failure is logged."""
    if path is None or not entries:
        return
    try:
        # Another process may have written since: keep its measurements.
        environments = {**_read(path)}
        environments[environment] = {**environments.get(environment, {}), **entries}
        path.parent.mkdir(parents=True, exist_ok=True)
        # On one line: with line breaks json writes it in Python, three times as slow.
        write_atomically(path, json.dumps({"format": CACHE_FORMAT, "environments": environments}))
    except (OSError, PlannerError) as error:
        logger.warning("measured workspaces could not be kept in %s: %s", path, error)


_held: dict[Path, tuple[tuple[int, ...], Mapping[str, Entries]]] = {}
"""By file: the version that was read last, and its contents. A large file takes a while to read."""


@collector_off()
def _read(path: Path | None) -> Mapping[str, Entries]:
    if path is None or not os.path.lexists(path):
        return {}
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_size > _LARGEST_FILE:
                raise ValueError(f"{status.st_size:,} bytes are too many")
            version = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
            if path in _held and _held[path][0] == version:
                return _held[path][1]
            document = json.load(file)
        if document["format"] != CACHE_FORMAT:
            logger.info("%s has another format and is replaced", path)
            return {}
        environments: dict[str, Entries] = {}
        for name, entries in document["environments"].items():
            # The garbage collector does not go through tuples of numbers, as it does through lists.
            environments[name] = {call: tuple(numbers) for call, numbers in entries.items()}
            for call, numbers in environments[name].items():
                if not numbers or not all(type(number) is int and 0 <= number <= _MOST for number in numbers):
                    raise ValueError(f"{call[:200]} has {str(numbers)[:200]}")
        _held[path] = version, environments
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = printable(str(error))
        logger.warning("measured workspaces in %s cannot be read and are measured again: %s", path, why)
        return {}
    return environments
