"""What planning for CUDA takes to be so, tried on a CUDA device in some seconds: a line for each fact.

    python benchmarks/gpu_facts.py            # on the current CUDA device
    python benchmarks/gpu_facts.py > facts.txt

A fact that does not hold, or that cannot be tried, is a line that says so; the others are tried all the same.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner._torch.autograd import exclusively_owned
from planner._torch.cuda.attention import AttentionCall, choose_attention
from planner._torch.cuda.batch_norm import BY_BACKEND, NATIVE, without_statistics
from planner.costs.devices import CUBLAS_THREADS, find_device
from planner.costs.host_tensors import made_on_host

aten = torch.ops.aten
MIB = 1 << 20
FACTS: list[Callable[[], Iterator[str]]] = []


def fact(function: Callable[[], Iterator[str]]) -> Callable[[], Iterator[str]]:
    """Adds a function that yields lines to what is tried."""
    FACTS.append(function)
    return function


@fact
def device() -> Iterator[str]:
    """Which one, and with what."""
    properties = torch.cuda.get_device_properties(0)
    capability = torch.cuda.get_device_capability()
    yield f"{properties.name}, capability {capability}, {properties.total_memory:,} bytes"
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


@fact
def context() -> Iterator[str]:
    """Bytes of the device that are gone beside the allocator's, against what is assumed."""
    torch.ones(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    taken = total - free - torch.cuda.memory_reserved()
    yield f"context {taken / MIB:.0f} MiB, assumed {find_device('cuda').context_bytes / MIB:.0f} MiB"


@fact
def workspace_of_products() -> Iterator[str]:
    """What cuBLAS allocates for the thread of the forward and for autograd's."""
    x = torch.randn(512, 512, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    y = x @ x
    torch.cuda.synchronize()
    forward = torch.cuda.memory_allocated() - before - MIB
    y.sum().backward()
    torch.cuda.synchronize()
    both = torch.cuda.memory_allocated() - before - 2 * MIB
    assumed = find_device("cuda").library_bytes
    yield f"cuBLAS {forward:,} bytes after a forward, {both:,} after a backward; assumed {assumed:,}"
    yield f"threads assumed: {CUBLAS_THREADS}"


@fact
def large_blocks() -> Iterator[str]:
    """Bytes that blocks count beyond what is asked for, from an empty cache."""
    for size in (MIB, MIB + 512, 3 * MIB + 512, 11 * MIB, 11 * MIB + 512, 13 * MIB - 512, 100 * MIB + 512):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        block = torch.empty(size, dtype=torch.uint8, device="cuda")
        yield f"a block of {size:,} bytes counts {torch.cuda.memory_allocated() - before - size:,} more"
        del block


@fact
def seeds_of_attention() -> Iterator[str]:
    """Where attention's seeds are, and of what kind."""
    for half, packet in (
        (False, aten._scaled_dot_product_efficient_attention),
        (True, aten._scaled_dot_product_flash_attention),
        (True, aten._scaled_dot_product_cudnn_attention),
    ):
        x = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.float16 if half else torch.float32)
        extra = () if packet is aten._scaled_dot_product_flash_attention else (None, True)
        dropout = 0.125
        result = packet(x, x, x, *extra, dropout)
        tensors = [t for t in result if isinstance(t, torch.Tensor)]
        found = [f"{str(t.dtype)[6:]}{list(t.shape)}@{t.device.type}" for t in tensors]
        yield f"{packet.__name__}: {', '.join(found)}; planned on the host: {made_on_host(packet.default)}"
    state = torch.empty(2, dtype=torch.uint64, device="cuda").fill_(0)
    yield f"uint64[2].fill_(0): {state.tolist()}"


@fact
def sums_in_place() -> Iterator[str]:
    """Whether the engine's sums of gradients are seen to be in place on autograd's thread."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.add.Tensor and torch._C._current_graph_task_id() != -1:
                seen.append(exclusively_owned(args[0]) or exclusively_owned(args[1]))
            elif func is aten.add_.Tensor:
                seen.append(True)
            return func(*args, **(kwargs or {}))

    x = torch.randn(64, device="cuda", requires_grad=True)
    loss = (x.sin() + x.cos() + x.tanh()).sum()
    with Watch():
        loss.backward()
    yield f"gradients of three uses, summed: {seen}"


@fact
def batch_norm() -> Iterator[str]:
    """Whether a batch normalisation gives the same bits again, without statistics, as it first gave."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(32, 64, 28, 28, device="cuda", dtype=dtype)
        weight, bias = torch.rand(2, 64, device="cuda")
        mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
        eager = F.batch_norm(x, mean.clone(), variance.clone(), weight, bias, True)
        for name, operator in (("native", NATIVE), ("by backend", BY_BACKEND)):
            if operator is BY_BACKEND and dtype is torch.bfloat16:
                continue  # cuDNN's takes no weights in float32 then, and PyTorch takes its own
            given: tuple[Any, ...] = (x, weight, bias, mean, variance)
            given += (True, 0.1, 1e-5) if operator is NATIVE else (0.1, 1e-5)
            first = operator(*given)
            again_operator, arguments = without_statistics(operator, given)
            again = again_operator(*arguments)
            same = [torch.equal(a, b) for a, b in zip(first[:3], again, strict=False)]
            yield f"{str(dtype)[6:]} {name}: again {same}, eager's bits {torch.equal(first[0], eager)}"


@fact
def cudnn_benchmark() -> Iterator[str]:
    """Scratch and bits of a convolution with cudnn.benchmark on and off."""
    x, w = torch.randn(32, 64, 56, 56, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    results, scratch = [], []
    before = torch.backends.cudnn.benchmark
    try:
        for on in (False, True):
            torch.backends.cudnn.benchmark = on
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                start = torch.cuda.memory_allocated()
                y = F.conv2d(x, w, padding=1)
                scratch.append(torch.cuda.max_memory_allocated() - start - y.nbytes)
            results.append(y)
    finally:
        torch.backends.cudnn.benchmark = before
    yield f"scratch off, off, on, on: {scratch}; same bits {torch.equal(*results)}"


@fact
def attention() -> Iterator[str]:
    """The kernel that PyTorch chooses against the one that is predicted."""
    wrong = tried = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for width in (20, 64, 80, 128, 160, 192, 256, 512):
            for heads, length, masked, causal, dropout in (
                *((4, 128, False, False, 0.0), (4, 128, False, True, 0.0), (4, 128, True, False, 0.0)),
                *((4, 128, False, False, 0.1), (4, 64, False, True, 0.0), (2, 128, False, False, 0.0)),
                *((2, 128, True, False, 0.0), (4, 1, False, False, 0.0)),
            ):
                q = torch.randn(2, 4, 128, width, device="cuda", dtype=dtype, requires_grad=True)
                k = torch.randn(2, heads, length, width, device="cuda", dtype=dtype, requires_grad=True)
                mask = torch.zeros(2, 1, 128, length, device="cuda", dtype=dtype) if masked else None
                gqa = heads != 4
                chosen = torch._fused_sdp_choice(q, k, k, mask, dropout, causal, enable_gqa=gqa)
                names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
                capability = torch.cuda.get_device_capability()
                call = AttentionCall(capability, q, k, k, mask, dropout, causal, None, gqa)
                tried += 1
                if choose_attention(call) != names.get(chosen):
                    wrong += 1
                    kind = f"{str(dtype)[6:]} width {width}, {heads} heads, {length} keys, mask {masked}"
                    yield (
                        f"{kind}, causal {causal}, dropout {dropout}: {names.get(chosen)}, "
                        f"predicted {choose_attention(call)}"
                    )
    yield f"{tried - wrong} of {tried} choices are as predicted"


def main() -> int:
    """Try every fact; returns how many could not be tried."""
    if not torch.cuda.is_available():
        print("no CUDA device is here")
        return 1
    failed = 0
    for function in FACTS:
        try:
            for line in function():
                print(f"{function.__name__}: {line}", flush=True)
        except Exception as error:
            failed += 1
            text = str(error).partition("\n")[0]
            print(f"{function.__name__}: could not be tried: {type(error).__name__}: {text}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
