"""Convolutions that cuDNN runs on Hopper: copies with channels innermost, and parts of weight gradients.

cuDNN itself chooses the algorithm (see :mod:`planner.costs.cudnn_workspace`). So no source says what follows:
it is a rule, fitted by hand to measurements with cuDNN 9.19 on an H200 (compute capability 9.0), in float32
(TF32 allowed, as PyTorch sets it) and bfloat16, of 308 forward and 323 backward calls, most of them of
contiguous tensors. 204 of them are in ``tests/data/cuda_scratch.json``. The rule:

- Kernels for channels innermost run on copies of image, weight and result, all three at once. A weight of
  one point needs no copy. Channels of 16 bits are filled up to a multiple of 8.
- A convolution of one point with stride 1 is a product of matrices that needs none, unless the image's size
  is odd or the weight is large.
- Kernels for small convolutions need none.
- Gradients of weights are summed in parts, as many as fit the multiprocessors, in 32 bits. Those of one point
  are summed by example; for small images of 32 bits Winograd's form is used.
- A result is computed in tiles, one for each multiprocessor at a time. Where few tiles are left for the last
  time, their products are split among the multiprocessors.
- Images of few channels are copied for a weight's gradient even where their channels are innermost already.

Of the 631 calls 379 agree to the byte, 48 up to the remainder that the allocator does not split off (at most
1 MiB), and 148 within a tenth or 64 KiB; the rule gives less than measured for 38 of the rest, and more for
18. On other capabilities nothing was measured, and nothing counts. Copies that PyTorch itself makes of
tensors that are not dense count everywhere. :mod:`planner.costs.cuda_scratch.convolution_without_tf32` has
the rule for float32 without TF32.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from planner._torch.fake import concrete_size
from planner.costs.cuda_scratch.convolution_without_tf32 import WithoutTf32
from planner.costs.cuda_scratch.layouts import HALF, Layout, allocated, ceil_div, rounded
from planner.costs.cuda_scratch.processors import Processor
from planner.costs.cuda_scratch.registry import Arguments, scratch_of

SEEN_ON = (9, 0)
"""The compute capability that the rule was seen on."""

# The rule's numbers, here and in the functions, have no reason but that the measured calls fit them.
_HEADER = 512  # bytes beside copies and parts
_WARP = 32  # channels to which some parts are filled up
_HALF_TILE = 64  # the same for other parts
_TILE = 128  # rows and columns of a result, as a matrix, that one multiprocessor computes at a time
_TILE_BYTES = _TILE * _TILE * 4
# Multiplications of a forward: convolutions of fewer take nothing.
_SMALL = 80_000_000  # forward, float32
_SMALL_HALF = 60_000_000  # forward, 16 bits
_SMALL_BACKWARD = 64_000_000
_SMALL_POINTWISE = 4_000_000  # backward, kernels of one point
_SMALL_FEW = 16_000_000  # backward, images of few channels
_SMALL_CHANNELS_LAST = 9_000_000  # backward, images that are channels last
_MOST_WINOGRAD = 1_000_000_000  # more are not computed in Winograd's form
# Elements of a weight.
_LEAST_WEIGHT = 5_000  # fewer, of one point, take nothing in the backward if the convolution is small
_LARGE_WEIGHT = 1_600_000  # as many, of one point, run on copies
_LARGE_HALF_WEIGHT = 1 << 19  # the same in 16 bits
_MOST_WEIGHT_BY_POINT = 10_000  # gradients of fewer, for each point of an image, are summed by example
# Points of an image, or of all images of a batch, and channels.
_POINTS_OF_A_PART = 1024  # the fewest that one part of a weight's gradient sums
_FEW_CHANNELS = 4  # as many or fewer are filled up to 4
_PARTS_OF_FEW = 36  # parts of their weight's gradient
_DEEP_CHANNELS = 48  # as many, in images of no more than the next points, are not small
_DEEP_POINTS = 256


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution's sizes."""

    image: Layout
    weight: Layout
    result: Layout
    stride: tuple[int, ...]
    pointwise: bool
    """Whether the kernel is one point, without padding."""

    @classmethod
    def of(cls, arguments: Arguments, result: Layout | None) -> "_Convolution | None":
        """The convolution of a call; None for a transposed or grouped one, of which too few were seen.

        Args:
            arguments: The call's.
            result: The layout of the result; None makes one of the arguments, without strides.
        """
        if arguments["transposed"] or concrete_size(arguments["groups"]) != 1:
            return None
        image, weight = arguments.layout("input"), arguments.layout("weight")
        spatial = len(image.sizes) - 2
        stride, padding, dilation = (
            _by_dimension(arguments[name], spatial) for name in ("stride", "padding", "dilation")
        )
        if result is None:
            sizes = [
                (n + 2 * p - d * (k - 1) - 1) // s + 1
                for n, p, d, k, s in zip(
                    image.sizes[2:], padding, dilation, weight.sizes[2:], stride, strict=True
                )
            ]
            shape = (image.sizes[0], weight.sizes[0], *sizes)
            result = Layout(shape, (0,) * len(shape), image.dtype)
        pointwise = prod(weight.sizes[2:]) == 1 and not any(padding)
        return cls(image, weight, result, stride, pointwise)

    @property
    def half(self) -> bool:
        return self.image.dtype in HALF

    @property
    def without_tf32(self) -> WithoutTf32 | None:
        """The rule of float32 where TF32 is not allowed; None where it is, and in 16 bits."""
        if self.half or torch.backends.cudnn.allow_tf32:
            return None
        return WithoutTf32(self.image, self.weight, self.result, self.stride, self.products)

    @property
    def batch(self) -> int:
        return self.image.sizes[0]

    @property
    def channels(self) -> int:
        """Channels of the image."""
        return self.image.sizes[1]

    @property
    def out_channels(self) -> int:
        """Channels of the result."""
        return self.weight.sizes[0]

    @property
    def taps(self) -> int:
        """Points of the kernel."""
        return prod(self.weight.sizes[2:])

    @property
    def points(self) -> int:
        """Points of one image of the result."""
        return prod(self.result.sizes[2:])

    @property
    def products(self) -> int:
        """Multiplications of a forward."""
        return self.result.elements * self.weight.elements // self.out_channels

    @property
    def strided(self) -> bool:
        return any(step != 1 for step in self.stride)

    @property
    def copies(self) -> int:
        """Bytes of image, weight and result with channels innermost, which 16 bits need in multiples of 8."""
        image, weight = self.image.elements, self.weight.elements
        if self.half:
            padded = _multiple(self.channels, 8)
            image, weight = image // self.channels * padded, weight // self.channels * padded
        of_weight = 0 if self.pointwise else weight
        return (image + of_weight + self.result.elements) * self.image.dtype.itemsize

    @property
    def copied(self) -> bool:
        """Whether a kernel of one point runs on copies: images of odd size or few points, large weights."""
        if self.half:
            large = self.weight.elements >= _LARGE_HALF_WEIGHT and self.points % 8 != 0
        else:
            large = self.weight.elements >= _LARGE_WEIGHT and self.points >= _TILE
        few = self.points <= 16 and self.products > _SMALL
        return (self.points % 4 != 0 and self.points > 1) or few or large


