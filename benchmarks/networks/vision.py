"""Networks of torchvision and of timm, with random weights, on small images; nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import nn

from benchmarks.networks.checking import Call, Entry

_MODELS = torchvision.models
_SIDE = 64
_SIDES = {"inception_v3": 299, "maxvit_t": 224, "ssd300_vgg16": 300}
"""Of networks that take no images of 64."""


def _pictures(side: int) -> Callable[[int], Call]:
    return lambda samples: ((torch.randn(samples, 3, side, side),), {})


def _classifier(name: str) -> nn.Module:
    options: dict[str, Any] = {"image_size": _SIDE // 16 * 16} if name.startswith("vit_") else {}
    if name == "vit_h_14":
        options = {"image_size": 56}
    if name in {"googlenet", "inception_v3"}:
        options = {"init_weights": False}  # which takes minutes
    network: nn.Module = _MODELS.get_model(name, weights=None, **options)
    return network


def _segmenter(name: str) -> nn.Module:
    network: nn.Module = _MODELS.get_model(name, weights=None, weights_backbone=None, num_classes=5)
    return network


def _backbone(name: str) -> nn.Module:
    return _segmenter(name).get_submodule("backbone")


def torchvision_entries() -> dict[str, Entry]:
    """All networks that classify, all that segment, and the backbones of all that detect."""
    kinds = (
        (_MODELS, _classifier), (_MODELS.segmentation, _segmenter), (_MODELS.detection, _backbone),
    )  # fmt: skip
    found: dict[str, Entry] = {}
    for kind, build in kinds:
        for name in _MODELS.list_models(module=kind):
            side = 56 if name == "vit_h_14" else _SIDES.get(name, _SIDE)
            found[name] = Entry(partial(build, name), _pictures(side))
    return found


_CONVOLUTIONAL = [
    "convnext_atto", "convnextv2_atto", "darknet53", "densenet121", "dla34", "dpn68",
    "edgenext_xx_small", "efficientnet_b0", "ese_vovnet19b_dw", "fastvit_t8", "ghostnet_050",
    "hgnetv2_b0", "hrnet_w18_small", "inception_next_atto", "mobilenetv3_small_050",
    "mobilenetv4_conv_small", "mobileone_s0", "mobilevit_xxs", "poolformer_s12", "regnety_002",
    "repvgg_a0", "resnet18", "resnetv2_50", "seresnext26d_32x4d", "tf_efficientnetv2_b0", "vgg11",
    "xception41",
]  # fmt: skip
_SIZED = [
    "beit_base_patch16_224", "cait_xxs24_224", "deit3_small_patch16_224",
    "deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224", "mixer_s32_224", "pit_ti_224",
    "swin_tiny_patch4_window7_224", "twins_svt_small", "vit_small_patch14_reg4_dinov2",
    "vit_tiny_patch16_224", "xcit_nano_12_p16_224",
]  # fmt: skip
_OF_224 = [
    "coatnet_nano_rw_224", "davit_tiny", "efficientformer_l1", "focalnet_tiny_srf",
    "gmlp_s16_224", "hiera_tiny_224", "levit_128s", "mvitv2_tiny", "pvt_v2_b0", "tiny_vit_5m_224",
    "volo_d1_224",
]  # fmt: skip


def _of_timm(name: str, options: dict[str, Any]) -> nn.Module:
    import timm  # noqa: PLC0415 - nothing else of this benchmark needs it

    network: nn.Module = timm.create_model(name, pretrained=False, **options)
    return network


def timm_entries() -> dict[str, Entry]:
    """Fifty architectures of timm."""
    found = {name: Entry(partial(_of_timm, name, {}), _pictures(_SIDE)) for name in _CONVOLUTIONAL}
    for name in _SIZED:
        side = 56 if "patch14" in name or "window7" in name else _SIDE
        found[name] = Entry(partial(_of_timm, name, {"img_size": side}), _pictures(side))
    return found | {name: Entry(partial(_of_timm, name, {}), _pictures(224)) for name in _OF_224}
