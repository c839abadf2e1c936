"""The DeepSpeed engine around a pair: optimizer, learning rate, precision."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import hydra
import torch
from deepspeed.utils import logger as deepspeed_logger
from hydra.errors import InstantiationException
from torch import Tensor, nn
from transformers.integrations import HfDeepSpeedConfig

from longspec.errors import UserError
from longspec.kernels.shared.device import runs_triton
from longspec.kernels.training import varlen_flash
from longspec.models.draft_files import DRAFT_PREFIX
from longspec.models.draft_layer import head_dim
from longspec.models.parallel import model_parallel_place
from longspec.models.target_graph import TargetGraphs
from longspec.train.config import TrainConfig
from longspec.train.distributed import ReplicatedDraft, keep_drafts_equal

MUON_MOMENTUM = 0.95


def cosine_with_warmup(total_steps: int, warmup_ratio: float) -> Callable[[int], float]:
    """The factor on the learning rate of step 0, 1, … `total_steps` - 1: a linear rise to 1, then half a cosine.

    The rise takes ceil(total_steps · warmup_ratio) steps, and no step has a learning rate of 0.
    """
    warmup = math.ceil(total_steps * warmup_ratio)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def engine_config(config: TrainConfig) -> dict[str, Any]:
    """DeepSpeed's configuration: our `deepspeed` section, and what follows from the other keys."""
    offload = config.deepspeed.zero_optimization.get("offload_optimizer") is not None
    optimizer: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.adam_betas,
        "weight_decay": config.weight_decay,
        "torch_adam": not offload,  # offloaded states are stepped by DeepSpeedCPUAdam
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
        # Over 128 micro-batches a sum in bf16 loses the small gradients.
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return settings


def build_pair(config: TrainConfig, draft: dict[str, Tensor] | None) -> nn.Module:
    """The target with `draft`, or with a fresh one that is the same on all ranks. Raises the pair's own UserErrors."""
    torch.manual_seed(config.seed)
    try:
        with built_in_shards(config):
            return hydra.utils.call(config.model, config.model_name_or_path, state_dict=draft)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


@contextmanager
def built_in_shards(config: TrainConfig) -> Iterator[None]:
    """Under ZeRO-3 targets are built in shards here: rank 0 reads the weights, and no rank ever holds them all.

    Not where ranks share a target, of which each reads its own part, to shard it afterwards.
    """
    sharded = config.deepspeed.zero_optimization["stage"] == 3 and config.tp_size == 1
    setting = HfDeepSpeedConfig(engine_config(config)) if sharded else None  # heeded by transformers while it lives
    try:
        yield
    finally:
        del setting


def build_engine(config: TrainConfig, model: Any) -> deepspeed.DeepSpeedEngine:
    """The engine; its optimizer holds the draft's parameters alone. It has no schedule: see `set_learning_rate`.

    Of the ranks that share a target only the first one's engine writes checkpoints.
    """
    deepspeed_logger.setLevel(logging.WARNING)
    rank, world = model_parallel_place()
    if world > 1:
        keep_drafts_equal(model.draft_model)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=engine_config(config),
        mpu=ReplicatedDraft() if world > 1 else None,
    )
    if config.optimizer == "muon":  # DeepSpeed would compile its update for longer than a short run takes
        engine.step = torch.compiler.set_stance("force_eager")(engine.step)
    for group in engine.optimizer.param_groups:
        scale = muon_scale(model.config.hidden_size) if group.get("use_muon") else 1.0
        group["rate_scale"], group["weight_decay"] = scale, config.weight_decay / scale
    engine.module.register_state_dict_post_hook(_keep_draft)
    if rank > 0:
        engine.save_non_zero_checkpoint = engine.save_zero_checkpoint = False
    _restore_rotary(engine.module.model)
    if runs_triton(next(engine.module.model.parameters())):
        from longspec.models.target_kernels import use_kernels

        use_kernels(engine.module.model, engine.module.draft_layer_class)
        weight, alone = engine.module.lm_head.weight, config.deepspeed.zero_optimization["stage"] < 3 and world == 1
        if alone and varlen_flash.runs(weight.device, weight.dtype, head_dim(model.config)):
            layer_weights = sum(weight.numel() for weight in engine.module.model.layers[0].parameters())
            engine.module.target_pass = TargetGraphs(engine.module.run_target, layer_weights)
    return engine


def _restore_rotary(target: Any) -> None:
    """Compute the rotary frequencies anew, in fp32; cast to bf16 they move far positions.

    ZeRO-3's construction in shards casts them with some versions of transformers, old DeepSpeeds cast all buffers.
    """
    rotary = target.rotary_emb
    for name, frequencies in type(rotary)(target.config).to(rotary.inv_freq.device).named_buffers():
        setattr(rotary, name, frequencies)


def _keep_draft(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    """Take the target out of a state dict: `exclude_frozen_parameters` forgets the second name of tied embeddings."""
    for name in [name for name in state if not name.startswith(DRAFT_PREFIX)]:
        del state[name]


def muon_scale(hidden: int) -> float:
    """What Muon's rate is multiplied by, so that a matrix moves as far as under AdamW. (arXiv 2502.16982, equation 4.
    For tall matrices DeepSpeed's update has the further factor in it; one that is wider than `hidden` moves less, by
    sqrt(hidden / columns).)"""
    return 0.2 * math.sqrt(hidden)


def set_learning_rate(engine: Any, rate: float) -> None:
    """For the next step. Set anew each time, it needs no saved state and a resumed run may have another length."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate * group["rate_scale"]