@scratch_of("convolution", "_convolution", "cudnn_convolution")
def _convolution(arguments: Arguments, processor: Processor) -> int:
    copied = _made_dense(arguments.layout("input"), arguments.layout("weight"))
    call = _under_rule(arguments, processor, None)
    return copied + (rounded(_forward(call, processor)) if call is not None else 0)


@scratch_of("convolution_backward")
def _convolution_backward(arguments: Arguments, processor: Processor) -> int:
    """First the image's gradient is made, then the weight's; then the bias's, where the scratch was."""
    grad = arguments.layout("grad_output")
    image, weight = arguments.layout("input"), arguments.layout("weight")
    for_image, for_weight, for_bias = (bool(flag) for flag in arguments["output_mask"])
    copied = _made_dense(image, weight, grad)
    call = _under_rule(arguments, processor, grad)
    needed = 0
    if call is None:
        needed = _few_channels_last(arguments, processor) if for_weight else 0
    elif call.without_tf32 is not None or _asks_backward(call):
        later = weight.bytes if for_weight else 0
        of_image = rounded(_of_image(call, processor)) - later if for_image else 0
        needed = max(of_image, rounded(_of_weight(call, processor)) if for_weight else 0)
    after = allocated(weight.sizes[0], grad.dtype) if for_bias else 0
    return max(copied + needed - after, 0)


