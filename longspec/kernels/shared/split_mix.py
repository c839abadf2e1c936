"""Constants of SplitMix64, the generator of `row_noise`."""

GAMMA = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB


def stream_offset(stream: int) -> int:
    """(stream + 1) * GAMMA as an int64."""
    return signed((stream + 1) * GAMMA % 2**64)


def signed(x: int) -> int:
    """The int64 with the bits of an unsigned x."""
    return x - 2**64 if x >= 2**63 else x
