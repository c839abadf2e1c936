"""The DeepSpeed engine of a pair: optimizer, learning rate and precision."""

import gc
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn
from transformers.integrations import HfDeepSpeedConfig

from longspec.errors import UserError
from longspec.kernels.choice import backend_of
from longspec.kernels.training import varlen_flash
from longspec.models.draft_files import DRAFT_PREFIX, draft_settings
from longspec.models.draft_layer import head_dim
from longspec.models.families import pair_class
from longspec.models.parallel import model_parallel_rank_and_size
from longspec.models.target_graph import TargetGraphs
from longspec.models.target_sample import sampled_weight, take_sample, warn_if_other_target
from longspec.train.config_schema import TrainConfig
from longspec.train.distributed import ReplicatedDraft, keep_drafts_equal
from longspec.train.inputs import check_list_split

MUON_MOMENTUM = 0.95


def cosine_with_warmup(total_steps: int, warmup_ratio: float) -> Callable[[int], float]:
    """The factor of the learning rate in steps 0 … `total_steps` - 1: a linear warm-up to 1, then half a cosine.

    The warm-up takes ceil(total_steps · warmup_ratio) steps. The factor is positive in every step.
    """
    warmup = math.ceil(total_steps * warmup_ratio)

    def factor(step: int) -> float:
        # Positive from the first step on, which would otherwise be lost.
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def engine_config(config: TrainConfig) -> dict[str, Any]:
    """DeepSpeed's configuration: the `deepspeed` section, and values derived from the other keys."""
    offload = config.deepspeed.zero_optimization.get("offload_optimizer") is not None
    optimizer: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.adam_betas,
        # Muon's groups get their own decay in `build_engine`.
        "weight_decay": config.weight_decay,
        # DeepSpeedCPUAdam steps offloaded states.
        "torch_adam": not offload,
    }
    if config.optimizer == "muon":
        optimizer |= {"momentum": MUON_MOMENTUM, "ns_method": "standard"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": config.max_grad_norm,
        "optimizer": {"type": {"adamw": "AdamW", "muon": "Muon"}[config.optimizer], "params": optimizer},
        "zero_optimization": config.deepspeed.zero_optimization,
        "zero_force_ds_cpu_optimizer": offload,
    }
    if config.model.torch_dtype == "bfloat16":
        # A bf16 sum over 128 micro-batches would lose small gradients.
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return settings


def build_pair(config: TrainConfig, draft: dict[str, Tensor] | None, vocabulary: Tensor | None = None) -> nn.Module:
    """The target with the weights `draft`, or with a fresh draft that is the same on all ranks.

    vocabulary: the list of a fresh draft, LongTensor [Vd]; None for the whole vocabulary. Raises UserError if target or
    draft cannot be loaded, or if the list cannot be split over the ranks that share a target.
    """
    # A fresh draft is drawn from this seed.
    torch.manual_seed(config.seed)
    load = pair_class(config.model._target_).from_pretrained
    with built_in_shards(config):
        pair: Any = load(config.model_name_or_path, state_dict=draft, **config.model.arguments)
    if frozen := [name for name, weight in pair.draft_model.named_parameters() if not weight.requires_grad]:
        # The optimizer's state, from which a run resumes, has only what trains.
        raise UserError(f"the draft has {frozen[0]}, which does not train and would be lost; train a draft without it")
    if vocabulary is not None:
        pair.draft_model.set_vocabulary(vocabulary)
    if pair.draft_model.vocabulary is not None:
        check_list_split(pair.draft_model.vocabulary, pair.config.vocab_size, config.tp_size)
    with deepspeed.zero.GatheredParameters(sampled_weight(pair)):
        pair.draft_target = take_sample(pair, config.model_name_or_path)
    if (source := config.draft_model_name_or_path) is not None:
        warn_if_other_target(draft_settings(source).target, pair.draft_target, source)
    return pair


