"""Convolutions of float32 on Hopper where TF32 is not allowed.

A rule that fits measurements, as in :mod:`planner.costs.cuda_scratch.convolution`: cuDNN 9.19 on an H200, of
234 sizes of contiguous tensors with one group, kernels of 1, 3, 5 and 7 points. The rule:

- Gradients of weights of 3 by 3 points with stride 1 are summed in Winograd's form, 6 by 6 points for 4 by 4;
  other large weights of up to 3 by 3 points from copies of image and result.
- Some convolutions of 3 by 3 points with stride 1, and more gradients of images, multiply Fourier transforms:
  of whole images of up to 30 points, or of pieces of 32 by 32 points, at most four of an image at a time.
  The condition, many products for the bytes, is a guess from the measurements.
- The rest takes nothing.

Of the 234 gradients of weights 221 agree to the byte, of the gradients of images 227, of the forwards 230.
"""

from dataclasses import dataclass
from math import prod

from planner.costs.cuda_scratch.layouts import Layout, ceil_div

_TRANSFORMED = 36
_LEAST_CHANNELS = 32
_FEW_RESULTS = 8
_FEW_POINTS = 64
_LARGE_WEIGHT = 262_144
_LARGE_WEIGHT_OF_FEWER = 200_000
_HEADER = 512
_SPECTRUM = {16: 16 * 9 * 8, 32: 32 * 17 * 8}
"""Bytes of the transform of so many points squared: half of it, as the other is its conjugate."""
_PRODUCTS_PER_BYTE = 19
_PRODUCTS_PER_BYTE_OF_PIECES = 24
_MANY_RESULTS = 2_000_000


@dataclass(frozen=True, slots=True)
class WithoutTf32:
    """Sizes of a convolution of float32."""

    image: Layout
    weight: Layout
    result: Layout
    stride: tuple[int, ...]
    products: int
    """Multiplications of a forward."""

    def forward(self) -> int:
        """Bytes that cuDNN asks for to make the result."""
        channels, made = self.image.sizes[1], self.weight.sizes[0]
        side = max(self.image.sizes[2:]) + 2
        if not self._three_by_three or channels != made or side > max(_SPECTRUM):
            return 0
        spectrum = _SPECTRUM[16 if side <= 16 else 32]
        transforms = 2 * channels * made + self.image.sizes[0] * (channels + made)
        needed = spectrum * transforms + self.weight.bytes
        many = self.result.elements >= _MANY_RESULTS and self.products >= _PRODUCTS_PER_BYTE * needed
        return needed if many else 0

    def image_gradient(self) -> int:
        """Bytes that cuDNN asks for to make the gradient of the image."""
        channels, made = self.image.sizes[1], self.weight.sizes[0]
        if not self._three_by_three or min(channels, made) < _LEAST_CHANNELS:
            return 0
        pieces = min(prod(ceil_div(n, 30) for n in self.result.sizes[2:]), 4)
        of_images = self.image.sizes[0] * (channels + made) * ceil_div(pieces, 2)
        needed = _SPECTRUM[32] * (channels * made + of_images)
        return needed if self.products >= _PRODUCTS_PER_BYTE_OF_PIECES * needed else 0

    def weight_gradient(self) -> int:
        """Bytes that cuDNN asks for to make the gradient of the weight."""
        channels, made, size = self.image.sizes[1], self.weight.sizes[0], self.image.dtype.itemsize
        points = self.result.sizes[2:]
        if self._three_by_three:
            if channels < _LEAST_CHANNELS or (made <= _FEW_RESULTS and prod(points) < _FEW_POINTS):
                return 0
            tiles = self.image.sizes[0] * prod(ceil_div(n, 4) for n in points)
            return _TRANSFORMED * size * (tiles * (channels + made) + channels * made)
        least = _LARGE_WEIGHT_OF_FEWER if channels > made else _LARGE_WEIGHT
        if prod(self.weight.sizes[2:]) > 9 or self.weight.elements < least:
            return 0
        of_weight = self.weight.elements if prod(self.weight.sizes[2:]) > 1 else 0
        return (self.image.elements + of_weight + self.result.elements) * size + _HEADER

    @property
    def _three_by_three(self) -> bool:
        return self.weight.sizes[2:] == (3, 3) and all(step == 1 for step in self.stride)
