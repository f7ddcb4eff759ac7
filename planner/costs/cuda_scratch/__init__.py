"""The scratch memory of kernels on an NVIDIA GPU that this machine does not have.

On a GPU of this machine it is measured (:mod:`planner.costs.workspace`). For another one formulas from
PyTorch's source give it; the file of each family of kernels names its sources, and the GPU that the formulas
were compared with. Operators without a formula count 0: most ask for nothing.
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
