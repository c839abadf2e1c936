"""Floors of the benchmarks compared with figures computed by hand, and the plot of a round."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib import pyplot

from benchmarks.ceilings import Ceilings
from benchmarks.floors import draft_weights, layer_weights, round_floor_ms
from benchmarks.picture import draw_rounds
from benchmarks.shapes import LLAMA3_8B

CEILINGS = Ceilings(read_bytes_per_s=4.57e12, copy_bytes_per_s=4.27e12, matmul_flops_per_s=680e12)
TREE = (4, 16, 16, 16, 16)


def test_weights_are_those_of_the_published_shape() -> None:
    """Llama-3-8B has 8.03 billion weights; embedding and lm_head have 0.53 billion each."""
    assert 32 * layer_weights(LLAMA3_8B) == pytest.approx(8.03e9 - 2 * 128256 * 4096, rel=1e-3)
    assert draft_weights(LLAMA3_8B) - layer_weights(LLAMA3_8B) == 2 * 4096 * 4096


@pytest.mark.parametrize(("context", "vanilla", "tree"), [(4096, 3.4, 5.2), (32768, 4.2, 6.9), (131072, 7.0, 12.5)])
def test_floors_of_a_step_and_a_round(context: int, vanilla: float, tree: float) -> None:
    """15.0 GB of weights and 0.13 MB of KV per token. At long contexts, arithmetic bounds a verification."""
    assert round_floor_ms(LLAMA3_8B, CEILINGS, [context], (), "glide") == pytest.approx(vanilla, abs=0.05)
    assert round_floor_ms(LLAMA3_8B, CEILINGS, [context], TREE, "glide") == pytest.approx(tree, abs=0.05)


def test_a_node_budget_lowers_the_floor_where_arithmetic_sets_it() -> None:
    whole = round_floor_ms(LLAMA3_8B, CEILINGS, [131072], TREE, "glide")
    assert round_floor_ms(LLAMA3_8B, CEILINGS, [131072], TREE, "glide", verified=69) == whole
    assert round_floor_ms(LLAMA3_8B, CEILINGS, [131072], TREE, "glide", verified=32) < 0.8 * whole


def test_a_list_saves_its_share_of_the_head_at_each_of_five_levels() -> None:
    whole, listed = (round_floor_ms(LLAMA3_8B, CEILINGS, [4096], TREE, "glide", columns=rows) for rows in (None, 32768))
    assert whole - listed == pytest.approx(5 * (128256 - 32768) * 4096 * 2 / 4.57e12 * 1e3)


def test_rows_share_the_weights_but_not_their_keys() -> None:
    one, two = (round_floor_ms(LLAMA3_8B, CEILINGS, [32768] * rows, (), "glide") for rows in (1, 2))
    keys = 2 * 2 * 8 * 128 * 32768 * 32 / 4.57e12 * 1e3
    assert two - one == pytest.approx(keys)


def test_two_ranks_read_half_of_everything_but_a_list_of_the_draft() -> None:
    for widths in ((), TREE):
        one, two = (round_floor_ms(LLAMA3_8B, CEILINGS, [32768], widths, "glide", ranks=ranks) for ranks in (1, 2))
        assert two == pytest.approx(one / 2)
    listed = [
        round_floor_ms(LLAMA3_8B, CEILINGS, [4096], TREE, "glide", columns=32768, ranks=ranks) for ranks in (1, 2)
    ]
    assert 2 * listed[1] - listed[0] == pytest.approx(5 * 32768 * 4096 * 2 / 4.57e12 * 1e3)


def test_who_drafts_decides_what_a_chain_costs() -> None:
    floors = {
        who: round_floor_ms(LLAMA3_8B, CEILINGS, [131072], (1,) * 4, who) for who in ("nothing", "glide", "target")
    }
    assert floors["nothing"] < floors["glide"] < floors["target"]


def test_a_negative_part_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"verify rest": 0.9, "accept + compact": -0.1}
    row = SimpleNamespace(shape="llama", context=2048, batch=1, floor_ms=0.2, parts=parts)
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    draw_rounds([row], tmp_path / "round.png")
    monkeypatch.undo()
    (axes,) = figures[0].axes
    assert [(bar.get_y(), bar.get_height()) for bar in axes.patches] == [(0, 0.9), (0.9, 0)]
    pyplot.close(figures[0])
