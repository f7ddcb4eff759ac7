"""Networks of diffusers."""

import torch

from tests.zoo import Built, in_zoo


@in_zoo
def diffusers_unet() -> Built:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    return model, (torch.randn(4, 3, 16, 16), torch.randint(0, 1000, (4,))), {}


@in_zoo
def diffusers_conditioned_unet() -> Built:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return model, (torch.randn(4, 4, 16, 16), torch.randint(0, 1000, (4,)), torch.randn(4, 7, 32)), {}


@in_zoo
def diffusers_controlnet() -> Built:
    import diffusers

    model = diffusers.ControlNetModel(
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        conditioning_embedding_out_channels=(8, 16),
    )
    inputs = {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.randint(0, 1000, (2,)),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "controlnet_cond": torch.randn(2, 3, 32, 32),
    }
    return model, (), inputs


@in_zoo
def diffusers_dit() -> Built:
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=8,
    )
    return model, (torch.randn(4, 4, 16, 16), torch.randint(0, 1000, (4,)), torch.randint(0, 10, (4,))), {}


@in_zoo
def diffusers_flux() -> Built:
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(4, 64, 4),
        "encoder_hidden_states": torch.randn(4, 16, 32),
        "pooled_projections": torch.randn(4, 32),
        "timestep": torch.rand(4),
        "img_ids": torch.randint(0, 8, (64, 3)).float(),
        "txt_ids": torch.zeros(16, 3),
    }
    return model, (), inputs


@in_zoo
def diffusers_sd3() -> Built:
    import diffusers

    model = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
    )
    inputs = {
        "hidden_states": torch.randn(4, 4, 16, 16),
        "encoder_hidden_states": torch.randn(4, 16, 32),
        "pooled_projections": torch.randn(4, 32),
        "timestep": torch.randint(0, 1000, (4,)),
    }
    return model, (), inputs


@in_zoo
def diffusers_autoencoder() -> Built:
    import diffusers

    model = diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return model, (torch.randn(2, 3, 32, 32),), {"sample_posterior": True}


@in_zoo
def diffusers_vq_model() -> Built:
    import diffusers

    model = diffusers.VQModel(
        in_channels=3,
        out_channels=3,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        num_vq_embeddings=32,
    )
    return model, (torch.randn(2, 3, 32, 32),), {}


@in_zoo
def diffusers_qwen_image() -> Built:
    """Its tables of rotations are remembered by methods, for each module and size."""
    import diffusers

    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    )
    inputs = {
        "hidden_states": torch.randn(2, 64, 16),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "encoder_hidden_states_mask": torch.ones(2, 7).bool(),
        "timestep": torch.rand(2),
        "img_shapes": [(1, 8, 8)] * 2,
    }
    return model, (), inputs


@in_zoo
def diffusers_wan_autoencoder() -> Built:
    """Videos, piece by piece, with what earlier pieces left for causal convolutions."""
    import diffusers

    model = diffusers.AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    return model, (torch.randn(1, 3, 9, 16, 16),), {}


@in_zoo
def diffusers_mochi() -> Built:
    """Text of each sample without its padding: sizes that data decide, in every layer."""
    import diffusers

    model = diffusers.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        out_channels=None,
        qk_norm="rms_norm",
        text_embed_dim=16,
        time_embed_dim=4,
        activation_fn="swiglu",
        max_sequence_length=16,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(2, 8, 16),
        "timestep": torch.randint(0, 1000, (2,)),
        "encoder_attention_mask": torch.ones(2, 8).bool(),
    }
    return model, (), inputs


@in_zoo
def diffusers_hunyuan_dit() -> Built:
    import diffusers

    model = diffusers.HunyuanDiT2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        patch_size=2,
        sample_size=16,
        hidden_size=32,
        num_layers=4,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=8,
        text_len=6,
        text_len_t5=6,
        activation_fn="gelu-approximate",
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "timestep": torch.rand(2) * 100,
        "encoder_hidden_states": torch.randn(2, 6, 16),
        "text_embedding_mask": torch.ones(2, 6),
        "encoder_hidden_states_t5": torch.randn(2, 6, 16),
        "text_embedding_mask_t5": torch.ones(2, 6),
        "image_meta_size": torch.rand(2, 6),
        "style": torch.zeros(2, dtype=torch.long),
        "image_rotary_emb": [torch.randn(64, 8), torch.randn(64, 8)],
        "return_dict": False,
    }
    return model, (), inputs


@in_zoo
def diffusers_sana() -> Built:
    import diffusers

    model = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=8,
        dropout=0.1,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 6, 16),
        "timestep": torch.randint(0, 100, (2,)),
    }
    return model, (), inputs
