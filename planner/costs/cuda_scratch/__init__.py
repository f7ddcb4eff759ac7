"""What kernels allocate and free inside themselves on an NVIDIA GPU that is not here.

A GPU that is here is asked (:mod:`planner.costs.workspace`). For another one formulas say what PyTorch's
kernels ask for, from PyTorch's source; a file for each family names its sources, and where the formulas were
compared with a GPU. Operators without a formula count 0: most ask for nothing.
"""

from planner.costs.cuda_scratch import (
    attention,
    convolution,
    indexing,
    normalization,
    pointwise,
    reductions,
)
from planner.costs.cuda_scratch.predicted import CudaScratch, cuda_scratch

__all__ = [
    "CudaScratch",
    "attention",
    "convolution",
    "cuda_scratch",
    "indexing",
    "normalization",
    "pointwise",
    "reductions",
]
