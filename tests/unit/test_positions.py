"""Position ids of the two variants. (The draws of a run: test_trainer.py.)"""

import torch

from longspec.train.positions import anchor_offset_positions, contiguous_positions

CU = torch.tensor([0, 3, 10, 16, 24], dtype=torch.int32)  # 24 tokens as 2 rows of 12 would cut a segment: 1 x 24
SHAPE = (1, 24)


def draw(lengths: list[int], max_offset: int, longest: int, seed: int = 0) -> list[torch.Tensor]:
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(seed)
    positions = anchor_offset_positions(borders, (1, sum(lengths)), max_offset, longest, generator)
    return list(positions[0].split(lengths))


def test_contiguous_positions_restart_at_each_segment() -> None:
    assert contiguous_positions(CU, SHAPE)[0].tolist() == [*range(3), *range(7), *range(6), *range(8)]
    assert contiguous_positions(torch.tensor([0, 4, 8, 12]), (3, 4)).tolist() == [[0, 1, 2, 3]] * 3


def test_sinks_stay_and_the_rest_of_a_segment_jumps_as_one() -> None:
    seen = set()
    for seed in range(20):
        for segment in draw([9, 3, 40, 5], max_offset=500, longest=4096, seed=seed):
            assert segment[:4].tolist() == list(range(min(4, len(segment))))
            if len(segment) > 4:
                offset = int(segment[4]) - 4
                assert segment[4:].tolist() == [offset + j for j in range(4, len(segment))]
                seen.add(offset)
    assert len(seen) > 20, "packed segments must draw offsets of their own"


def test_offsets_are_uniform_from_zero_to_the_largest_inclusive() -> None:
    """With T = 6 and max_offset 10, o is uniform in 0 … 4, both ends included."""
    offsets = torch.stack([segment[4] - 4 for segment in draw([6] * 5000, 10, 4096)])
    counts = offsets.bincount()
    assert len(counts) == 5
    assert counts.min() > 880 and counts.max() < 1120  # 1000 expected, standard deviation 28


def test_offsets_leave_headroom_before_the_last_position() -> None:
    """The largest offset is min(max_offset, max_positions - 1000) - T, or 0 if that is negative."""
    longest = max(int(segment[4]) - 4 for segment in draw([8] * 2000, 15000, 1100))
    assert longest == 1100 - 1000 - 8
    assert all(int(segment[4]) == 4 for segment in draw([8] * 50, 15000, 1004))
    assert all(int(segment[4]) == 4 for segment in draw([8] * 50, 15000, 64))


def test_segments_over_1200_tokens_stay_contiguous() -> None:
    short, long = draw([1200, 1201], max_offset=30000, longest=131072, seed=3)
    assert long.tolist() == list(range(1201)) and int(short[4]) > 4
