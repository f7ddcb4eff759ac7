"""Options that are one of a few words, for the functions, the command line and plan files."""

from collections.abc import Mapping
from typing import Literal

Attention = Literal["cudnn", "flash", "efficient", "math"]
"""Kernels of scaled dot product attention."""

BackendChoice = Literal["auto", "graph", "eager", "replay", "inductor", "cudagraphs"]
"""What can be asked for to run a plan: "graph" and "eager" are the same; "auto" chooses between it and
"replay"."""

CostSource = Literal["auto", "roofline", "measured"]
"""Where the seconds of operations come from."""

Encodings = Literal["auto", "none"]
"""Whether masks may be kept as bits."""

InputsAre = Literal["unchanged", "overwritten"]
"""Whether a step's inputs change between its forward and its backward."""

Offload = Literal["none", "disk", "host"]
"""Where a plan may keep results until the backward reads them: in files, or in the host's memory."""

Outputs = Literal["held", "dropped"]
"""Whether the module's outputs live on while backward runs: in ``out = model(x); out.loss.backward()`` they
do, in ``model(x).loss.backward()`` and in trainers, which pass on the loss alone, they do not."""

SplitWhat = Literal["none", "loss", "auto"]
"""What may be computed in pieces."""


CUDA_GRAPHS = "triton.cudagraphs"
"""The option of Inductor that ``torch.compile(mode="reduce-overhead")`` sets. A plan records by itself."""


def is_recorded(backend: str, backend_options: Mapping[str, object]) -> bool:
    """Whether forward and backward run as recorded CUDA graphs."""
    return backend == "cudagraphs" or (backend == "inductor" and bool(backend_options.get(CUDA_GRAPHS)))
