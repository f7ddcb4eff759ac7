"""Vision models, and models of images and text, of Hugging Face transformers."""

from typing import Any

import torch

from tests.zoo import Built, images, in_zoo, in_zoo_as, words

_PATCHES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 4,
}
_TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}


def _model(model: str, config: str, **settings: Any) -> torch.nn.Module:
    import transformers

    made: torch.nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return made


def _classifier(name: str, family: str, side: int = 32, **settings: Any) -> None:
    def build() -> Built:
        module = _model(f"{family}ForImageClassification", f"{family}Config", num_labels=5, **settings)
        return module, (), {"pixel_values": images(side=side), "labels": torch.randint(0, 5, (4,))}

    in_zoo_as(name, build)


_classifier("hf_vit", "ViT", **_PATCHES, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
_classifier("hf_deit", "DeiT", **_PATCHES)
_classifier("hf_beit", "Beit", **_PATCHES)
_classifier("hf_dinov2", "Dinov2", **_PATCHES, drop_path_rate=0.1)
_classifier(
    "hf_swin",
    "Swin",
    image_size=32,
    patch_size=2,
    embed_dim=16,
    depths=[2, 2],
    num_heads=[2, 4],
    window_size=4,
    drop_path_rate=0.1,
)
_classifier(
    "hf_swinv2",
    "Swinv2",
    image_size=32,
    patch_size=2,
    embed_dim=16,
    depths=[2, 2],
    num_heads=[2, 4],
    window_size=4,
    drop_path_rate=0.1,
)
_classifier("hf_convnext", "ConvNext", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, drop_path_rate=0.1)
_classifier(
    "hf_convnextv2", "ConvNextV2", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, drop_path_rate=0.1
)
_classifier(
    "hf_resnet", "ResNet", 64, embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic"
)
_classifier(
    "hf_regnet", "RegNet", 64, embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], groups_width=8
)
_classifier("hf_mobilenet_v2", "MobileNetV2", 64, depth_multiplier=0.35)
_classifier(
    "hf_segformer",
    "Segformer",
    64,
    hidden_sizes=[16, 32, 32, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 2],
    decoder_hidden_size=32,
)
_classifier("hf_poolformer", "PoolFormer", 64, hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1])
_classifier(
    "hf_pvt",
    "Pvt",
    64,
    image_size=64,
    hidden_sizes=[16, 32, 32, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 4],
)
_classifier(
    "hf_levit",
    "Levit",
    64,
    image_size=64,
    hidden_sizes=[32, 48, 64],
    depths=[1, 1, 1],
    num_attention_heads=[2, 3, 4],
    key_dim=[8, 8, 8],
)
_classifier(
    "hf_mobilevit",
    "MobileViT",
    64,
    image_size=64,
    hidden_sizes=[32, 48, 64],
    neck_hidden_sizes=[8, 16, 24, 32, 32, 32, 64],
    num_attention_heads=2,
)
_classifier(
    "hf_efficientnet",
    "EfficientNet",
    64,
    image_size=64,
    width_coefficient=0.25,
    depth_coefficient=0.25,
    hidden_dim=320,
)
_classifier(
    "hf_focalnet",
    "FocalNet",
    image_size=32,
    patch_size=2,
    embed_dim=16,
    depths=[1, 1],
    focal_levels=[2, 2],
    focal_windows=[3, 3],
)


@in_zoo
def hf_vit_mae() -> Built:
    decoder = {
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 64,
    }
    module = _model("ViTMAEForPreTraining", "ViTMAEConfig", **_PATCHES, **decoder)
    return module, (), {"pixel_values": images()}


