"""The fused passes against transformers' modules on the same parameters, and compilation ahead of the first round."""

import itertools
import signal
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_devices import INTERPRETED
from pairs import GLIDE, OPTIONS, make_pair, spread, target_greedy
from shared_target_run import InterpretedBackend
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

pytest.importorskip("triton")

from longspec.inference.engine.batch import Batch
from longspec.inference.engine.capture import compile_ahead
from longspec.inference.engine.rounds import KINDS, Mode
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.fused_runner import FusedRunner, make_runner
from longspec.inference.generate import generate
from longspec.inference.methods import METHODS, Drafting, make_drafter
from longspec.inference.runner import Runner, model_backend
from longspec.inference.sampling import GREEDY
from longspec.kernels.backend import Backend
from longspec.kernels.native.backend import NativeBackend
from longspec.kernels.triton import compile_ahead as module
from longspec.kernels.triton.attention import TritonAttention
from longspec.kernels.triton.backend import TritonBackend
from longspec.models.fused import can_fuse
from longspec.models.glide import GlideMixin

TREE = Drafting("tree", (2, 4, 3), tree_rule="descend")
LAYOUTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4, "head_dim": 16},
    "mqa": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 20},
    "extended": {"options": OPTIONS["both"]},
    "listed": {},
}
CASES = [("llama", "mqa"), ("llama", "listed"), ("qwen2", "extended"), ("qwen3", "gqa")]
BACKENDS: dict[str, type[Backend]] = {
    "triton": TritonBackend if torch.cuda.is_available() else InterpretedBackend,
    "native": NativeBackend,
    "torch": Backend,
}


def random_pair(folder: Path, family: str, **overrides: Any) -> GlideMixin:
    """Biases and norms too are random."""
    model = make_pair(folder, family, initializer_range=0.1, **overrides)
    spread(model)
    return model.eval()


def passes(runner: Runner, prompts: Tensor, lengths: list[int], rounds: int, drafting: Drafting) -> list[Tensor]:
    """Everything that prefill and some rounds leave behind: tokens, logits of a verification, the caches."""
    drafter = make_drafter(drafting, runner, len(prompts), GREEDY)
    engine = StaticBatch(runner, drafter, GREEDY, prompts, lengths, max_new_tokens=20)
    found = [engine.prefill()]
    for _ in range(rounds):
        found += engine.round(torch.ones(len(prompts), dtype=torch.bool, device=prompts.device))[:2]
    found.append(runner.logits(engine.forward_tree(drafter.propose(engine.root, engine.cache), engine.cache)))
    used = slice(0, int(engine.cache.lengths.max()))
    found += [engine.cache.newest_hidden, engine.cache.keys[..., used, :], engine.cache.values[..., used, :]]
    return found + drafter.row_states()[:2]


def compare(
    model: GlideMixin, backend: Backend, prompts: Tensor, lengths: list[int], rounds: int, drafting: Drafting
) -> None:
    plain, fused = (passes(r, prompts, lengths, rounds, drafting) for r in (Runner(model), FusedRunner(model, backend)))
    for want, got in zip(plain, fused, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "layout", "backend"),
    [("mistral", "mha", "torch"), *((*case, "torch") for case in CASES)]
    + [(*case, "triton") for case in (CASES if torch.cuda.is_available() else CASES[1:3])]
    + [pytest.param(*case, "native", marks=pytest.mark.gcc) for case in CASES],
)
@torch.no_grad()
def test_fused_passes_equal_transformers_modules(
    tmp_path: Path, family: str, layout: str, device: str, backend: str
) -> None:
    if backend == "native" and device != "cpu":
        pytest.skip("for a CPU")
    model = random_pair(tmp_path, family, **LAYOUTS[layout]).to(device)
    model.draft_model.window = 8  # the window wraps around, and the interpreter is slow
    lengths = [9, 4]
    prompts = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
    if layout == "listed":
        # A single row has the list and its own tokens in one product.
        lengths, prompts = lengths[:1], prompts[:1]
        model.draft_model.set_vocabulary(torch.tensor([3, 4, 9, 20, 33, 60]))
    compare(model, BACKENDS[backend](model_backend(model).attention), prompts, lengths, 1, TREE)


@torch.no_grad()
def test_a_pass_of_one_token_attends_from_the_projection(tmp_path: Path, device: str) -> None:
    """A ragged batch: tokens, hidden states and keys and values of vanilla rounds equal those of transformers."""
    model = random_pair(tmp_path, "qwen3").to(device)
    prompts = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
    compare(model, BACKENDS["triton"](TritonAttention()), prompts, [9, 4], 3, Drafting("vanilla"))


