"""Modules of PyTorch that its own database of modules leaves out, each with inputs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Made = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]


def _input(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def _one(module: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> list[Made]:
    return [(module, lambda: tuple(_input(*shape) for shape in shapes))]


def _unpooled(dimensions: int) -> list[Made]:
    pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dimensions - 1](2, return_indices=True)
    unpool = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)[dimensions - 1]

    def inputs() -> tuple[Tensor, ...]:
        pooled, places = pool(torch.randn(2, 3, *[6] * dimensions))
        return pooled.requires_grad_(True), places

    return [(lambda: unpool(2), inputs)]


def _bags() -> tuple[Tensor, ...]:
    return torch.randint(0, 10, (12,)), torch.tensor([0, 5, 5, 9])


def _several(*made: list[Made]) -> list[Made]:
    return [each for some in made for each in some]


MODULES: dict[str, list[Made]] = {
    "nn.AdaptiveLogSoftmaxWithLoss": [
        (
            lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10], head_bias=True),
            lambda: (_input(9, 8), torch.randint(0, 20, (9,))),
        )
    ],
    "nn.AlphaDropout": _one(lambda: nn.AlphaDropout(0.3), (4, 7)),
    "nn.ChannelShuffle": _one(lambda: nn.ChannelShuffle(2), (2, 4, 5, 5)),
    "nn.CosineSimilarity": _one(lambda: nn.CosineSimilarity(), (4, 7), (4, 7)),
    "nn.CrossMapLRN2d": _one(lambda: nn.CrossMapLRN2d(3), (2, 5, 4, 4)),
    "nn.Dropout": _several(
        _one(lambda: nn.Dropout(0.3), (4, 7)), _one(lambda: nn.Dropout(0.5, inplace=True), (4, 7))
    ),
    "nn.Dropout1d": _one(lambda: nn.Dropout1d(0.3), (4, 7, 5)),
    "nn.Dropout2d": _one(lambda: nn.Dropout2d(0.3), (4, 7, 5, 5)),
    "nn.Dropout3d": _one(lambda: nn.Dropout3d(0.3), (4, 7, 5, 5, 5)),
    "nn.EmbeddingBag": [
        (lambda: nn.EmbeddingBag(10, 6, mode="sum"), _bags),
        (lambda: nn.EmbeddingBag(10, 6, mode="mean"), _bags),
        (lambda: nn.EmbeddingBag(10, 6, mode="max"), _bags),
        (lambda: nn.EmbeddingBag(10, 6, padding_idx=3), _bags),
    ],
    "nn.FeatureAlphaDropout": _one(lambda: nn.FeatureAlphaDropout(0.3), (4, 7, 5)),
    "nn.Flatten": _one(lambda: nn.Flatten(), (2, 3, 4)),
    "nn.Fold": _one(lambda: nn.Fold((4, 5), (2, 2)), (2, 12, 12)),
    "nn.Hardsigmoid": _one(lambda: nn.Hardsigmoid(), (4, 7)),
    "nn.Identity": _one(lambda: nn.Identity(), (4, 7)),
    "nn.LazyBatchNorm2d": _one(lambda: nn.LazyBatchNorm2d(), (2, 3, 4, 4)),
    "nn.LazyInstanceNorm2d": _one(lambda: nn.LazyInstanceNorm2d(affine=True), (2, 3, 4, 4)),
    "nn.LazyLinear": _one(lambda: nn.LazyLinear(5), (4, 7)),
    "nn.MaxUnpool1d": _unpooled(1),
    "nn.MaxUnpool2d": _unpooled(2),
    "nn.MaxUnpool3d": _unpooled(3),
    "nn.PairwiseDistance": _one(lambda: nn.PairwiseDistance(), (4, 7), (4, 7)),
    "nn.PixelShuffle": _one(lambda: nn.PixelShuffle(2), (2, 8, 3, 3)),
    "nn.PixelUnshuffle": _one(lambda: nn.PixelUnshuffle(2), (2, 2, 6, 6)),
    "nn.RReLU": _several(_one(lambda: nn.RReLU(), (4, 7)), _one(lambda: nn.RReLU(inplace=True), (4, 7))),
    "nn.TransformerDecoder": _one(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2),
        (2, 5, 8),
        (2, 6, 8),
    ),
    "nn.TripletMarginLoss": _one(lambda: nn.TripletMarginLoss(), (4, 7), (4, 7), (4, 7)),
    "nn.TripletMarginWithDistanceLoss": _one(
        lambda: nn.TripletMarginWithDistanceLoss(swap=True), (4, 7), (4, 7), (4, 7)
    ),
    "nn.Unflatten": _one(lambda: nn.Unflatten(1, (2, 3)), (4, 6)),
    "nn.Unfold": _one(lambda: nn.Unfold((2, 2)), (2, 3, 5, 5)),
    "nn.Upsample": _several(
        *(
            _one(lambda mode=mode: nn.Upsample(scale_factor=1.7, mode=mode), (2, 3, *[5] * dimensions))  # type: ignore[misc]
            for mode, dimensions in [
                ("nearest", 1),
                ("linear", 1),
                ("nearest", 2),
                ("bilinear", 2),
                ("bicubic", 2),
                ("nearest", 3),
                ("trilinear", 3),
            ]
        )
    ),
    "nn.UpsamplingBilinear2d": _one(lambda: nn.UpsamplingBilinear2d(scale_factor=2), (2, 3, 4, 4)),
    "nn.UpsamplingNearest2d": _one(lambda: nn.UpsamplingNearest2d(scale_factor=2), (2, 3, 4, 4)),
}