def _asks_backward(call: _Convolution) -> bool:
    """Whether the backward of a convolution asks for workspace; that of a small one asks for none."""
    if call.pointwise and not call.strided:
        few = not call.half and call.points > 1 and call.weight.elements >= _LEAST_WEIGHT
        return call.products >= _SMALL_POINTWISE or (few and call.points < _TILE)
    moved = (call.image.elements + call.result.elements) * call.image.dtype.itemsize
    if call.channels <= _FEW_CHANNELS and not call.half and call.products >= _SMALL_FEW:
        return True
    wide = call.out_channels >= 16 and call.channels >= 32 and call.points >= _DEEP_POINTS
    return call.products >= _SMALL_BACKWARD or moved >= 1 << 20 or (wide and not call.half)


def _of_image(call: _Convolution, processor: Processor) -> int:
    """Bytes for the gradient of the image."""
    without = call.without_tf32
    return _forward(call, processor) if without is None else without.image_gradient()


def _forward(call: _Convolution, processor: Processor) -> int:
    """Bytes for the result; where TF32 is allowed, or in 16 bits, for the gradient of the image too."""
    if call.without_tf32 is not None:
        return call.without_tf32.forward()
    if call.pointwise and not call.strided:
        return call.copies + _HEADER if call.copied else _HEADER
    if call.pointwise:
        channels = call.channels
        return call.copies + _HEADER if call.half or channels >= _TILE else 0
    if call.half:
        return call.copies + _HEADER + _last_wave(call, processor) if call.products >= _SMALL_HALF else 0
    deep = call.channels >= _DEEP_CHANNELS and call.points <= _DEEP_POINTS
    return call.copies + _HEADER + _last_wave(call, processor) if deep or call.products > _SMALL else 0


def _last_wave(call: _Convolution, processor: Processor) -> int:
    """Bytes of the parts into which products of the last tiles are split, if these are few."""
    points = call.batch * call.points
    tiles = ceil_div(points, _TILE) * ceil_div(call.out_channels, _TILE)
    left = tiles % processor.multiprocessors
    most = (0.5 if call.half else 0.45) * processor.multiprocessors
    if call.strided or tiles < processor.multiprocessors or left > most:
        return 0
    return left * (2 if call.half else 4) * _TILE_BYTES


