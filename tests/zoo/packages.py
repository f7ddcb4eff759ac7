"""Models of packages that nobody here wrote or tuned for: what users install and train.

They are installed apart by ``make packages``, in ``<environment>/packages``: most ask for a PyTorch or a
torchvision of their own, which must not take the place of the one that is tested.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.zoo import Built, images, in_zoo_as, torchvision_shim, words

FOLDER = Path(sys.prefix) / "packages"


def package(name: str) -> Any:
    """A module of a package."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    torchvision_shim.install()
    return importlib.import_module(name)


class Called(nn.Module):
    """A model that is trained through a function of its own."""

    def __init__(self, model: nn.Module, method: str = "forward", **settings: Any) -> None:
        super().__init__()
        self.model, self._method, self._settings = model, method, settings

    def forward(self, *args: Any) -> Any:
        return getattr(self.model, self._method)(*args, **self._settings)


# ---- vit-pytorch ------------------------------------------------------------------------------------


def _vit(name: str, module: str, kind: str, side: int = 32, batch: int = 4, **settings: Any) -> None:
    def build() -> Built:
        made = getattr(package(f"vit_pytorch.{module}"), kind)(num_classes=10, **settings)
        return made, (images(batch, side),), {}

    in_zoo_as(f"pkg_vit_{name}", build)


_PLAIN = {"image_size": 32, "patch_size": 8, "dim": 48, "depth": 2, "heads": 3, "mlp_dim": 96}
_vit("plain", "vit", "ViT", **_PLAIN, dropout=0.1, emb_dropout=0.1)
_vit("simple", "simple_vit", "SimpleViT", **_PLAIN)
_vit("registers", "simple_vit_with_register_tokens", "SimpleViT", **_PLAIN)
_vit("qk_norm", "simple_vit_with_qk_norm", "SimpleViT", **_PLAIN)
_vit("fft", "simple_vit_with_fft", "SimpleViT", freq_patch_size=8, **_PLAIN)
_vit("patch_dropout", "simple_vit_with_patch_dropout", "SimpleViT", **_PLAIN, patch_dropout=0.25)
_vit("value_residual", "simple_vit_with_value_residual", "SimpleViT", **_PLAIN)
_vit("parallel", "parallel_vit", "ViT", **_PLAIN, num_parallel_branches=2, dropout=0.1, emb_dropout=0.1)
_vit("deep", "deepvit", "DeepViT", **_PLAIN, dropout=0.1, emb_dropout=0.1)
_vit("small_dataset", "vit_for_small_dataset", "ViT", **_PLAIN, dropout=0.1, emb_dropout=0.1)
_vit("patch_merger", "vit_with_patch_merger", "ViT", **_PLAIN, patch_merge_layer=1, patch_merge_num_tokens=4)
_vit("rotary", "rvt", "RvT", **_PLAIN, dropout=0.1, emb_dropout=0.1)
_vit("cait", "cait", "CaiT", cls_depth=2, **_PLAIN, dropout=0.1, emb_dropout=0.1, layer_dropout=0.05)
_vit(
    "t2t", "t2t", "T2TViT", dim=48, image_size=32, depth=2, heads=3, mlp_dim=96,
    t2t_layers=((3, 2), (3, 2)),
)  # fmt: skip
_vit(
    "cct", "cct", "CCT", img_size=32, embedding_dim=48, n_conv_layers=2, kernel_size=3, stride=1, padding=1,
    pooling_kernel_size=3, pooling_stride=2, pooling_padding=1, num_layers=2, num_heads=3, mlp_ratio=2.0,
    positional_embedding="learnable",
)  # fmt: skip
_vit(
    "cross", "cross_vit", "CrossViT", 64, image_size=64, depth=2, sm_dim=24, sm_patch_size=16,
    sm_enc_depth=1, sm_enc_heads=2, sm_enc_mlp_dim=48, lg_dim=48, lg_patch_size=32, lg_enc_depth=1,
    lg_enc_heads=2, lg_enc_mlp_dim=96, cross_attn_depth=1, cross_attn_heads=2, dropout=0.1, emb_dropout=0.1,
)  # fmt: skip
_vit("pit", "pit", "PiT", image_size=32, patch_size=8, dim=24, depth=(1, 1), heads=2, mlp_dim=48, dropout=0.1)
_vit(
    "nest",
    "nest",
    "NesT",
    image_size=32,
    patch_size=4,
    dim=24,
    heads=2,
    num_hierarchies=2,
    block_repeats=(1, 1),
)
_vit("max", "max_vit", "MaxViT", 64, 2, dim_conv_stem=16, dim=24, dim_head=8, depth=(1, 1), window_size=4)
_vit(
    "twins", "twins_svt", "TwinsSVT", 64, s1_emb_dim=16, s1_patch_size=4, s1_local_patch_size=4,
    s1_global_k=4, s1_depth=1, s2_emb_dim=24, s2_patch_size=2, s2_local_patch_size=4, s2_global_k=4,
    s2_depth=1, s3_emb_dim=32, s3_patch_size=2, s3_local_patch_size=2, s3_global_k=2, s3_depth=1,
    s4_emb_dim=32, s4_patch_size=2, s4_local_patch_size=2, s4_global_k=2, s4_depth=1,
)  # fmt: skip
_vit("region", "regionvit", "RegionViT", 56, dim=(16, 24, 32, 48), depth=(1, 1, 1, 1), window_size=7)
_vit("xcit", "xcit", "XCiT", cls_depth=1, **_PLAIN, dropout=0.1, emb_dropout=0.1, layer_dropout=0.05)
_vit(
    "sep", "sep_vit", "SepViT", 56, dim=16, dim_head=8, heads=(2, 3), depth=(1, 1), window_size=7, dropout=0.1
)
_vit("levit", "levit", "LeViT", 64, image_size=64, stages=2, dim=(32, 48), depth=1, heads=(2, 3), mlp_mult=2)


