"""Image models of timm."""

from typing import Any

from tests.zoo import Built, images, in_zoo_as, torchvision_shim


def _timm(name: str, model: str, side: int = 64, batch: int = 2, **settings: Any) -> None:
    def build() -> Built:
        torchvision_shim.install()
        import timm

        return (
            timm.create_model(model, pretrained=False, num_classes=10, **settings),
            (images(batch, side),),
            {},
        )

    in_zoo_as(name, build)


_timm("timm_vit", "vit_tiny_patch16_224", img_size=64, depth=3, drop_path_rate=0.1)
_timm("timm_deit3", "deit3_small_patch16_224", img_size=64, depth=2, drop_path_rate=0.1)
_timm("timm_cait", "cait_xxs24_224", img_size=64, depth=2)
_timm("timm_eva02", "eva02_tiny_patch14_224", 56, img_size=56, depth=2)
_timm("timm_beitv2", "beitv2_base_patch16_224", img_size=64, depth=2, embed_dim=96, num_heads=4)
_timm(
    "timm_swin",
    "swin_tiny_patch4_window7_224",
    56,
    img_size=56,
    embed_dim=24,
    depths=(1, 1),
    num_heads=(2, 4),
)
_timm("timm_mixer", "mixer_s16_224", img_size=64)
_timm("timm_gmlp", "gmlp_s16_224", img_size=64)
_timm("timm_resmlp", "resmlp_12_224", img_size=64)
_timm("timm_xcit", "xcit_nano_12_p16_224", img_size=64, depth=2)
_timm("timm_coat", "coat_tiny", img_size=64)
_timm("timm_maxvit", "maxvit_pico_rw_256", img_size=64)
_timm("timm_efficientformer", "efficientformer_l1", 224, 1)
_timm("timm_resnet18", "resnet18")
_timm("timm_resnetv2", "resnetv2_50")
_timm("timm_resnext", "resnext50_32x4d")
_timm("timm_seresnet", "seresnet18")
_timm("timm_densenet", "densenet121")
_timm("timm_vgg", "vgg11_bn")
_timm("timm_inception", "inception_v3", 96)
_timm("timm_efficientnetv2", "tf_efficientnetv2_b0", drop_path_rate=0.2, drop_rate=0.2)
_timm("timm_mobilenetv4", "mobilenetv4_conv_small")
_timm("timm_ghostnet", "ghostnet_050")
_timm("timm_regnet", "regnety_002")
_timm("timm_convnext", "convnext_atto", drop_path_rate=0.1)
_timm("timm_hrnet", "hrnet_w18_small")
_timm("timm_nfnet", "nf_resnet26")
_timm("timm_dla", "dla34")
_timm("timm_mvitv2", "mvitv2_tiny", img_size=64)
_timm("timm_hiera", "hiera_tiny_224", img_size=64)
_timm("timm_swinv2_cr", "swinv2_cr_tiny_224", img_size=64, depths=(1, 1, 1, 1))
_timm("timm_resnest", "resnest14d")
_timm("timm_gcvit", "gcvit_xxtiny", img_size=64)
_timm("timm_convit", "convit_tiny", img_size=64, depth=2)
_timm("timm_levit", "levit_128s", img_size=64, drop_path_rate=0.1)
_timm("timm_pit", "pit_ti_224", img_size=64, drop_path_rate=0.1)
_timm("timm_efficientvim", "efficientvim_m1", drop_path_rate=0.1)
_timm("timm_mambaout", "mambaout_femto", drop_path_rate=0.1)
_timm("timm_inception_next", "inception_next_atto", drop_path_rate=0.1)
_timm("timm_starnet", "starnet_s050", drop_path_rate=0.1)
_timm("timm_fasternet", "fasternet_t0", drop_path_rate=0.1)
_timm("timm_edgenext", "edgenext_xx_small", drop_path_rate=0.1)
_timm("timm_sequencer", "sequencer2d_s", img_size=64, layers=(1, 1, 1, 1), drop_path_rate=0.1)
_timm("timm_crossvit", "crossvit_tiny_240", drop_path_rate=0.1)
_timm("timm_volo", "volo_d1_224", img_size=64)
