"""Classic convolutional nets of the published headlines, in plain PyTorch; all return logits."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.zoo import BottleneckNet

VGG_16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
VGG_19 = (64, 64, 0, 128, 128, 0, *(256,) * 4, 0, *(512,) * 4, 0, *(512,) * 4, 0)


def unit(wide_in: int, wide_out: int, size: int = 3, *, dilation: int = 1) -> nn.Sequential:
    """Convolution, batch normalisation, ReLU."""
    padding = dilation * (size // 2)
    layer = nn.Conv2d(wide_in, wide_out, size, 1, padding, dilation, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(wide_out), nn.ReLU(inplace=True))


class VGG(nn.Module):
    """Convolutions of 3 x 3 and pooling (0 among the widths), and three linear layers."""

    def __init__(self, widths: tuple[int, ...], classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        wide = 3
        for width in widths:
            if width:
                layers += [nn.Conv2d(wide, width, 3, 1, 1), nn.ReLU(inplace=True)]
                wide = width
            else:
                layers.append(nn.MaxPool2d(2))
        self.body = nn.Sequential(*layers)
        hidden: list[nn.Module] = []
        for wide_in in (wide * 7 * 7, 4096):
            hidden += [nn.Linear(wide_in, 4096), nn.ReLU(inplace=True), nn.Dropout()]
        self.head = nn.Sequential(*hidden, nn.Linear(4096, classes))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.body(image), 7).flatten(1))


class Inception(nn.Module):
    """Four branches side by side (Szegedy et al. 2015), each convolution normalised."""

    def __init__(self, wide: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                unit(wide, one, 1),
                nn.Sequential(unit(wide, three[0], 1), unit(three[0], three[1], 3)),
                nn.Sequential(unit(wide, five[0], 1), unit(five[0], five[1], 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), unit(wide, pool, 1)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class GoogLeNet(nn.Module):
    """Nine inception blocks, without the auxiliary classifiers."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        pool = nn.MaxPool2d(3, 2, 1)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), pool,
            unit(64, 64, 1), unit(64, 192), pool,
        )  # fmt: skip
        self.body = nn.Sequential(
            Inception(192, 64, (96, 128), (16, 32), 32), Inception(256, 128, (128, 192), (32, 96), 64), pool,
            Inception(480, 192, (96, 208), (16, 48), 64), Inception(512, 160, (112, 224), (24, 64), 64),
            Inception(512, 128, (128, 256), (24, 64), 64), Inception(512, 112, (144, 288), (32, 64), 64),
            Inception(528, 256, (160, 320), (32, 128), 128), pool,
            Inception(832, 256, (160, 320), (32, 128), 128), Inception(832, 384, (192, 384), (48, 128), 128),
        )  # fmt: skip
        self.head = nn.Linear(1024, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(F.dropout(self.body(self.stem(image)).mean((2, 3)), 0.4, self.training))


class OriginalUNet(nn.Module):
    """The U-Net of Ronneberger et al. 2015: unpadded convolutions, cropped skips."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        self.down = nn.ModuleList(self._pair(a, b) for a, b in zip((1, *widths[:-1]), widths, strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, b // 2, 2, 2) for b in widths[:0:-1])
        self.up = nn.ModuleList(self._pair(b, b // 2) for b in widths[:0:-1])
        self.head = nn.Conv2d(64, classes, 1)

    @staticmethod
    def _pair(wide_in: int, wide_out: int) -> nn.Sequential:
        first, second = nn.Conv2d(wide_in, wide_out, 3), nn.Conv2d(wide_out, wide_out, 3)
        return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x, skips = image, []
        for number, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if number else x)
            skips.append(x)
        skips.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x, skip = grow(x), skips.pop()
            cut = (skip.shape[2] - x.shape[2]) // 2
            x = up(torch.cat([skip[:, :, cut : cut + x.shape[2], cut : cut + x.shape[3]], x], 1))
        return self.head(x).mean((2, 3))


class PSPNet(nn.Module):
    """Pyramid pooling on a dilated ResNet-101 (Zhao et al. 2017)."""

    def __init__(self, classes: int = 21) -> None:
        super().__init__()
        net = BottleneckNet((3, 4, 23, 3))
        for name, module in net.stages.named_modules():
            block = int(name.split(".")[0]) if name else 0
            if isinstance(module, nn.Conv2d) and block >= 7:
                dilation = 2 if block < 30 else 4
                module.stride = (1, 1)
                if module.kernel_size == (3, 3):
                    module.dilation = module.padding = (dilation, dilation)
        self.stem, self.stages = net.stem, net.stages
        self.pyramid = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), unit(2048, 512, 1)) for size in (1, 2, 3, 6)
        )
        self.head = nn.Sequential(unit(4096, 512), nn.Dropout(0.1), nn.Conv2d(512, classes, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stages(self.stem(image))
        size = x.shape[2:]
        levels = [F.interpolate(level(x), size=size, mode="bilinear") for level in self.pyramid]
        return self.head(torch.cat([x, *levels], 1)).mean((2, 3))
