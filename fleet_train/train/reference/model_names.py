"""Which networks `--model` takes. Imports no Paddle: the command line's help lists them."""

from __future__ import annotations

# Our name -> the function in paddle.vision.models. Only networks with one output that take any image size from 32 on:
# GoogLeNet and Inception have several outputs, AlexNet is made for 224 only.
VISION_MODELS = {
    **{f"ResNet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    **{f"ResNeXt{depth}_{cut}": f"resnext{depth}_{cut}" for depth in (50, 101, 152) for cut in ("32x4d", "64x4d")},
    **{f"WideResNet{depth}_2": f"wide_resnet{depth}_2" for depth in (50, 101)},
    "MobileNetV1": "mobilenet_v1",
    "MobileNetV2": "mobilenet_v2",
    "MobileNetV3Small": "mobilenet_v3_small",
    "MobileNetV3Large": "mobilenet_v3_large",
    "ShuffleNetV2": "shufflenet_v2_x1_0",
    **{f"VGG{depth}": f"vgg{depth}" for depth in (11, 13, 16, 19)},
    **{f"DenseNet{depth}": f"densenet{depth}" for depth in (121, 161, 169, 201, 264)},
}
MODELS = ("mlp", "cnn", *VISION_MODELS)
