"""A grid of images with what a network takes them for."""

from matplotlib.figure import Figure
from torch import Tensor

from ..data.spec import DataSpec

_COLUMNS = 8
_BLUE, _ORANGE = "#0072B2", "#D55E00"  # told apart by everybody (Okabe & Ito 2008)


def draw_grid(images: Tensor, titles: list[str], right: list[bool], spec: DataSpec) -> Figure:
    """One small picture an image, with its title in blue; in orange where the answer is wrong.

    Args:
        images: `(N, C, H, W)`, as the network reads them.
        titles: of each image.
        right: whether each answer is right, as far as anybody knows.
        spec: with the mean and the standard deviation that the images were normalised by.
    """
    columns = min(_COLUMNS, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.25 * columns, 1.6 * rows), layout="constrained", dpi=120)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, image, title, is_right in zip(panels, images, titles, right, strict=False):
        axes.imshow(as_pixels(image, spec).numpy(), cmap="gray", interpolation="nearest")
        axes.set_title(title, fontsize=8, color=_ORANGE if not is_right else _BLUE)
    for axes in panels:
        axes.set_axis_off()
    return figure


def as_pixels(image: Tensor, spec: DataSpec) -> Tensor:
    """An image `(C, H, W)` as matplotlib draws it: `(H, W)`, or `(H, W, 3)` from 0 to 1."""
    if spec.mean:
        mean, std = (image.new_tensor(values).view(-1, 1, 1) for values in (spec.mean, spec.std))
        image = image * std + mean
    return image.permute(1, 2, 0).clamp(0, 1) if image.shape[0] == 3 else image[0]
