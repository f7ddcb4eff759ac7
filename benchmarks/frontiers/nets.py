"""Architectures of the benchmarks that no installed library has, in plain PyTorch."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class PreActivation(nn.Module):
    """Bottleneck with normalisation and ReLU before each convolution (He et al. 2016, v2)."""

    def __init__(self, wide_in: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((wide_in, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.parts = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(inplace=True), nn.Conv2d(a, b, k, s, k // 2, bias=False))
            for a, b, k, s in sizes
        )
        same = wide_in == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(wide_in, 4 * width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for part in self.parts:
            y = part(y)
        return self.shortcut(x) + y


class DeepResNet(nn.Module):
    """Pre-activation net for small images: 9 layers a block and stage; 111 of them are ResNet-1001."""

    def __init__(self, blocks: int, width: int = 16) -> None:
        super().__init__()
        stages, wide = [], width
        for stage in range(3):
            for i in range(blocks):
                stages.append(PreActivation(wide, width * 2**stage, 2 if stage and not i else 1))
                wide = 4 * width * 2**stage
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.stages = nn.Sequential(*stages)
        self.norm, self.head = nn.BatchNorm2d(wide), nn.Linear(wide, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.stages(self.stem(image)))).mean((2, 3)))


class Normalised(nn.Sequential):
    """Convolution, batch normalisation, leaky ReLU: what Chen et al. (2016) count as one layer."""

    def __init__(self, wide_in: int, wide_out: int, size: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(wide_in, wide_out, size, stride, size // 2),
            nn.BatchNorm2d(wide_out),
            nn.LeakyReLU(0.25, inplace=True),
        )


class DeepBottleneck(nn.Module):
    """Bottleneck whose two ways are both normalised and rectified before they are added."""

    def __init__(self, wide_in: int, width: int, stride: int, *, project: bool) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            Normalised(wide_in, width, 1),
            Normalised(width, width, 3, stride),
            Normalised(width, 4 * width, 1),
        )
        self.shortcut = Normalised(wide_in, 4 * width, 1, stride) if project else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.parts(x)


class DeepBottleneckNet(nn.Module):
    """The residual net for ImageNet whose memory Chen et al. (2016) measured, by blocks a stage."""

    def __init__(self, blocks: tuple[int, ...], width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        stages, wide = [], width
        for stage, count in enumerate(blocks):
            for i in range(count):
                stride = 2 if stage and not i else 1
                stages.append(DeepBottleneck(wide, width * 2**stage, stride, project=not i))
                wide = 4 * width * 2**stage
        self.stem = nn.Sequential(Normalised(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(wide, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(image)).mean((2, 3)))


class DenseNet(nn.Module):
    """Every layer of a block reads the concatenation of all before it (Huang et al. 2017)."""

    def __init__(self, blocks: tuple[int, ...], growth: int = 32, classes: int = 1000) -> None:
        super().__init__()
        wide = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, wide, 7, 2, 3, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks, self.narrow = nn.ModuleList(), nn.ModuleList()
        for number, count in enumerate(blocks):
            layers = [self._layer(wide + i * growth, growth) for i in range(count)]
            self.blocks.append(nn.ModuleList(layers))
            wide += count * growth
            if number + 1 < len(blocks):
                parts = (nn.BatchNorm2d(wide), nn.ReLU(True), nn.Conv2d(wide, wide // 2, 1, bias=False))
                self.narrow.append(nn.Sequential(*parts, nn.AvgPool2d(2)))
                wide //= 2
        self.norm, self.head = nn.BatchNorm2d(wide), nn.Linear(wide, classes)

    @staticmethod
    def _layer(wide: int, growth: int) -> nn.Module:
        return nn.Sequential(
            nn.BatchNorm2d(wide), nn.ReLU(True), nn.Conv2d(wide, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(True), nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
        )  # fmt: skip

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for number, block in enumerate(self.blocks):
            features = [x]
            for layer in block:  # type: ignore[attr-defined]
                features.append(layer(torch.cat(features, 1)))
            x = torch.cat(features, 1)
            if number < len(self.narrow):
                x = self.narrow[number](x)
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


class TimeBlock(nn.Module):
    """Residual block that adds an embedding of the time step."""

    def __init__(self, wide_in: int, wide_out: int, time: int, groups: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(groups, wide_in), nn.Conv2d(wide_in, wide_out, 3, 1, 1)
        self.time = nn.Linear(time, wide_out)
        self.norm2, self.conv2 = nn.GroupNorm(groups, wide_out), nn.Conv2d(wide_out, wide_out, 3, 1, 1)
        self.shortcut = nn.Identity() if wide_in == wide_out else nn.Conv2d(wide_in, wide_out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv(F.silu(self.norm(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Attention over pixels, to themselves or to the words of a prompt."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        parts = (self.query(x), self.key(context), self.value(context))
        split = [p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts]
        y = F.scaled_dot_product_attention(*split)
        return self.out(y.transpose(1, 2).flatten(2))


class SpatialTransformer(nn.Module):
    """Self-attention, attention to the prompt, and a gated perceptron, on a picture's pixels."""

    def __init__(self, width: int, context: int, heads: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, width)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width, width, heads), Attention(width, context, heads)
        self.widen, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        y = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        z = self.norms[0](y)
        y = y + self.own(z, z)
        y = y + self.cross(self.norms[1](y), context)
        value, gate = self.widen(self.norms[2](y)).chunk(2, -1)
        y = y + self.narrow(value * F.gelu(gate))
        return x + self.leave(y.transpose(1, 2).unflatten(2, x.shape[2:]))