def _of_weight(call: _Convolution, processor: Processor) -> int:
    """Bytes for the gradient of the weight."""
    if call.without_tf32 is not None:
        return call.without_tf32.weight_gradient()
    channels, batch = call.channels, call.batch
    part = call.weight.elements * 4  # bytes of one gradient in 32 bits
    if call.pointwise and not call.strided:
        aligned = not (call.points % 8 or channels % 8 or call.out_channels % 8)
        fits = call.weight.elements < _MOST_WEIGHT_BY_POINT * call.points
        if aligned and fits and call.points >= _TILE:
            return batch * part + _HEADER
        if call.points < _TILE and batch * part < 1 << 20:
            return batch * part
    taps = call.taps
    out_channels, points = call.out_channels, batch * call.points
    tiles = taps * ceil_div(channels, _TILE) * ceil_div(out_channels, _TILE)
    part = taps * _multiple(channels, _HALF_TILE) * _multiple(out_channels, _HALF_TILE) * 4
    if call.half:
        return call.copies + _HEADER + _half_parts(call, points, tiles, part, processor)
    transformed = _winograd(call)
    if transformed is not None:
        return transformed
    if channels <= _FEW_CHANNELS and taps > 1:
        rows = call.image.elements // channels + taps * out_channels * (1 + _PARTS_OF_FEW)
        return (rows * _FEW_CHANNELS + call.result.elements) * 4 + _HEADER
    least = _POINTS_OF_A_PART if call.pointwise or call.strided else _TILE
    splits = min(processor.multiprocessors // tiles, points // least)
    if splits > 1:
        parts = part * splits if call.pointwise or call.strided else min(part * splits, 288 * points)
        return call.copies + parts + 2 * _HEADER
    nearly = processor.multiprocessors < tiles <= processor.multiprocessors + 12
    if nearly and points >= 1 << 12:
        return call.copies + 2 * _HEADER + min(processor.multiprocessors, points // _WARP) * _TILE_BYTES
    return call.copies + _HEADER


def _few_channels_last(arguments: Arguments, processor: Processor) -> int:
    """Bytes for the gradient of a weight in 32 bits where images are channels last and channels are few."""
    image = arguments.layout("input")
    if processor.capability != SEEN_ON or image.dtype is not torch.float32 or not image.elements:
        return 0
    call = _Convolution.of(arguments, arguments.layout("grad_output"))
    if call is None or call.pointwise or call.products < _SMALL_CHANNELS_LAST:
        return 0
    if max(call.channels, call.out_channels) > _WARP:
        return 0
    parts = min(13, ceil_div(image.sizes[0] * call.points, _POINTS_OF_A_PART))
    return rounded(call.copies + parts * call.taps * _WARP * _WARP * 4)


def _half_parts(call: _Convolution, points: int, tiles: int, part: int, processor: Processor) -> int:
    """Bytes of the parts that a weight's gradient of 16 bits is summed from.

    Args:
        call: The convolution.
        points: Points of the results of all images.
        tiles: Tiles of the gradient.
        part: Bytes of one part, with channels in multiples of a half tile.
        processor: The GPU.
    """
    narrow = min(call.channels, call.out_channels)
    splits = (processor.multiprocessors - 12) // tiles if points >= 1 << 13 else 0
    if splits <= 1:
        return 0
    if narrow >= _HALF_TILE:
        return part * splits + _HEADER
    if call.taps == 1 or narrow < _WARP // 2:
        part = call.taps * _multiple(call.channels, _WARP) * _multiple(call.out_channels, _WARP) * 4
        return part * splits + _HEADER
    if points >= 1 << 16:
        return part * (splits - 1) + 65 * _HEADER
    rows, columns = (min(2 * n, _HALF_TILE) for n in (call.channels, call.out_channels))
    return min(splits, 9) * call.taps * rows * columns * 4


def _winograd(call: _Convolution) -> int | None:
    """Bytes of image, result and weight in Winograd's form, 6 by 6 points for 4 by 4; None if unused."""
    square = call.weight.sizes[2:] == (3, 3) and call.image.sizes[2:] == call.result.sizes[2:]
    small = call.products < (_MOST_WINOGRAD if _WARP < call.points <= _DEEP_POINTS else _SMALL_BACKWARD)
    if not square or call.strided or not small or call.channels < _WARP:
        return None
    tiles = call.batch * prod(ceil_div(size, 4) for size in call.result.sizes[2:])
    channels, out_channels = call.channels, call.out_channels
    transformed = 36 * 4 * (tiles * (channels + out_channels) + channels * out_channels)
    return transformed if transformed < 4 * call.copies else None


def _multiple(count: int, of: int) -> int:
    """The least multiple that is no less than a count."""
    return ceil_div(count, of) * of


def _under_rule(arguments: Arguments, processor: Processor, result: Layout | None) -> _Convolution | None:
    """The sizes of a convolution for which the rule holds; None for others."""
    image = arguments.layout("input")
    known = image.dtype in HALF or image.dtype is torch.float32
    if processor.capability != SEEN_ON or not known or not image.elements or _channels_last(image):
        return None
    return _Convolution.of(arguments, result)


def _made_dense(image: Layout, weight: Layout, grad: Layout | None = None) -> int:
    """Bytes of copies that PyTorch makes, in the memory format of the image or the weight (ConvUtils.h)."""
    last = _channels_last(image) or (not weight.contiguous and weight.channels_last)
    tensors = [t for t in (image, weight, grad) if t is not None]
    return sum(t.bytes for t in tensors if not (t.channels_last if last else t.contiguous))


def _channels_last(image: Layout) -> bool:
    return not image.contiguous and image.seems_channels_last


def _by_dimension(value: Any, count: int) -> tuple[int, ...]:
    """A stride, padding or dilation for each spatial dimension; one number stands for all."""
    values = tuple(concrete_size(v) for v in value)
    return values * count if len(values) == 1 else values
