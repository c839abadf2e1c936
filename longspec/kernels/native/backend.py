"""The backend of a CPU in float32."""

from longspec.kernels.native import layers
from longspec.kernels.torch.backend import TorchBackend


class NativeBackend(TorchBackend):
    """Layers on compiled functions, all else on torch."""

    name = "native"

    linear = staticmethod(layers.linear)
    stream = staticmethod(layers.stream)
