"""Models of torchvision and timm, without weights, on small pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .case import Call, Case, Trial

_CLASSES = 5

# The side of the pictures, and what the model is made with beside the number of classes.
TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {
    "alexnet": (64, {}),
    "convnext_tiny": (32, {}),
    "deeplabv3_mobilenet_v3_large": (64, {}),
    "densenet121": (32, {}),
    "efficientnet_b0": (32, {}),
    "efficientnet_v2_s": (32, {}),
    "fcn_resnet50": (32, {}),
    "googlenet": (64, {"init_weights": False}),
    "inception_v3": (96, {"init_weights": False, "aux_logits": False}),
    "lraspp_mobilenet_v3_large": (64, {}),
    "maxvit_t": (224, {}),
    "mnasnet0_5": (32, {}),
    "mobilenet_v2": (32, {}),
    "mobilenet_v3_small": (32, {}),
    "regnet_x_400mf": (32, {}),
    "regnet_y_400mf": (32, {}),
    "resnet18": (32, {}),
    "resnet50": (32, {}),
    "resnext50_32x4d": (32, {}),
    "shufflenet_v2_x0_5": (32, {}),
    "squeezenet1_1": (64, {}),
    "swin_t": (32, {}),
    "swin_v2_t": (64, {}),
    "vgg11_bn": (32, {}),
    "vit_b_32": (32, {"image_size": 32}),
    "wide_resnet50_2": (32, {}),
}
VIDEO = ("mc3_18", "r2plus1d_18", "r3d_18")
DETECTION = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fcos_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssdlite320_mobilenet_v3_large",
)

TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "beit_base_patch16_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 2}),
    "botnet26t_256": (64, {"img_size": 64}),
    "cait_xxs24_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 2}),
    "convit_tiny": (32, {"img_size": 32, "depth": 2}),
    "convmixer_768_32": (32, {}),
    "convnext_atto": (32, {}),
    "crossvit_tiny_240": (240, {}),
    "cspresnet50": (64, {}),
    "davit_tiny": (64, {}),
    "deit_tiny_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "dla34": (32, {}),
    "edgenext_xx_small": (64, {}),
    "efficientformer_l1": (224, {}),
    "efficientnet_lite0": (32, {}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "depth": 2}),
    "fastvit_t8": (64, {}),
    "ghostnet_050": (32, {}),
    "hardcorenas_a": (32, {}),
    "hrnet_w18_small": (64, {}),
    "inception_next_atto": (64, {}),
    "lcnet_050": (32, {}),
    "levit_128s": (224, {}),
    "mambaout_femto": (64, {}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "mobilenetv3_small_050": (32, {}),
    "mobilevit_xxs": (64, {}),
    "mvitv2_tiny": (224, {}),
    "nf_resnet26": (64, {}),
    "pit_ti_224": (224, {}),
    "poolformer_s12": (64, {}),
    "pvt_v2_b0": (64, {}),
    "regnetx_002": (32, {}),
    "repvit_m0_9": (64, {}),
    "res2net50_14w_8s": (32, {}),
    "resnest14d": (64, {}),
    "resnet10t": (32, {}),
    "resnetv2_50": (32, {}),
    "rexnet_100": (32, {}),
    "sequencer2d_s": (64, {"img_size": 64}),
    "skresnet18": (32, {}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (1, 1, 1, 1)}),
    "tiny_vit_5m_224": (224, {}),
    "tnt_s_legacy_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "twins_svt_small": (64, {"img_size": 64}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "volo_d1_224": (224, {}),
    "xception41": (64, {}),
    "efficientvit_b0": (64, {}),
    "focalnet_tiny_srf": (64, {}),
    "gcvit_xxtiny": (224, {}),
    "nextvit_small": (64, {}),
    "rdnet_tiny": (64, {}),
    "shvit_s1": (64, {}),
    "starnet_s1": (64, {}),
    "swiftformer_xs": (224, {}),
    "visformer_tiny": (224, {}),
    "vovnet39a": (64, {}),
    "selecsls42": (64, {}),
    "tf_mixnet_s": (64, {}),
    "fasternet_t0": (64, {}),
    "convformer_s18": (64, {}),
    "mobilenetv4_conv_small": (64, {}),
    "regnetz_b16": (64, {}),
    "gernet_s": (64, {}),
    "ecaresnet26t": (64, {}),
    "lambda_resnet26t": (64, {}),
    "xcit_nano_12_p16_224": (32, {"img_size": 32, "depth": 2}),
}


def _pictures(side: int) -> Callable[[], Call]:
    return lambda: Call((torch.randn(2, 3, side, side),))


def _torchvision(name: str, side: int, given: dict[str, Any]) -> Callable[[], Trial]:
    def make() -> Trial:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, num_classes=_CLASSES, **given)
        return Trial(model.train(), _pictures(side))

    return make


def _segmentation(name: str, side: int) -> Callable[[], Trial]:
    return _torchvision(name, side, {"weights_backbone": None})


def _video(name: str) -> Callable[[], Trial]:
    def make() -> Trial:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, num_classes=_CLASSES)
        return Trial(model.train(), lambda: Call((torch.randn(1, 3, 16, 32, 32),)))

    return make


def _detection(name: str) -> Callable[[], Trial]:
    def make() -> Trial:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=_CLASSES)
        boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0]])

        def inputs() -> Call:
            targets = [{"boxes": boxes.clone(), "labels": torch.tensor([1])} for _ in range(2)]
            return Call(([torch.rand(3, 64, 64) for _ in range(2)], targets))

        return Trial(model.train(), inputs)

    return make


def _timm(name: str, side: int, given: dict[str, Any]) -> Callable[[], Trial]:
    def make() -> Trial:
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=_CLASSES, **given)
        return Trial(model.train(), _pictures(side))

    return make


def torchvision_cases() -> Iterator[Case]:
    """The models of torchvision in the table; those that detect read their data."""
    for name, (side, given) in TORCHVISION.items():
        segments = name.startswith(("deeplab", "fcn", "lraspp"))
        yield Case("torchvision", name, _segmentation(name, side) if segments else _torchvision(name, side, given))
    yield from (Case("torchvision", name, _video(name)) for name in VIDEO)
    yield from (Case("torchvision", name, _detection(name)) for name in DETECTION)


def timm_cases() -> Iterator[Case]:
    """The models of timm in the table."""
    yield from (Case("timm", name, _timm(name, side, given)) for name, (side, given) in TIMM.items())
