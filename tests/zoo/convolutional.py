"""Convolutional nets: for classes, pixels, boxes, sound and volumes."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.zoo import Built, WithLoss, images, in_zoo


def _layer(wide_in: int, wide_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(wide_in, wide_out, 3, stride, 1, bias=False),
        nn.BatchNorm2d(wide_out),
        nn.ReLU(inplace=True),
    )


def _classified(net: nn.Module, side: int = 32, batch: int = 4) -> Built:
    return WithLoss(net), (images(batch, side), torch.randint(0, 10, (batch,))), {}


class UNetBilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = _layer(3, 16), _layer(16, 32), _layer(32, 64)
        self.d, self.e, self.out = _layer(96, 32), _layer(48, 16), nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        up = F.interpolate(c, scale_factor=2, mode="bilinear", align_corners=False)
        d = self.d(torch.cat([up, b], 1))
        return self.out(self.e(torch.cat([F.interpolate(d, scale_factor=2), a], 1)))


@in_zoo
def nn_unet_bilinear() -> Built:
    return UNetBilinear(), (images(4),), {}


class SqueezeExcite(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(wide, wide // 4, 1), nn.Conv2d(wide // 4, wide, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class InvertedResidual(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(wide, 4 * wide, 1, bias=False),
            nn.BatchNorm2d(4 * wide),
            nn.Hardswish(inplace=True),
            nn.Conv2d(4 * wide, 4 * wide, 3, 1, 1, groups=4 * wide, bias=False),
            nn.BatchNorm2d(4 * wide),
            nn.Hardswish(inplace=True),
            SqueezeExcite(4 * wide),
            nn.Conv2d(4 * wide, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def _head(wide: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(wide, 10)]


@in_zoo
def nn_mobilenet() -> Built:
    return _classified(nn.Sequential(_layer(3, 16, 2), *(InvertedResidual(16) for _ in range(3)), *_head(16)))


class DenseBlock(nn.Module):
    def __init__(self, wide: int, grow: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_layer(wide + i * grow, grow) for i in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


@in_zoo
def nn_densenet() -> Built:
    return _classified(
        nn.Sequential(_layer(3, 16), DenseBlock(16, 8, 4), nn.AvgPool2d(2), DenseBlock(48, 8, 4), *_head(80))
    )


class Branches(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.one, self.three = (
            nn.Conv2d(wide, 16, 1),
            nn.Sequential(nn.Conv2d(wide, 8, 1), nn.Conv2d(8, 16, 3, padding=1)),
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(wide, 16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(torch.cat([self.one(x), self.three(x), self.pool(x)], 1))


@in_zoo
def nn_inception() -> Built:
    return _classified(
        nn.Sequential(_layer(3, 16), Branches(16), Branches(48), nn.MaxPool2d(2), Branches(48), *_head(48))
    )


@in_zoo
def nn_alexnet() -> Built:
    layers = [
        nn.Conv2d(3, 32, 5, 2, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.LocalResponseNorm(3),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(64 * 49, 64),
        nn.ReLU(inplace=True),
        nn.Linear(64, 10),
    ]
    return _classified(nn.Sequential(*layers), 64)


@in_zoo
def nn_group_normalised() -> Built:
    layers = [
        nn.Conv2d(3, 32, 3, 1, 1),
        nn.GroupNorm(8, 32),
        nn.SiLU(inplace=True),
        nn.Conv2d(32, 32, 3, 2, 1),
    ]
    return _classified(nn.Sequential(*layers, nn.InstanceNorm2d(32, affine=True), nn.PReLU(), *_head(32)))


class Hourglass(nn.Module):
    def __init__(self, wide: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.side, self.down, self.up = _layer(wide, wide), _layer(wide, wide), _layer(wide, wide)
        self.inner = Hourglass(wide, depth - 1) if depth > 1 else _layer(wide, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.up(self.inner(self.down(F.max_pool2d(x, 2))))
        return self.side(x) + F.interpolate(low, scale_factor=2, mode="nearest")


@in_zoo
def nn_hourglass() -> Built:
    return nn.Sequential(_layer(3, 16), Hourglass(), Hourglass(), nn.Conv2d(16, 4, 1)), (images(2),), {}


class Segmenter(nn.Module):
    """Dilated convolutions in parallel, pooled context, and upsampling to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_layer(3, 16, 2), _layer(16, 32, 2))
        self.dilated = nn.ModuleList(nn.Conv2d(32, 16, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.context, self.out = nn.Conv2d(32, 16, 1), nn.Conv2d(64, 5, 1)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        context = self.context(F.adaptive_avg_pool2d(y, 1)).expand(-1, -1, *y.shape[2:])
        y = self.out(F.relu(torch.cat([*(d(y) for d in self.dilated), context], 1)))
        return F.cross_entropy(
            F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False), label
        )


@in_zoo
def nn_segmenter() -> Built:
    return Segmenter(), (images(4, 64), torch.randint(0, 5, (4, 64, 64))), {}


class Detector(nn.Module):
    """A pyramid of features with a head for classes and boxes at every anchor, with focal and box losses."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.classes = classes
        self.first, self.second, self.third = _layer(3, 16, 2), _layer(16, 32, 2), _layer(32, 64, 2)
        self.lateral = nn.ModuleList(nn.Conv2d(w, 32, 1) for w in (16, 32, 64))
        self.tower = nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1), nn.GroupNorm(8, 32), nn.ReLU())
        self.kind, self.box = nn.Conv2d(32, 3 * classes, 3, 1, 1), nn.Conv2d(32, 3 * 4, 3, 1, 1)

    def forward(self, x: torch.Tensor, label: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        a = self.first(x)
        b = self.second(a)
        c = self.third(b)
        levels = [lateral(y) for lateral, y in zip(self.lateral, (a, b, c), strict=True)]
        for i in (1, 0):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], scale_factor=2)
        kinds, boxes = [], []
        for level in levels:
            y = self.tower(level)
            kinds.append(self.kind(y).permute(0, 2, 3, 1).reshape(len(x), -1, self.classes))
            boxes.append(self.box(y).permute(0, 2, 3, 1).reshape(len(x), -1, 4))
        kind, box = torch.cat(kinds, 1), torch.cat(boxes, 1)
        hit = label > 0
        one_hot = F.one_hot(label, self.classes).float()
        cross = F.binary_cross_entropy_with_logits(kind, one_hot, reduction="none")
        focal = ((1 - torch.exp(-cross)) ** 2 * cross).sum() / hit.sum().clamp(min=1)
        apart = F.smooth_l1_loss(box, target, reduction="none").sum(-1)
        return {
            "loss": focal + torch.where(hit, apart, 0).mean(),
            "classes": kind.detach(),
            "boxes": box.detach(),
        }


@in_zoo
def nn_detector() -> Built:
    anchors = 3 * (16 * 16 + 8 * 8 + 4 * 4)
    return Detector(), (images(4), torch.randint(0, 5, (4, anchors)), torch.randn(4, anchors, 4)), {}


class Dilated(nn.Module):
    """Gated, dilated, causal convolutions with skips, as in WaveNet."""

    def __init__(self, wide: int = 16, layers: int = 5) -> None:
        super().__init__()
        self.inward = nn.Conv1d(1, wide, 1)
        self.gates = nn.ModuleList(nn.Conv1d(wide, 2 * wide, 2, dilation=2**i) for i in range(layers))
        self.mixes = nn.ModuleList(nn.Conv1d(wide, wide, 1) for _ in range(layers))
        self.out = nn.Conv1d(wide, 32, 1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x, total = self.inward(x), torch.zeros(())
        for i, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            y = mix(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + y, total + y
        return F.cross_entropy(self.out(F.relu(total)), target)


@in_zoo
def nn_wavenet() -> Built:
    return Dilated(), (torch.randn(2, 1, 512), torch.randint(0, 32, (2, 512))), {}


@in_zoo
def nn_volumes() -> Built:
    layers = [nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(inplace=True), nn.MaxPool3d(2)]
    net = nn.Sequential(
        *layers,
        nn.Conv3d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    return net, (torch.randn(2, 1, 16, 16, 16),), {}


class PixelShuffler(nn.Module):
    """Super-resolution by sub-pixel convolution, with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, 1, 1), nn.PReLU(), nn.Conv2d(32, 12, 3, 1, 1), nn.PixelShuffle(2)
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.l1_loss(
            self.body(x) + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False), target
        )


@in_zoo
def nn_super_resolution() -> Built:
    return PixelShuffler(), (images(4), images(4, 64)), {}


class Siamese(nn.Module):
    """The same net on two views, with a contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            _layer(3, 16, 2), _layer(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32)
        )
        self.temperature = nn.Parameter(torch.tensor(0.1))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(self.net(a), dim=-1), F.normalize(self.net(b), dim=-1)
        return F.cross_entropy(a @ b.T / self.temperature, torch.arange(len(a)))


@in_zoo
def nn_siamese() -> Built:
    return Siamese(), (images(8), images(8)), {}


class SpatialTransformer(nn.Module):
    """Warps its input by a grid that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(
            nn.Conv2d(3, 8, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 6)
        )
        self.net = nn.Sequential(_layer(3, 16), *_head(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = self.where(x).view(-1, 2, 3) + torch.eye(2, 3)
        return self.net(
            F.grid_sample(x, F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)
        )


@in_zoo
def nn_spatial_transformer() -> Built:
    return _classified(SpatialTransformer(), batch=8)
