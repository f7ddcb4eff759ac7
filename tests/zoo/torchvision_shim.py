"""Makes the published build of torchvision importable next to a PyTorch without CUDA.

timm needs torchvision; its builds for the CPU are not on the package index. The published one cannot load
its compiled extension here and then stops, while it registers a shape function, because an operator that
the extension would have brought is missing. None of the zoo's models uses it, so it is declared instead.
"""

import importlib.util
import sys
from pathlib import Path

import torch

_declared: list[torch.library.Library] = []


def install() -> None:
    """Make ``import torchvision`` work, where it is installed; call it before timm is imported.

    torchvision is looked for beside the other packages as well, in ``<environment>/torchvision``: other
    libraries should not find it, since without this function it cannot be imported.
    """
    apart = Path(sys.prefix) / "torchvision"
    if apart.is_dir() and str(apart) not in sys.path:
        sys.path.append(str(apart))
    if _declared or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        import torchvision  # noqa: F401
