"""The operations of random modules, with the shapes that they fit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]
Kind = Literal["sequences", "images"]
SHAPES: dict[Kind, Shape] = {"sequences": (4, 48, 64), "images": (2, 8, 16, 16)}
"""The shape of the input of each kind of module."""


def _same(shape: Shape) -> list[Shape]:
    return [shape]


@dataclass(frozen=True)
class Operation:
    """An operation of a forward.

    Attributes:
        text: Its code. ``{x}`` is a value, ``{y}`` another of the same shape, ``{m}`` a submodule or
            parameter. ``{a}`` and ``{b}`` are results; a text without ``{a}`` is an expression for the one
            result. ``{shape}`` is the shape of ``{x}``, ``{c}`` its last size, ``{h}`` half of that, and
            ``{n}`` the product of the other sizes.
        module: The code that makes ``{m}``; some modules are used several times.
        results: Shapes of the results.
        fits: Whether it can run on a value of a shape.
        weight: How often it is chosen, relative to others.
    """

    text: str
    module: Callable[[Shape], str] | None = None
    results: Callable[[Shape], list[Shape]] = _same
    fits: Callable[[Shape], bool] = lambda shape: True
    weight: float = 1.0


def _three(shape: Shape) -> bool:
    return len(shape) == 3


def _even(shape: Shape) -> bool:
    return shape[-1] % 2 == 0 and shape[-1] > 8


def _halves(shape: Shape) -> list[Shape]:
    return [(*shape[:-1], shape[-1] // 2)] * 2


def _turned(shape: Shape) -> list[Shape]:
    return [(*shape[:-2], shape[-1], shape[-2])]


def _heads(shape: Shape) -> bool:
    return len(shape) == 3 and shape[-1] % 4 == 0


def _alike(*texts: str, weight: float = 1.0) -> list[Operation]:
    return [Operation(text, weight=weight / len(texts)) for text in texts]


_ALONG_ROWS = _alike(
    "{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-5)",
    "{x} / ({x}.std(-1, keepdim=True) + 1)",
    "{x} / ({x}.var(-1, keepdim=True, unbiased=False) + 1).sqrt()",
    "F.normalize({x}, dim=-1)",
    "{x} - {x}.logsumexp(-1, keepdim=True)",
    "{x} * {x}.norm(dim=-1, keepdim=True) * 0.1",
    "{x}.pow(2).mean((-2, -1), keepdim=True) + {x}",
    "F.log_softmax({x}, -1) * 0.1",
    "F.softmax({x}, 1)",
    "{x}.mean(1, keepdim=True) + {x}",
    "{x}.sum(-1, keepdim=True).expand_as({x}) * 0.01 + {y}",
    "torch.cumprod({x}.sigmoid() + 0.5, 1)",
    "{x}.cummax(-1).values",
    weight=5.0,
)
_MOVED = _alike(
    "{x}.gather(-1, {y}.detach().argsort(-1))",
    "{x}.scatter_add(-1, {y}.detach().argsort(-1), {y})",
    "{x}.index_select(-1, torch.arange({x}.shape[-1] - 1, -1, -1))",
    "{x}.sort(-1).values",
    "{x}.topk(2, -1).values.sum(-1, keepdim=True) + {x}",
    "{x}.roll(1, -1)",
    "{x}.flip(-1)",
    "{x}.tril() + {y}",
    "{x}.repeat_interleave(2, -1)[..., ::2]",
    "{x}[..., ::2].repeat_interleave(2, -1)",
    weight=3.0,
)
_OF_ELEMENTS = _alike(
    "{x}.masked_fill({y} > 0.5, 0.1)",
    "{x}.clamp(-1, 1)",
    "{x}.where({x} > {y}, {y})",
    "{x}.minimum({y})",
    "{x}.atan2({y} + 2)",
    "torch.addcmul({x}, {y}, {y}, value=0.1)",
    "torch.special.erf({x})",
    "torch.complex({x}, {y}).abs()",
    "torch.fft.rfft({x}).abs().sum(-1, keepdim=True) * 0.01 + {y}",
    "{x}.bfloat16().float() + {y}",
    "({x}.double() * {y}).float()",
    weight=3.0,
)
_IN_PLACE = _alike(
    "{a} = {x} + {y}; {a} += {x}",
    "{a} = {x} * 2; {a}[..., 0] = {y}[..., 0]",
    "{a} = {x}.clone(); {a}[..., 1:].add_({y}[..., :-1])",
    "{a} = {x}.exp().clamp(max=2); {a}.sqrt_()",
    "{a} = torch.empty_like({x}); {a}[...] = {y}",
    "{a} = {x} * 1.0; {a}.masked_fill_({y} > 0, 0.5)",
    "{a} = {x} + 0.1; {a}.clamp_(-1, 1)",
    "{a} = {x} + 0.0; {a}[:1].select(-1, 0).zero_()",
    "{a} = {x}.clone(); {a}.index_add_(0, torch.tensor([0]), {y}[:1])",
    "{a} = {x} + 1; {a}.data.mul_(0.5)",
    weight=5.0,
)
_RANDOM = _alike(
    "F.dropout({x}, 0.1, True) * F.dropout({y}, 0.3, True)",
    "{x} + torch.randn_like({x}) * 0.1",
    "F.alpha_dropout({x}, 0.1, True)",
    "{x} * torch.bernoulli(torch.full_like({x}, 0.7))",
    "F.rrelu({x}, training=True)",
    "F.gumbel_softmax({x}, dim=-1)",
    "torch.rand(3).sum() * {x}",
    weight=2.0,
)
_WITHIN = _alike(
    "torch.func.vmap(lambda t: t * t.sum())({x}) * 0.01",
    "torch.no_grad()(lambda t: t * 2)({x}) + {y}",
    "torch.autocast('cpu', torch.bfloat16)(lambda t, u: (t @ u.mT).float().mean(-1, True) + t)({x}, {y})",
    weight=1.0,
)
_ANYWHERE = [
    *(*_ALONG_ROWS, *_MOVED, *_OF_ELEMENTS, *_IN_PLACE, *_RANDOM, *_WITHIN),
    *_alike(
        *("torch.tanh({x})", "torch.sigmoid({x})", "F.gelu({x})", "F.relu({x})", "F.silu({x})", "{x}.abs()"),
        *("{x}.neg()", "{x} * 0.5", "{x} / 3", "{x} + 1", "{x}.square() * 0.1", "F.hardswish({x})"),
        *("torch.exp({x}.clamp(max=1))", "F.leaky_relu({x}, 0.1)", "F.softplus({x})", "{x}.clone()"),
        weight=5.0,
    ),
    *_alike(
        *(
            "{x} + {y}",
            "{x} * {y}",
            "{x} - 0.5 * {y}",
            "torch.maximum({x}, {y})",
            "torch.lerp({x}, {y}, 0.3)",
        ),
        *("torch.where({x} > 0, {x}, {y} * 0.1)", "torch.stack([{x}, {y}]).mean(0)"),
        weight=4.0,
    ),
    *_alike(
        *("{a} = {x} * 1.5; {a}.add_(1)", "{a} = {x} * 1.5; {a}.tanh_()", "{a} = {x}.clone(); {a}.mul_(0.5)"),
        *("{a} = {x} + 0.5; F.relu({a}, inplace=True)", "{a} = {x} * 1.1; {a}[..., :{h}].mul_(2)"),
        "{a} = torch.zeros({shape}); {a}.copy_({x})",
        weight=3.0,
    ),
    *_alike(
        *("{x} + {x}.detach() * 0.1", "{x} - {x}.detach().mean(-1, keepdim=True)"),
        "{x} * {x}.mean(-1, keepdim=True).expand({x}.shape)",
        weight=2.0,
    ),
    Operation("F.dropout({x}, 0.2, self.training)"),
    Operation("{x} / ({x}.detach().abs().max().item() + 1)"),
    Operation("{x} * (1.0 if {x}.detach().sum().item() > 0 else 0.5)", weight=0.5),
    Operation("{a}, {b} = {x}.chunk(2, -1)", results=_halves, fits=_even, weight=1.5),
    Operation("{a}, {b} = {x}.unflatten(-1, (2, -1)).unbind(-2)", results=_halves, fits=_even, weight=0.5),
    Operation("{x}[..., {h}:]", results=lambda s: _halves(s)[:1], fits=_even),
]

_SEQUENCES = [
    *_ANYWHERE,
    Operation(
        "self.{m}({x})",
        lambda s: f"nn.Linear({s[-1]}, 64)",
        lambda s: [(*s[:-1], 64)],
        weight=3.0,
    ),
    Operation("self.{m}({x})", lambda s: f"nn.Linear({s[-1]}, {s[-1]}, bias=False)"),
    Operation("self.{m}({x})", lambda s: f"nn.LayerNorm({s[-1]})"),
    Operation("self.{m}({x})", lambda s: f"nn.BatchNorm1d({s[1]})"),
    Operation("self.{m}({x})", lambda s: f"nn.Conv1d({s[1]}, {s[1]}, 3, padding=1)", fits=_three),
    Operation(
        "self.{m}({x})[0]",
        lambda s: f"nn.GRU({s[-1]}, 32, batch_first=True)",
        lambda s: [(*s[:-1], 32)],
        _three,
        0.5,
    ),
    Operation("{x} * self.{m}", lambda s: f"nn.Parameter(torch.randn({s[-1]}))"),
    Operation("{x} + self.{m}", lambda s: f"nn.Parameter(torch.randn({s[-1]}))"),
    Operation(
        "torch.utils.checkpoint.checkpoint(self.{m}, {x}, use_reentrant=False)",
        lambda s: f"nn.Sequential(nn.Linear({s[-1]}, 64), nn.Dropout(0.1), nn.Linear(64, {s[-1]}))",
    ),
    Operation("F.softmax({x}, -1)"),
    Operation("{x}.cumsum(1) * 0.05"),
    Operation("{x}.transpose(1, 2)", results=_turned, fits=_three, weight=1.5),
    Operation("{x}.transpose(1, 2).contiguous()", results=_turned, fits=_three),
    Operation("{x}.permute(1, 0, 2)", results=lambda s: [(s[1], s[0], s[2])], fits=_three),
    Operation("{x}.reshape({n}, {c})", results=lambda s: [(s[0] * s[1], s[2])], fits=_three),
    Operation("{x}.unsqueeze(1).squeeze(1)", fits=_three),
    Operation(
        "torch.cat([{x}, {y}], -1)", results=lambda s: [(*s[:-1], 2 * s[-1])], fits=lambda s: s[-1] < 128
    ),
    Operation("torch.bmm({x}, {y}.transpose(1, 2)) * 0.1", results=lambda s: [(*s[:-1], s[1])], fits=_three),
    Operation("F.scaled_dot_product_attention({x}, {y}, {x}, dropout_p=0.1)", fits=_three),
    Operation("F.scaled_dot_product_attention({x}, {x}, {y}, is_causal=True)", fits=_three),
    Operation("{x}[torch.arange(len({x})).flip(0)]", weight=0.5),
    Operation("torch.einsum('bij,bkj->bik', {x}, {y}) @ {y} * 0.01", fits=_three),
    Operation(
        "F.scaled_dot_product_attention(*(t.unflatten(-1, (4, -1)).transpose(1, 2) for t in ({x}, {y}, {x})))"
        ".transpose(1, 2).flatten(2)",
        fits=_heads,
    ),
    Operation(
        "self.{m}({x}, {y}, {x})[0]",
        lambda s: f"nn.MultiheadAttention({s[-1]}, 4, dropout=0.1, batch_first=True)",
        fits=_heads,
    ),
    Operation(
        "self.{m}({x})",
        lambda s: f"nn.TransformerEncoderLayer({s[-1]}, 4, 32, batch_first=True)",
        fits=_heads,
    ),
    Operation(
        "self.{m}({x})[0]",
        lambda s: f"nn.LSTM({s[-1]}, 16, 2, batch_first=True, dropout=0.1, bidirectional=True)",
        lambda s: [(*s[:-1], 32)],
        _three,
        0.5,
    ),
    Operation("self.{m}({x})", lambda s: f"nn.RMSNorm({s[-1]})"),
    *[
        Operation(
            "self.{m}({x})",
            lambda s, norm=norm: f"torch.nn.utils.parametrizations.{norm}(nn.Linear({s[-1]}, {s[-1]}))",  # type: ignore[misc]
            weight=0.5,
        )
        for norm in ("weight_norm", "spectral_norm")
    ],
    Operation(
        "self.{m}({x}.detach().argmax(-1)).expand(*{x}.shape[:2], 32)",
        lambda s: f"nn.Embedding({s[-1]}, 32)",
        lambda s: [(*s[:-1], 32)],
        _three,
    ),
    Operation(
        "F.cross_entropy({x}.transpose(1, 2), {y}.detach().argmax(-1), reduction='none').unsqueeze(-1) + {x}",
        fits=_three,
    ),
]


def _smaller(shape: Shape) -> list[Shape]:
    return [(*shape[:2], shape[2] // 2, shape[3] // 2)]


def _larger(shape: Shape) -> list[Shape]:
    return [(*shape[:2], shape[2] * 2, shape[3] * 2)]


def _can_shrink(shape: Shape) -> bool:
    return min(shape[2:]) >= 4


def _can_grow(shape: Shape) -> bool:
    return max(shape[2:]) <= 16


_IMAGES = [
    *_ANYWHERE,
    Operation(
        "self.{m}({x})",
        lambda s: f"nn.Conv2d({s[1]}, 16, 3, padding=1)",
        lambda s: [(s[0], 16, *s[2:])],
        weight=3.0,
    ),
    Operation("self.{m}({x})", lambda s: f"nn.Conv2d({s[1]}, {s[1]}, 1, bias=False)"),
    Operation("self.{m}({x})", lambda s: f"nn.Conv2d({s[1]}, {s[1]}, 3, padding=1, groups={s[1]})"),
    Operation(
        "self.{m}({x})",
        lambda s: f"nn.ConvTranspose2d({s[1]}, {s[1]}, 2, stride=2)",
        _larger,
        _can_grow,
        0.5,
    ),
    Operation("self.{m}({x})", lambda s: f"nn.BatchNorm2d({s[1]})", weight=3.0),
    Operation("self.{m}({x})", lambda s: f"nn.GroupNorm(4, {s[1]})"),
    Operation("self.{m}({x})", lambda s: f"nn.PReLU({s[1]})", weight=0.5),
    Operation(
        "self.{m}({x}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)", lambda s: f"nn.LayerNorm({s[1]})", weight=0.5
    ),
    Operation("{x} * self.{m}", lambda s: f"nn.Parameter(torch.randn({s[1]}, 1, 1))"),
    Operation(
        "torch.utils.checkpoint.checkpoint(self.{m}, {x}, use_reentrant=False)",
        lambda s: f"nn.Sequential(nn.Conv2d({s[1]}, {s[1]}, 3, padding=1), nn.SiLU(), nn.Dropout(0.1))",
    ),
    *[
        Operation(text, results=_smaller, fits=_can_shrink, weight=0.5)
        for text in ("F.max_pool2d({x}, 2)", "F.avg_pool2d({x}, 2)")
    ],
    *[
        Operation(f"F.interpolate({{x}}, scale_factor=2, mode={mode!r})", None, _larger, _can_grow, 0.3)
        for mode in ("nearest", "bilinear", "bicubic")
    ],
    Operation("{x}.transpose(2, 3)", results=_turned),
    Operation("{x}.contiguous(memory_format=torch.channels_last)"),
    Operation("{x} - {x}.mean((2, 3), keepdim=True)"),
    Operation("{x} * {x}.amax((2, 3), keepdim=True)", weight=0.5),
    Operation("F.pad({x}, (1, 1, 1, 1), mode='replicate')[:, :, 1:-1, 1:-1]", weight=0.5),
    Operation("self.{m}({x})", lambda s: f"nn.InstanceNorm2d({s[1]}, affine=True)", fits=_can_shrink),
    Operation("F.dropout2d({x}, 0.2, self.training)"),
    Operation("F.adaptive_avg_pool2d({x}, 1) * {x}"),
    Operation("F.max_pool2d({x}, 3, 1, 1)"),
    Operation("F.local_response_norm({x}, 3)", weight=0.5),
    Operation("F.pixel_unshuffle(F.pixel_shuffle({x}, 2), 2)", fits=lambda s: s[1] % 4 == 0),
    Operation(
        "F.grid_sample({x}, F.affine_grid(torch.eye(2, 3).expand(len({x}), 2, 3), {x}.shape, False), "
        "align_corners=False)",
        weight=0.5,
    ),
    Operation(
        "F.unfold({x}, 3, padding=1).unflatten(1, ({x}.shape[1], 9)).mean(2).unflatten(-1, {x}.shape[2:])",
        weight=0.5,
    ),
    Operation(
        "self.{m}({x})",
        lambda s: f"torch.nn.utils.parametrizations.weight_norm(nn.Conv2d({s[1]}, {s[1]}, 3, padding=1))",
    ),
    Operation("torch.cat([{x}, {y}], 1)", None, lambda s: [(s[0], 2 * s[1], *s[2:])], lambda s: s[1] < 32),
]
OPERATIONS: dict[Kind, list[Operation]] = {"sequences": _SEQUENCES, "images": _IMAGES}
