"""CIFAR-10: 32×32 colour photographs in ten classes."""

from torchvision import datasets

from .torchvision_images import TorchvisionImages

_LISTS = [*datasets.CIFAR10.train_list, *datasets.CIFAR10.test_list]


class CIFAR10(TorchvisionImages):
    """Krizhevsky (2009): 45,000 / 5,000 / 10,000 images `(3, 32, 32)`. Arguments as base class."""

    torchvision_name = "cifar10"
    source = datasets.CIFAR10
    files = {
        f"{datasets.CIFAR10.base_folder}/{name}": md5
        for name, md5 in [*_LISTS, (datasets.CIFAR10.meta["filename"], datasets.CIFAR10.meta["md5"])]
    }
    image_shape = (3, 32, 32)
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