# ---- x-transformers and its relatives ---------------------------------------------------------------


def _decoder(name: str, **settings: Any) -> None:
    def build() -> Built:
        x = package("x_transformers")
        layers = x.Decoder(dim=48, depth=2, heads=3, **settings)
        model = x.TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=layers)
        return x.AutoregressiveWrapper(model), (words(),), {}

    in_zoo_as(f"pkg_x_{name}", build)


_decoder("decoder", attn_dropout=0.1, ff_dropout=0.1)
_decoder("rotary_glu", rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
_decoder("alibi", alibi_pos_bias=True, ff_post_act_ln=True)
_decoder("memory", attn_num_mem_kv=4, attn_one_kv_head=True)
_decoder("sandwich", sandwich_norm=True, residual_attn=True)
_decoder("macaron", macaron=True, ff_swish=True, ff_glu=True)


def _encoder_decoder() -> Built:
    x = package("x_transformers")
    sides = {"num_tokens": 256, "depth": 2, "heads": 3, "max_seq_len": 64}
    model = x.XTransformer(
        dim=48, **{f"{side}_{k}": v for side in ("enc", "dec") for k, v in sides.items()}, tie_token_emb=True
    )
    return model, (words(), words()), {}


def _language_model(module: str, kind: str, **settings: Any) -> Built:
    model = getattr(package(module), kind)(num_tokens=256, dim=48, depth=2, **settings)
    return model, (words(),), {}


def _denoising() -> Built:
    diffusion = package("denoising_diffusion_pytorch")
    model = diffusion.Unet(dim=16, dim_mults=(1, 2), flash_attn=False)
    return diffusion.GaussianDiffusion(model, image_size=32, timesteps=100), (images().sigmoid(),), {}


def _denoising_1d() -> Built:
    diffusion = package("denoising_diffusion_pytorch")
    model = diffusion.Unet1D(dim=16, dim_mults=(1, 2), channels=4)
    return diffusion.GaussianDiffusion1D(model, seq_length=32, timesteps=100), (torch.rand(4, 4, 32),), {}


for _name, _builder in {
    "pkg_x_encoder_decoder": _encoder_decoder,
    "pkg_performer": lambda: _language_model(
        "performer_pytorch", "PerformerLM", max_seq_len=32, heads=3, dim_head=16, causal=False
    ),
    "pkg_linformer": lambda: _language_model("linformer", "LinformerLM", seq_len=32, heads=3, k=8),
    "pkg_reformer": lambda: _language_model(
        "reformer_pytorch", "ReformerLM", max_seq_len=64, heads=3, bucket_size=8, n_hashes=2
    ),
    "pkg_g_mlp": lambda: _language_model("g_mlp_pytorch", "gMLP", seq_len=32),
    "pkg_denoising_diffusion": _denoising,
    "pkg_denoising_diffusion_1d": _denoising_1d,
}.items():
    in_zoo_as(_name, _builder)


def _of_sequences(name: str, module: str, kind: str, *sizes: int, **settings: Any) -> None:
    def build() -> Built:
        return getattr(package(module), kind)(**settings), (torch.randn(*sizes),), {}

    in_zoo_as(f"pkg_{name}", build)


_of_sequences("nystrom", "nystrom_attention", "Nystromformer", 4, 32, 48, dim=48, depth=2, dim_head=16,
              heads=3, num_landmarks=8)  # fmt: skip
_of_sequences("conformer", "conformer", "Conformer", 4, 32, 48, dim=48, depth=2, dim_head=16, heads=3)
_of_sequences("perceiver", "perceiver_pytorch", "Perceiver", 4, 16, 16, 3, input_channels=3, input_axis=2,
              num_freq_bands=4, max_freq=10.0, depth=2, num_latents=16, latent_dim=48, cross_heads=1,
              latent_heads=3, cross_dim_head=16, latent_dim_head=16, num_classes=10)  # fmt: skip
_of_sequences("glom", "glom_pytorch", "Glom", 2, 3, 32, 32, dim=48, levels=3, image_size=32, patch_size=8)
_of_sequences("timesformer", "timesformer_pytorch", "TimeSformer", 2, 4, 3, 32, 32, dim=48, image_size=32,
              patch_size=8, num_frames=4, num_classes=10, depth=2, heads=3, dim_head=16, attn_dropout=0.1,
              ff_dropout=0.1)  # fmt: skip
_of_sequences("slot_attention", "slot_attention", "SlotAttention", 4, 32, 48, num_slots=4, dim=48, iters=3)
_of_sequences("tcn", "pytorch_tcn", "TCN", 4, 12, 64, num_inputs=12, num_channels=[24, 24, 24])
_of_sequences("mlp_mixer", "mlp_mixer_pytorch", "MLPMixer", 4, 3, 32, 32, image_size=32, channels=3,
              patch_size=8, dim=48, depth=2, num_classes=10)  # fmt: skip
_of_sequences("vector_quantize", "vector_quantize_pytorch", "ResidualFSQ", 4, 32, 48, dim=48,
              levels=[8, 5, 5, 3], num_quantizers=2)  # fmt: skip


def _point_transformer() -> Built:
    layer = package("point_transformer_pytorch").PointTransformerLayer(
        dim=32, pos_mlp_hidden_dim=16, attn_mlp_hidden_mult=2
    )
    return layer, (torch.randn(2, 16, 32), torch.randn(2, 16, 3)), {}


def _egnn() -> Built:
    model = package("egnn_pytorch").EGNN(dim=32, dropout=0.1)
    return model, (torch.randn(2, 12, 32), torch.randn(2, 12, 3)), {}


def _product_keys() -> Built:
    model = package("product_key_memory").PKM(dim=48, heads=2, dim_head=16, num_keys=16, topk=4)
    return model, (torch.randn(4, 16, 48),), {}


def _mixture() -> Built:
    model = package("mixture_of_experts").MoE(dim=48, num_experts=4, hidden_dim=96)
    return model, (torch.randn(4, 32, 48),), {}


# ---- images ---------------------------------------------------------------------------------------


def _monai(name: str, kind: str, *sizes: int, **settings: Any) -> None:
    def build() -> Built:
        return getattr(package("monai.networks.nets"), kind)(**settings), (torch.randn(*sizes),), {}

    in_zoo_as(f"pkg_monai_{name}", build)


_monai("unet", "UNet", 2, 1, 32, 32, 32, spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32),
       strides=(2, 2), num_res_units=2, dropout=0.1)  # fmt: skip
