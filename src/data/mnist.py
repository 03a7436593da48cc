"""MNIST and Fashion-MNIST as images; the files of both have the same names."""

from torchvision import datasets

from .torchvision_images import TorchvisionImages

_FILES = {  # file name → md5 of MNIST's file
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


class MNIST(TorchvisionImages):
    """Handwritten digits (LeCun et al. 1998): 55,000 / 5,000 / 10,000 images `(1, 28, 28)`. Arguments as base class."""

    torchvision_name = "mnist"
    source = datasets.MNIST
    files = {f"MNIST/raw/{name}": md5 for name, md5 in _FILES.items()}
    image_shape = (1, 28, 28)
    mean, std = (0.1307,), (0.3081,)


class FashionMNIST(TorchvisionImages):
    """Articles of clothing (Xiao et al. 2017) in MNIST's format. Arguments as base class.

    torchvision verifies the downloaded archives. Of the unpacked files, only the range of the labels is verified.
    """

    torchvision_name = "fashion-mnist"
    source = datasets.FashionMNIST
    files = {f"FashionMNIST/raw/{name}": None for name in _FILES}
    image_shape = (1, 28, 28)
    mean, std = (0.2860,), (0.3530,)