class DiffusionUNet(nn.Module):
    """A U-Net of the shape of Stable Diffusion 1.5's: 4 levels, 2 blocks each, attention in three."""

    def __init__(self, widths: tuple[int, ...], context: int = 768, heads: int = 8, groups: int = 32) -> None:
        super().__init__()
        time = 4 * widths[0]
        self.embed = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(4, widths[0], 3, 1, 1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, wide = [widths[0]], widths[0]

        def block(wide_in: int, level: int, resize: nn.Module | None) -> nn.ModuleList:
            attends = level + 1 < len(widths) and resize is None
            here = widths[level]
            parts: list[nn.Module] = [resize] if resize else [TimeBlock(wide_in, here, time, groups)]
            return nn.ModuleList(
                [*parts, *([SpatialTransformer(here, context, heads, groups)] if attends else [])]
            )

        for level, here in enumerate(widths):
            for _ in range(2):
                self.down.append(block(wide, level, None))
                wide = here
                skips.append(wide)
            if level + 1 < len(widths):
                self.down.append(block(wide, level, nn.Conv2d(wide, wide, 3, 2, 1)))
                skips.append(wide)
        self.first, self.second = TimeBlock(wide, wide, time, groups), TimeBlock(wide, wide, time, groups)
        self.middle = SpatialTransformer(wide, context, heads, groups)
        for level in reversed(range(len(widths))):
            for _ in range(3):
                self.up.append(block(wide + skips.pop(), level, None))
                wide = widths[level]
            if level:
                larger = nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(wide, wide, 3, 1, 1))
                self.up.append(block(wide, level, larger))
        self.norm, self.leave = nn.GroupNorm(groups, wide), nn.Conv2d(wide, 4, 3, 1, 1)

    @staticmethod
    def _run(parts: nn.ModuleList, x: torch.Tensor, time: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x = parts[0](x, time) if isinstance(parts[0], TimeBlock) else parts[0](x)
        return parts[1](x, words) if len(parts) > 1 else x

    def forward(
        self, image: torch.Tensor, time: torch.Tensor, words: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        step = self.embed(time)
        x = self.enter(image)
        skips = [x]
        for parts in self.down:
            x = self._run(parts, x, step, words)  # type: ignore[arg-type]
            skips.append(x)
        x = self.second(self.middle(self.first(x, step), words), step)
        for parts in self.up:
            if isinstance(parts[0], TimeBlock):  # type: ignore[index]
                x = torch.cat([x, skips.pop()], 1)
            x = self._run(parts, x, step, words)  # type: ignore[arg-type]
        return F.mse_loss(self.leave(F.silu(self.norm(x))), noise)


class UnrolledLSTM(nn.Module):
    """One LSTM cell, step by step in Python, and a loss on its last state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gates, self.head = nn.Linear(2 * width, 4 * width), nn.Linear(width, 10)

    def forward(self, inputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        hidden = cell = torch.zeros(inputs.shape[1], self.width, device=inputs.device)
        for x in inputs.unbind(0):
            let_in, forget, new, let_out = self.gates(torch.cat([x, hidden], 1)).chunk(4, 1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(let_in) * torch.tanh(new)
            hidden = torch.sigmoid(let_out) * torch.tanh(cell)
        return F.cross_entropy(self.head(hidden), label)
