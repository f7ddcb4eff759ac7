"""Transformers and their relatives, written with torch.nn."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.zoo import Built, in_zoo, words


class TokenModel(nn.Module):
    """An embedding, a body over (batch, time, width), and a head; returns the loss."""

    def __init__(self, body: nn.Module, width: int = 64, vocabulary: int = 256) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(vocabulary, width), body
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(self.words(tokens))).flatten(0, 1), targets.flatten())


def token_model(body: nn.Module) -> Built:
    return TokenModel(body), (words(), words()), {}


class Stacked(nn.Module):
    """Residual layers with pre-normalisation."""

    def __init__(self, *layers: nn.Module, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


@in_zoo
def nn_transformer_encoder() -> Built:
    return token_model(nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 3))


@in_zoo
def nn_transformer_encoder_norm_first() -> Built:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True, activation="gelu")
    return token_model(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(256, 64)
        self.transformer = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
        self.head = nn.Linear(64, 256)
        self.head.weight = self.words.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        states = self.transformer(self.words(source), self.words(target[:, :-1]), tgt_mask=mask)
        return F.cross_entropy(self.head(states).flatten(0, 1), target[:, 1:].flatten())


@in_zoo
def nn_transformer() -> Built:
    return Translator(), (words(), words(length=24)), {}


class Padded(nn.Module):
    """Self-attention with a padding mask of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
        self.out = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y, weights = self.attention(x, x, x, key_padding_mask=mask)
        return self.out(y).square().mean() + weights.var()


@in_zoo
def nn_multihead_attention() -> Built:
    mask = torch.zeros(4, 48, dtype=torch.bool)
    mask[:, 40:] = True
    return Padded(), (torch.randn(4, 48, 64), mask), {}


class LinearAttention(nn.Module):
    """Attention without a softmax, by cumulative sums of outer products."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * 16)
        self.out = nn.Linear(16, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        states = torch.einsum("btk,btv->btkv", k, v).cumsum(1)
        scale = (q * k.cumsum(1)).sum(-1, keepdim=True)
        return self.out(torch.einsum("btk,btkv->btv", q, states) / scale)


@in_zoo
def nn_linear_attention() -> Built:
    return token_model(Stacked(*(LinearAttention() for _ in range(3))))


class SelectiveScan(nn.Module):
    """A state space whose step sizes depend on the input, scanned position by position."""

    def __init__(self, width: int = 64, states: int = 8) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.step, self.inward, self.outward = (
            nn.Linear(width, width),
            nn.Linear(width, states),
            nn.Linear(width, states),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = F.softplus(self.step(x))
        decay = torch.exp(-step[..., None] * torch.exp(self.decay))
        drive = step[..., None] * self.inward(x)[:, :, None, :] * x[..., None]
        state, results = torch.zeros_like(drive[:, 0]), []
        outward = self.outward(x)
        for t in range(x.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            results.append((state * outward[:, t, None, :]).sum(-1))
        return torch.stack(results, 1) + x * self.skip


@in_zoo
def nn_selective_scan() -> Built:
    return token_model(Stacked(*(SelectiveScan() for _ in range(2))))


class LongConvolution(nn.Module):
    """A convolution as long as the sequence, by the fast Fourier transform."""

    def __init__(self, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.kernel, self.gate = nn.Parameter(torch.randn(width, length) * 0.1), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=2 * length) * torch.fft.rfft(self.kernel, n=2 * length)
        return torch.fft.irfft(spectrum, n=2 * length)[..., :length].transpose(1, 2) * torch.sigmoid(
            self.gate(x)
        )


@in_zoo
def nn_long_convolution() -> Built:
    return token_model(Stacked(*(LongConvolution() for _ in range(3))))


class RotaryAttention(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.project, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.project(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        half = q.shape[-1] // 2
        angle = torch.arange(time)[:, None] / 10000 ** (torch.arange(half) / half)
        turn = torch.polar(torch.ones_like(angle), angle)

        def rotate(y: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(y.float().reshape(*y.shape[:-1], half, 2).contiguous())
            return torch.view_as_real(pairs * turn).flatten(-2).to(y.dtype)

        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


@in_zoo
def nn_rotary_attention() -> Built:
    return token_model(Stacked(*(RotaryAttention() for _ in range(3))))


class DenseExperts(nn.Module):
    """Every expert sees every token; the gate weighs them."""

    def __init__(self, width: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.widen = nn.Parameter(torch.randn(experts, width, 2 * width) / math.sqrt(width))
        self.narrow = nn.Parameter(torch.randn(experts, 2 * width, width) / math.sqrt(2 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        hidden = F.silu(torch.einsum("btd,edf->ebtf", x, self.widen))
        return torch.einsum("ebtf,efd,bte->btd", hidden, self.narrow, weights)


@in_zoo
def nn_dense_experts() -> Built:
    return token_model(Stacked(*(DenseExperts() for _ in range(2))))


class CapacityExperts(nn.Module):
    """Top-2 experts of a fixed capacity each, by sorting: no shape depends on data."""

    def __init__(self, width: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(width, experts), 48
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights = self.gate(flat).softmax(-1)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            chosen, tokens = weights[:, index].topk(self.capacity)
            result = result.index_add(0, tokens, expert(flat[tokens]) * chosen[:, None])
        return result.view_as(x)


@in_zoo
def nn_capacity_experts() -> Built:
    return token_model(Stacked(*(CapacityExperts() for _ in range(2))))


class Mixer(nn.Module):
    """Mixes over positions, then over channels."""

    def __init__(self, width: int = 64, positions: int = 32) -> None:
        super().__init__()
        self.across = nn.Sequential(nn.Linear(positions, 64), nn.GELU(), nn.Linear(64, positions))
        self.within = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.within(x + self.across(x.transpose(1, 2)).transpose(1, 2))


@in_zoo
def nn_mixer() -> Built:
    return token_model(Stacked(*(Mixer() for _ in range(3))))


class Memory(nn.Module):
    """Cross-attention of a few latent vectors to a long input."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(16, 64))
        self.read = nn.ModuleList(nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(2))
        self.think = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        state = self.latents.expand(len(x), -1, -1)
        for read, think in zip(self.read, self.think, strict=True):
            state = think(state + read(state, x, x, need_weights=False)[0])
        return F.cross_entropy(self.head(state.mean(1)), label)


@in_zoo
def nn_perceiver() -> Built:
    return Memory(), (torch.randn(4, 256, 64), torch.randint(0, 10, (4,))), {}


@in_zoo
def nn_mlp() -> Built:
    layers = [nn.Linear(128, 256), nn.ReLU(inplace=True), nn.Linear(256, 256), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(256, 16)), (torch.randn(256, 128),), {}


@in_zoo
def nn_bfloat16_mlp() -> Built:
    layers = [nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1), nn.Linear(256, 128)]
    return nn.Sequential(*layers).to(torch.bfloat16), (torch.randn(512, 128, dtype=torch.bfloat16),), {}


class Autocast(nn.Module):
    """A body that computes in bfloat16 by its own autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x + self.body(x)
        return F.cross_entropy(self.head(y.float()), label)


@in_zoo
def nn_autocast_inside() -> Built:
    return Autocast(), (torch.randn(512, 64), torch.randint(0, 10, (512,))), {}