def test_merging_changes_no_parameter_and_happens_once(tmp_path: Path) -> None:
    """Also in inference mode, after which the model can be trained."""
    model = random_pair(tmp_path, "qwen2", options=OPTIONS["both"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        make_runner(model, "auto", compiled=True)
    storages = {name: value.data_ptr() for name, value in model.state_dict().items()}
    FusedRunner(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {name: value.data_ptr() for name, value in after.items()} == storages
    assert not any(parameter.is_inference() for parameter in model.parameters())


@pytest.mark.gcc
def test_decoding_on_a_cpu_is_fused_unless_told_otherwise(tmp_path: Path, model: GlideMixin) -> None:
    fused = make_runner(model, "auto", compiled=True)
    assert isinstance(fused, FusedRunner) and fused.backend.name == "native" and not fused.capturable
    bfloat = make_runner(make_pair(tmp_path, dtype=torch.bfloat16), "auto", compiled=True)
    assert isinstance(bfloat, FusedRunner) and bfloat.backend.name == "torch"
    assert type(make_runner(model, "auto", compiled=False)) is Runner
    model.model.register_forward_hook(lambda *_: None)
    assert type(make_runner(model, "auto", compiled=True)) is Runner


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_hidden_states_are_normalized(dtype: torch.dtype) -> None:
    """The sum of their squares does not fit into float16."""
    hidden, weight = torch.full((1, 3, 576), 20.0, dtype=dtype), torch.ones(576, dtype=dtype)
    torch.testing.assert_close(Backend.stream(hidden, 1e-5).normed(weight), torch.ones_like(hidden))


def test_a_draft_layer_with_its_own_forward_is_decoded_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two tokens that a round drafts is a pass of it, and the target's tokens come out."""
    family, passes = "qwen2", []

    class Own(GLIDE[family].draft_layer_class):  # type: ignore[misc, name-defined]
        def forward(self, embeddings: Tensor, *args: Any) -> Tensor:
            passes.append(embeddings.shape)
            return 0.5 * super().forward(embeddings, *args)

    monkeypatch.setattr(GLIDE[family], "draft_layer_class", Own)
    model, prompt = make_pair(tmp_path, family), torch.tensor([[5, 6, 7]])
    out = generate(model, prompt, method="seq", gamma=2, max_new_tokens=6, temperature=0.0)
    assert len(passes) == 2 * out.stats.rounds > 0
    assert out.sequences[0, 3:].tolist() == target_greedy(model, prompt[0], 6)


def test_what_cannot_be_fused_is_told(tmp_path: Path) -> None:
    """What a fused pass would drop without a word: another module, a hook, a dtype, a piece of a flat buffer."""
    untouched = make_pair(tmp_path, options=OPTIONS["both"])
    assert can_fuse(untouched)
    adapted = type("Adapted", (torch.nn.Linear,), {})

    def changed(change: Callable[[Any], object]) -> bool:
        model = deepcopy(untouched)
        change(model)
        return can_fuse(model)

    def flatten(model: Any) -> None:
        flat = torch.cat([x.data.flatten() for x in (model.draft_model.mlp.up_proj.weight,) * 2])
        model.draft_model.mlp.up_proj.weight.data = flat[: 48 * 32].view(48, 32)

    def subclass(module: Any, method: str = "forward") -> None:
        own = {method: lambda *_: None}
        module.__class__ = type("Own", (type(module),), own)

    for change in (
        lambda m: setattr(m.model.layers[0].self_attn, "q_norm", torch.nn.LayerNorm(8)),
        lambda m: setattr(m.model.layers[1].mlp, "act_fn", torch.nn.GELU()),
        lambda m: setattr(m.model.layers[2].self_attn, "o_proj", torch.nn.Linear(32, 32, bias=True)),
        lambda m: setattr(m.model.layers[0].mlp, "up_proj", adapted(32, 48, bias=False)),
        lambda m: m.draft_model.cross_attn.q_proj.half(),
        lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.t().contiguous().t()),
        lambda m: setattr(m.draft_model.self_attn.k_proj, "bias", None),
        lambda m: m.draft_model.feature_proj.register_forward_hook(lambda *_: None),
        lambda m: m.model.layers[1].register_forward_hook(lambda *_: None),
        lambda m: setattr(m, "lm_head", torch.nn.Sequential(m.lm_head)),
        lambda m: setattr(m.model.layers[0].mlp, "forward", m.model.layers[0].mlp.forward),
        lambda m: subclass(m, "embed"),
        flatten,
    ):
        assert not changed(change)
    for name in ("model", "model.norm", "model.layers.1", "model.layers.0.self_attn", "draft_model.mlp"):
        assert not changed(lambda m, name=name: subclass(m.get_submodule(name)))
    for method in ("forward", "keys_values", "feature"):
        assert not changed(lambda m, method=method: subclass(m.draft_model, method))
    assert changed(lambda m: subclass(m.draft_model, "reset_parameters")), "decoding does not run it"
    assert changed(lambda m: m(torch.tensor([[1, 2]]), output_hidden_states=True)), "transformers' own hooks"
    assert changed(lambda m: FusedRunner(m)), "merged once, it can be merged again"


@INTERPRETED
@pytest.mark.parametrize(
    ("method", "rule"), [*((method, "reject") for method in (*METHODS, "auto")), ("tree", "descend")]
)
def test_a_round_without_kernels_uses_valid_indices_and_changes_nothing(
    model: GlideMixin, monkeypatch: pytest.MonkeyPatch, method: str, rule: str
) -> None:
    launches = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda kernel, *args, **settings: launches.append(kernel))
    runner = FusedRunner(model, TritonBackend(TritonAttention()))
    runner.prepare(256)
    batch = Batch(runner, Drafting(method, (4, 16, 16), 4, rule, None, method == "tree"), 2, 200)
    draft = [x for x in batch.drafter.row_states() if x.is_floating_point()]
    for x in draft:  # as if requests ran: a mode can be new to a batch that decodes
        x.fill_(0.5)
    for kind, plan in itertools.product(KINDS, batch.plans or (None,)):
        engine = batch.state(Mode(True, kind, plan), slice(0, 2))
        # What earlier rounds have left in tensors that torch does not clear.
        before: dict[str, Any] = {name: x.clone() for name, x in vars(engine.cache).items() if torch.is_tensor(x)}
        compile_ahead([engine])
        for name, x in before.items():
            assert torch.equal(getattr(engine.cache, name), x), name
    assert launches
    for x in draft:
        assert (x == 0.5).all()


def test_calls_that_fail_or_hang_do_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 1.0)

    def fail() -> None:
        raise ValueError

    module._run_in_forks([fail, signal.pause, (tmp_path / "first").touch, (tmp_path / "second").touch], 2)
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}
