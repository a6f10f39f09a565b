"""Import torchvision beside a torch that its compiled part was not built for: nms and roi_align in Python.

There is no CPU build of torchvision for some CPU builds of torch. Without its compiled part the package does not even
import, since it registers fake kernels for operators that do not exist. Here these are declared, and given kernels of
plain torch where the models of the table call them.
"""

from __future__ import annotations

import importlib.util
import sys

import torch
from torch import Tensor

_DECLARATIONS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """The indices of the boxes that no better one overlaps by more than the threshold, best first."""
    left = scores.argsort(descending=True, stable=True)
    kept: list[Tensor] = []
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    while left.numel():
        best, left = left[0], left[1:]
        kept.append(best)
        low = torch.maximum(boxes[best, :2], boxes[left, :2])
        high = torch.minimum(boxes[best, 2:], boxes[left, 2:])
        common = (high - low).clamp(min=0).prod(1)
        left = left[common / (area[best] + area[left] - common) <= threshold]
    return torch.stack(kept) if kept else left


def roi_align(
    features: Tensor, rois: Tensor, scale: float, height: int, width: int, samples: int, aligned: bool
) -> Tensor:
    """Bilinear samples of each region, averaged over the cells of a grid."""
    samples = samples if samples > 0 else 2
    shift = 0.5 if aligned else 0.0
    batch, corners = rois[:, 0].long(), rois[:, 1:] * scale - shift
    sizes = corners[:, 2:] - corners[:, :2]
    sizes = sizes if aligned else sizes.clamp(min=1.0)

    def points(count: int, start: Tensor, length: Tensor) -> Tensor:
        steps = (torch.arange(count * samples, device=rois.device) + 0.5) / (count * samples)
        return start[:, None] + steps * length[:, None]

    x, y = points(width, corners[:, 0], sizes[:, 0]), points(height, corners[:, 1], sizes[:, 1])
    rows, columns = features.shape[-2:]
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=-1)
    grid = (2 * grid + 1) / grid.new_tensor([columns, rows]) - 1
    sampled = torch.nn.functional.grid_sample(features[batch], grid, padding_mode="border", align_corners=False)
    return torch.nn.functional.avg_pool2d(sampled, samples)


_declared: list[torch.library.Library] = []  # operators live as long as what declared them


def install() -> None:
    """Make torchvision importable, if its compiled part cannot be loaded."""
    if _declared or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for declaration in _DECLARATIONS:
            library.define(declaration)
        library.impl("nms", nms, "CompositeExplicitAutograd")
        library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
        _declared.append(library)
        import torchvision

        torchvision.extension._has_ops = lambda: True