@in_zoo
def hf_segformer_segmentation() -> Built:
    module = _model(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        num_labels=5,
        hidden_sizes=[16, 32, 32, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=32,
    )
    return module, (), {"pixel_values": images(side=64), "labels": torch.randint(0, 5, (4, 64, 64))}


@in_zoo
def hf_llava() -> Built:
    module = _model(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={**_PATCHES, "model_type": "clip_vision_model"},
        image_token_id=2,
        image_seq_length=64,
    )
    tokens = torch.cat([torch.full((4, 64), 2), words(length=16)], 1)
    return module, (), {"input_ids": tokens, "pixel_values": images(), "labels": tokens.clone()}


@in_zoo
def hf_yolos() -> Built:
    settings = {**_PATCHES, "image_size": [32, 32], "num_detection_tokens": 8}
    module = _model("YolosForObjectDetection", "YolosConfig", num_labels=5, **settings)
    return module, (), {"pixel_values": images()}


@in_zoo
def hf_dpt() -> Built:
    settings = {
        **_PATCHES,
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "fusion_hidden_size": 16,
        "neck_hidden_sizes": [16, 16, 16, 16],
        "is_hybrid": False,
        "readout_type": "project",
    }
    return _model("DPTForDepthEstimation", "DPTConfig", **settings), (), {"pixel_values": images()}


@in_zoo
def hf_clip() -> Built:
    module = _model(
        "CLIPModel",
        "CLIPConfig",
        text_config={**_TEXT, "eos_token_id": 2},
        vision_config=_PATCHES,
        projection_dim=32,
    )
    return module, (), {"input_ids": words(), "pixel_values": images(), "return_loss": True}


@in_zoo
def hf_siglip() -> Built:
    module = _model("SiglipModel", "SiglipConfig", text_config=_TEXT, vision_config=_PATCHES)
    return module, (), {"input_ids": words(length=64), "pixel_values": images(), "return_loss": True}


@in_zoo
def hf_vilt() -> Built:
    module = _model(
        "ViltForQuestionAnswering", "ViltConfig", **{**_PATCHES, **_TEXT}, num_labels=5, max_image_length=-1
    )
    inputs = {"input_ids": words(), "pixel_values": images(), "labels": torch.rand(4, 5)}
    return module, (), inputs


@in_zoo
def hf_blip() -> Built:
    text = {**_TEXT, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0}
    module = _model(
        "BlipForConditionalGeneration",
        "BlipConfig",
        text_config=text,
        vision_config=_PATCHES,
        projection_dim=32,
    )
    tokens = words()
    return module, (), {"input_ids": tokens, "pixel_values": images(), "labels": tokens.clone()}


@in_zoo
def hf_detr() -> Built:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    module = _model(
        "DetrForObjectDetection",
        "DetrConfig",
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_queries=8,
        num_labels=5,
    )
    return module, (), {"pixel_values": images(2, 64)}


@in_zoo
def hf_dinov3() -> Built:
    """Returns all states and one of them by itself; positions are shifted, scaled and jittered at random."""
    augmented = {"pos_embed_shift": 0.1, "pos_embed_jitter": 1.1, "pos_embed_rescale": 1.1}
    settings = {**_PATCHES, **augmented, "num_register_tokens": 4, "drop_path_rate": 0.1}
    return _model("DINOv3ViTModel", "DINOv3ViTConfig", **settings), (), {"pixel_values": images()}


def _of_patches(family: str, **vision: Any) -> Built:
    """Positions in three dimensions, which data decide and Python moves in place."""
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    pieces = {"patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2}
    module = _model(
        f"{family}ForConditionalGeneration",
        f"{family}Config",
        text_config={**_TEXT, "num_key_value_heads": 2, "rope_parameters": rotary},
        vision_config={"depth": 2, **vision, **pieces},
        image_token_id=3,
        video_token_id=2,
        vision_start_token_id=5,
    )
    start, image = torch.full((4, 1), 5), torch.full((4, 4), 3)
    tokens = torch.cat([start, image, words(length=12).clamp(min=6)], 1)
    inputs = {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(4 * 16, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 4),
        "mm_token_type_ids": (tokens == 3).int(),
    }
    return module, (), inputs


@in_zoo
def hf_qwen2_vl() -> Built:
    return _of_patches("Qwen2VL", embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2)


@in_zoo
def hf_qwen2_5_vl() -> Built:
    windows = {"window_size": 32, "fullatt_block_indexes": [1]}
    sizes = {"hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64}
    return _of_patches("Qwen2_5_VL", **sizes, **windows)


@in_zoo
def hf_sam() -> Built:
    """Masks of what is pointed at, by windows of patches."""
    sides = {"image_size": 64, "patch_size": 8}
    module = _model(
        "SamModel",
        "SamConfig",
        vision_config={
            **_PATCHES,
            **sides,
            "output_channels": 32,
            "window_size": 4,
            "global_attn_indexes": [1],
            "num_pos_feats": 16,
            "mlp_dim": 128,
        },
        prompt_encoder_config={**sides, "hidden_size": 32, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": 32,
            "num_attention_heads": 2,
            "mlp_dim": 64,
            "iou_head_hidden_dim": 32,
        },
    )
    points = torch.rand(2, 1, 2, 2) * 64
    asked = {"input_points": points, "input_labels": torch.ones(2, 1, 2, dtype=torch.long)}
    return module, (), {"pixel_values": images(2, 64), **asked}