@contextmanager
def built_in_shards(config: TrainConfig) -> Iterator[None]:
    """Under ZeRO-3, build targets in shards: no rank holds all weights. Tensor parallelism splits them before."""
    sharded = config.deepspeed.zero_optimization["stage"] == 3 and config.tp_size == 1
    # Transformers keeps a weak reference to this object and builds in shards as long as it exists.
    setting = HfDeepSpeedConfig(engine_config(config)) if sharded else None
    try:
        yield
    finally:
        del setting


def build_engine(config: TrainConfig, model: Any) -> deepspeed.DeepSpeedEngine:
    """The engine of a pair, which trains the draft only. Of ranks that share a target, the first writes checkpoints."""
    deepspeed_logger.setLevel(logging.WARNING)
    tp_rank, tp_size = model_parallel_rank_and_size()
    if tp_size > 1:
        keep_drafts_equal(model.draft_model)

    gc.freeze()  # DeepSpeed collects garbage several times, which is slow among the objects that imports have left
    try:
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            config=engine_config(config),
            mpu=ReplicatedDraft() if tp_size > 1 else None,
        )
    finally:
        gc.unfreeze()

    if config.optimizer == "muon":
        # DeepSpeed would compile Muon's update, which takes longer than a short run.
        engine.step = torch.compiler.set_stance("force_eager")(engine.step)
    for group in engine.optimizer.param_groups:
        # One configured rate for both optimizers; Muon's updates have another norm.
        group["rate_scale"] = muon_scale(model.config.hidden_size) if group.get("use_muon") else 1.0
        # The optimizer multiplies the decay by the scaled rate.
        group["weight_decay"] = config.weight_decay / group["rate_scale"]

    # The frozen target stays out of checkpoints.
    engine.module.register_state_dict_post_hook(_keep_draft)
    if tp_rank > 0:
        engine.save_non_zero_checkpoint = engine.save_zero_checkpoint = False

    _restore_rotary(engine.module.model)
    _use_kernels(engine.module, whole_target=config.deepspeed.zero_optimization["stage"] < 3 and tp_size == 1)
    return engine


def _use_kernels(module: Any, whole_target: bool) -> None:
    """Run the target with Triton kernels where they run, and as CUDA graphs if this rank holds the `whole_target`."""
    weight = next(module.model.parameters())
    if backend_of(weight.device, weight.dtype).name != "triton":
        return
    from longspec.models.target_kernels import use_kernels

    use_kernels(module.model, module.draft_layer_class)
    weight = module.lm_head.weight
    # A graph has fixed addresses, so it cannot read gathered weights, and its attention must read segment borders on
    # the device.
    if whole_target and varlen_flash.runs(weight.device, weight.dtype, head_dim(module.config)):
        layer_weights = sum(weight.numel() for weight in module.model.layers[0].parameters())
        module.target_pass = TargetGraphs(module.run_target, layer_weights)


def _restore_rotary(target: Any) -> None:
    """Recompute the rotary frequencies in fp32. Cast to bf16 they would shift distant positions.

    Some versions of transformers cast them when ZeRO-3 builds the target in shards, and old versions of DeepSpeed cast
    all buffers.
    """
    # At position 100k, the rounding of bf16 exceeds a full turn of the fast frequencies.
    rotary = target.rotary_emb
    fresh = type(rotary)(target.config).to(rotary.inv_freq.device)
    for name, frequencies in fresh.named_buffers():
        setattr(rotary, name, frequencies)


def _keep_draft(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    """Remove the target from a state dict, in place; DeepSpeed's option misses the second name of tied embeddings."""
    for name in [name for name in state if not name.startswith(DRAFT_PREFIX)]:
        del state[name]


def muon_scale(hidden_size: int) -> float:
    """Muon's learning rate as a multiple of AdamW's, such that both change a matrix by the same amount.

    0.2 · sqrt(hidden_size), arXiv 2502.16982, equation 4. DeepSpeed's update already has the further factor for tall
    matrices. A matrix with more than `hidden_size` columns changes less, by sqrt(hidden_size / columns).
    """
    return 0.2 * math.sqrt(hidden_size)


def set_learning_rate(engine: Any, learning_rate: float) -> None:
    """Set the rate of the next step. Checkpoints then need no schedule, and a resumed run may have another length."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate * group["rate_scale"]