_monai("segresnet", "SegResNet", 2, 1, 32, 32, 32, spatial_dims=3, init_filters=8, in_channels=1,
       out_channels=2, dropout_prob=0.1)  # fmt: skip
_monai("attention_unet", "AttentionUnet", 2, 1, 32, 32, spatial_dims=2, in_channels=1, out_channels=2,
       channels=(8, 16, 32), strides=(2, 2))  # fmt: skip
_monai("dynunet", "DynUNet", 2, 1, 32, 32, spatial_dims=2, in_channels=1, out_channels=2,
       kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2])  # fmt: skip
_monai("vnet", "VNet", 1, 1, 32, 32, 32, spatial_dims=3, in_channels=1, out_channels=2)
_monai("highresnet", "HighResNet", 2, 1, 16, 16, 16, spatial_dims=3, in_channels=1, out_channels=2)


def _segmentation(name: str, kind: str, encoder: str = "resnet18", side: int = 64) -> None:
    def build() -> Built:
        smp = package("segmentation_models_pytorch")
        model = getattr(smp, kind)(encoder, encoder_weights=None, in_channels=3, classes=2)
        return model, (images(2, side),), {}

    in_zoo_as(f"pkg_segmentation_{name}", build)


_segmentation("unet", "Unet")
_segmentation("unet_plus_plus", "UnetPlusPlus")
_segmentation("deeplab", "DeepLabV3Plus")
_segmentation("fpn", "FPN")
_segmentation("manet", "MAnet")
_segmentation("linknet", "Linknet")


def _efficientnet() -> Built:
    model = package("efficientnet_pytorch").EfficientNet.from_name("efficientnet-b0", num_classes=10)
    return model, (images(2, 64),), {}


