"""Operations of the backends have one interface, so that the tests of one hold for all."""

import inspect
from collections.abc import Callable

import pytest

pytest.importorskip("triton")

from longspec.kernels.backend import Backend
from longspec.kernels.native.backend import NativeAttention, NativeBackend
from longspec.kernels.torch.attention import DecodingAttention
from longspec.kernels.torch.layers import ResidualStream
from longspec.kernels.triton.backend import TritonBackend
from longspec.kernels.triton.deterministic import DeterministicAttention, DeterministicBackend, DeterministicStream
from longspec.kernels.triton.flash_attention import FlashAttention
from longspec.kernels.triton.layers import TritonStream

IMPLEMENTATIONS = [
    *((Backend, backend) for backend in (TritonBackend, NativeBackend, DeterministicBackend)),
    *((DecodingAttention, attention) for attention in (FlashAttention, DeterministicAttention, NativeAttention)),
    *((ResidualStream, stream) for stream in (TritonStream, DeterministicStream)),
]


def signature(owner: type, name: str) -> list[tuple[object, ...]]:
    """Name, kind and default of each parameter; annotations may be strings in one module and types in the other."""
    function: Callable[..., object] = getattr(owner, name)
    parameters = list(inspect.signature(function).parameters.values())
    if isinstance(inspect.getattr_static(owner, name), staticmethod) or inspect.isclass(function):
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters[1:]]


@pytest.mark.parametrize(("interface", "implementation"), IMPLEMENTATIONS)
def test_each_operation_has_the_signature_of_torchs(interface: type, implementation: type) -> None:
    operations = [name for name, member in vars(interface).items() if callable(member) and name[0] != "_"]
    assert operations
    for name in operations:
        assert signature(implementation, name) == signature(interface, name), name