def _open_clip() -> Built:
    clip = package("open_clip.model")
    vision = clip.CLIPVisionCfg(layers=2, width=48, head_width=16, patch_size=16, image_size=64)
    text = clip.CLIPTextCfg(context_length=16, vocab_size=256, width=48, heads=3, layers=2)
    return clip.CLIP(32, vision, text), (images(4, 64), words(4, 16)), {}


# ---- graphs, flows, processes, sound ----------------------------------------------------------------


class GraphNet(nn.Module):
    """Layers of torch-geometric on one graph."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.first(nodes, edges).relu(), 0.1, self.training)
        return self.second(hidden, edges)  # type: ignore[no-any-return]


def _geometric(name: str, kind: str, **settings: Any) -> None:
    def build() -> Built:
        layer = getattr(package("torch_geometric.nn"), kind)
        model = GraphNet(layer(24, 32, **settings), layer(32, 8, **settings))
        return model, (torch.randn(40, 24), torch.randint(0, 40, (2, 160))), {}

    in_zoo_as(f"pkg_geometric_{name}", build)


_geometric("gcn", "GCNConv")
_geometric("sage", "SAGEConv")
_geometric("gat", "GATConv")
_geometric("transformer", "TransformerConv")
_geometric("graph", "GraphConv")
_geometric("cheb", "ChebConv", K=2)


def _attentive() -> Built:
    model = package("torch_geometric.nn.models").AttentiveFP(24, 32, 1, 4, 2, 2, dropout=0.1)
    edges = torch.randint(0, 40, (2, 160))
    batch = torch.arange(4).repeat_interleave(10)
    return model, (torch.randn(40, 24), edges, torch.randn(160, 4), batch), {}


def _graph_unet() -> Built:
    model = package("torch_geometric.nn.models").GraphUNet(24, 32, 8, depth=2)
    return model, (torch.randn(40, 24), torch.randint(0, 40, (2, 160))), {}


def _gps() -> Built:
    geometric = package("torch_geometric.nn")
    layer = geometric.GPSConv(24, geometric.GCNConv(24, 24), heads=2)
    return layer, (torch.randn(40, 24), torch.randint(0, 40, (2, 160))), {}


def _real_nvp() -> Built:
    flows = package("normflows")
    layers: list[nn.Module] = []
    for _ in range(3):
        net = flows.nets.MLP([1, 32, 32, 2], init_zeros=True)
        layers += [flows.flows.AffineCouplingBlock(net), flows.flows.Permute(2), flows.flows.ActNorm(2)]
    model = flows.NormalizingFlow(flows.distributions.base.DiagGaussian(2), layers)
    return Called(model, "forward_kld"), (torch.randn(64, 2),), {}


def _spline_flow() -> Built:
    package("nflows")
    transforms = package("nflows.transforms")
    flow = package("nflows.flows").Flow(
        transforms.CompositeTransform(
            [
                transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
                    features=2, hidden_features=16, num_bins=4, tails="linear", tail_bound=3.0, num_blocks=1
                ),
                transforms.ReversePermutation(2),
            ]
        ),
        package("nflows.distributions").StandardNormal([2]),
    )
    return Called(flow, "log_prob"), (torch.randn(32, 2),), {}


def _masked_flow() -> Built:
    flow = package("nflows.flows").MaskedAutoregressiveFlow(4, 16, 2, 1)
    return Called(flow, "log_prob"), (torch.randn(32, 4),), {}


class _Dynamics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, _time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.net(state)  # type: ignore[no-any-return]


class NeuralOde(nn.Module):
    """A differential equation that is learned."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        package("torchdiffeq")  # here: its constants are tensors, which must not be made inside a step
        self.dynamics, self._settings = _Dynamics(), settings

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        solve = package("torchdiffeq").odeint
        return solve(self.dynamics, state, torch.linspace(0, 1, 5), **self._settings)[-1]  # type: ignore[no-any-return]


for _name, _builder in {
    "pkg_point_transformer": _point_transformer,
    "pkg_egnn": _egnn,
    "pkg_product_keys": _product_keys,
    "pkg_mixture_of_experts": _mixture,
    "pkg_efficientnet": _efficientnet,
    "pkg_open_clip": _open_clip,
    "pkg_geometric_attentive": _attentive,
    "pkg_geometric_unet": _graph_unet,
    "pkg_geometric_gps": _gps,
    "pkg_real_nvp": _real_nvp,
    "pkg_spline_flow": _spline_flow,
    "pkg_masked_flow": _masked_flow,
    "pkg_ode_rk4": lambda: (NeuralOde(method="rk4"), (torch.randn(16, 4),), {}),
    "pkg_ode_dopri5": lambda: (NeuralOde(method="dopri5"), (torch.randn(16, 4),), {}),
}.items():
    in_zoo_as(_name, _builder)
