"""The plan of a run. Everything that needs no weights is checked before they are loaded."""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from longspec.command_line import DRAFTING, drafting_of
from longspec.data.target_format import resolve_chat_format
from longspec.data.templates import check_embedded
from longspec.digests import content_hash, file_digest
from longspec.errors import UserError
from longspec.inference.adaptive.plan_drafters import MOST_NODES
from longspec.inference.arguments import check_draft_window, check_drafting, check_sampling
from longspec.inference.device import choose_device, choose_dtype, device_name, versions
from longspec.inference.load_pair import read_target
from longspec.inference.memory import check_memory
from longspec.inference.methods import AUTO, GLIDE_METHODS
from longspec.inference.options import WITHOUT_FILE, report_ignored
from longspec.inference.registry import Pair, choose_pair, draft_in_use
from longspec.inference.request import FILTER_OPTIONS
from longspec.inference.token_options import check_integer, token_settings, with_word_ids
from longspec.kernels.choice import attention_name
from longspec.longbench.prompts import Selection, read_prompt, read_questions, select_prompts
from longspec.longbench.run_folder import folder_name
from longspec.longbench.tasks import TASKS
from longspec.models.content import state_digest, target_digest
from longspec.models.draft_files import check_draft, draft_settings
from longspec.models.draft_layer import head_dim
from longspec.models.families import family_class
from longspec.models.target_files import position_limit, read_generation_config
from longspec.models.target_split import rank_config

SAMPLING = ("temperature", "top_p", "top_k")
INPUTS = ("model_name", "target", "draft", "data_path_prefix", "prompt_file", "token_options", "device")
"""Options that count by what they resolve to."""
OUTPUTS = ("output_dir", "overwrite")
LARGEST_SEED = 2**63 - 1
"""Seeds fit into a LongTensor."""


@dataclass
class EvaluationPlan:
    """A run that has been checked. Only the weights are still to be loaded."""

    options: argparse.Namespace
    pair: Pair
    config: PreTrainedConfig
    max_positions: int
    """Context length of the target in tokens."""
    tokenizer: Any
    chat_format: str
    """The chat format of the prompts, one of CHAT_FORMATS."""
    draft: str | None
    """Path or hub id of the draft; None if the method needs none and the options name none."""
    draft_state: dict[str, Tensor] | None
    """Weights of the draft; None without one."""
    selection: Selection
    max_new_tokens: int
    device: torch.device
    dtype: torch.dtype
    attention: str
    """The attention backend: "flash", "triton", "native", "sdpa" or "deterministic"."""
    notes: list[str]
    """Lines for the user: the chat format if it is not obvious, and the prompts that are left out."""

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of every call of `generate`, except for the seed."""
        return {
            **{name: getattr(self.options, name) for name in (*DRAFTING, *SAMPLING, "compile", "attention")},
            "max_new_tokens": self.max_new_tokens,
            "eos_token_id": self.pair.eos_token_id,
            "pad_token_id": self.pair.pad_token_id,
            **self.token_options,
        }

    @property
    def token_options(self) -> dict[str, Any]:
        """Those of the arguments that are filters and penalties."""
        # generation_config.json does not apply: the command's options alone define the distribution.
        return {**WITHOUT_FILE, **with_word_ids(self.options.token_options, self.tokenizer)}

    @property
    def data_file(self) -> Path:
        return Path(self.options.data_path_prefix) / f"{self.options.task}.jsonl"

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """Everything that distinguishes this run from others, as JSON values. Input files count by their content."""
        options, state = self.options, self.state_in_use
        # The token ids cover everything that makes the prompts: data, templates, chat format, tokenizer.
        prompts = [[prompt.id, prompt.token_ids] for prompt in self.selection.prompts]
        return {
            **{name: value for name, value in vars(options).items() if name not in (*INPUTS, *OUTPUTS)},
            **options.token_options,
            "max_gen_len": self.max_new_tokens,
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention": self.attention,
            "eos_token_id": self.pair.eos_token_id,
            "pad_token_id": self.pair.pad_token_id,
            "target": target_digest(self.pair.target, self.config),
            # A draft that is given but not used does not change the results.
            "draft": None if state is None else state_digest(state),
            **({} if self.draft is None or state is None else draft_settings(self.draft).options.entries()),
            "data": file_digest(self.data_file),
            "prompts": content_hash(json.dumps(prompts).encode()).hexdigest(),
            "device": device_name(self.device),
            "versions": versions(),
        }

    @property
    def state_in_use(self) -> dict[str, Tensor] | None:
        """The weights of the draft; None for a method that reads none. One that is given may still be unused."""
        return self.draft_state if self.options.method in (*GLIDE_METHODS, AUTO) else None

    @property
    def record(self) -> dict[str, Any]:
        """The content of `run.json`: the configuration, and the paths of the inputs."""
        return {"run": self.configuration, "target": self.pair.target, "draft": self.draft, "data": str(self.data_file)}

    @property
    def output_dir(self) -> Path:
        """The folder of the results; by default one per configuration."""
        # A folder that the user names is used as it is, and checked for results of other runs.
        if self.options.output_dir:
            return Path(self.options.output_dir)
        # A hub id has slashes, and a name of dots would leave the folder.
        model = re.sub(r"[^\w.+-]", "-", self.pair.name).strip(".") or "model"
        return Path("outputs", "inference", model, self.options.task, folder_name(self.configuration))


def make_plan(options: argparse.Namespace) -> EvaluationPlan:
    """Check everything that can be checked without the weights. Raises UserError."""
    # In order of cost.
    max_new_tokens = TASKS[options.task].max_new_tokens if options.max_gen_len is None else options.max_gen_len
    filters = {name: value for name, value in options.token_options.items() if name in FILTER_OPTIONS}
    check_sampling(max_new_tokens, options.temperature, options.top_p, options.top_k, **filters)
    _check_numbers(options)
    device = choose_device(options.device)

    if options.model_name is not None and options.target is not None:
        raise UserError("name the target either by --model_name or by --target")
    pair = choose_pair(options.model_name if options.target is None else options.target, options.draft)
    pair, config, tokenizer = read_target(pair, options.chat_template_kwargs)
    check_drafting(drafting_of(options), config.vocab_size)
    token_settings(with_word_ids(options.token_options, tokenizer), (), config.vocab_size)
    notes: list[str] = []
    chat_format = resolve_chat_format(options.chat_format, pair.target, config.model_type, tokenizer, notes.append)
    report_ignored(read_generation_config(pair.target, config), pair.target, (), notes.append)

    # One that is named but not used is checked as well.
    draft = draft_in_use(pair, options.method, options.draft)
    draft_state = _load_draft(options, draft, pair, config) if draft else None

    # The shorter of the published context and the one that the target's files state.
    max_positions = min(pair.max_positions or sys.maxsize, position_limit(config))
    longest = max_positions - options.headroom
    prompt = None if options.prompt_file is None else read_prompt(options.prompt_file, options.task)
    asked = read_questions(options.task, options.data_path_prefix, config.model_type, tokenizer, chat_format, prompt)
    selection = select_prompts(options.task, asked, tokenizer, options.test_length, options.min_prompt_len, longest)
    notes.append(selection.describe(options.task, options.min_prompt_len, longest))
    dtype = choose_dtype(options.dtype, config, device)
    plan = EvaluationPlan(
        options=options,
        pair=pair,
        config=config,
        max_positions=max_positions,
        tokenizer=tokenizer,
        chat_format=chat_format,
        draft=draft,
        draft_state=draft_state,
        selection=selection,
        max_new_tokens=max_new_tokens,
        device=device,
        dtype=dtype,
        attention=attention_name(options.attention, device, dtype, head_dim(config)),
        notes=notes,
    )
    _check_prompts(plan)
    _check_batch_memory(plan)
    return plan


def _check_numbers(options: argparse.Namespace) -> None:
    """Raise UserError for a number outside its range, as far as it depends on no target."""
    check_drafting(drafting_of(options))
    for name, least in {"test_length": 0, "batch_size": 1, "min_prompt_len": 0, "headroom": 0}.items():
        check_integer(f"--{name}", getattr(options, name), least)
    check_integer("--seed", options.seed, 0, LARGEST_SEED)


def _load_draft(options: argparse.Namespace, draft: str, pair: Pair, config: PreTrainedConfig) -> dict[str, Tensor]:
    """The draft's weights on the CPU. Raises UserError if it does not fit, is untrained, or has a small window."""
    state = check_draft(draft, config, family_class(config, pair.target).draft_layer_class)
    settings = draft_settings(draft)
    if options.method in GLIDE_METHODS and not settings.is_trained:
        raise UserError(
            f"--draft: {draft} was saved with a fresh, untrained draft; give a trained one, or use --method lookup"
        )
    check_draft_window(drafting_of(options), settings.options.window)
    return state


def _check_batch_memory(plan: EvaluationPlan) -> None:
    """Raise UserError if a lower bound of the memory for the longest row exceeds that of the device."""
    options, prompts, config = plan.options, plan.selection.prompts, plan.config
    largest_tree = sum(options.tree_shape)
    if options.tree_nodes is not None:
        largest_tree = min(largest_tree, options.tree_nodes - 1)
    draft_tokens = {"vanilla": 0, "tree": largest_tree, AUTO: max(MOST_NODES - 1, options.gamma)}.get(
        options.method, options.gamma
    )
    longest = max(len(prompt.token_ids) for prompt in prompts) + plan.max_new_tokens
    if options.tp_size > 1:
        config = rank_config(config, 0, options.tp_size)
    state = plan.state_in_use or {}
    listed = state["d2t"].numel() if "d2t" in state else None  # length of the draft's vocabulary list
    # One more than the draft tokens: the root is verified, too.
    check_memory(config, plan.dtype, plan.device, longest, draft_tokens + 1, listed)


def _check_prompts(plan: EvaluationPlan) -> None:
    """Raise UserError for a prompt that leaves no room for its answer or has a token without an embedding."""
    for prompt in plan.selection.prompts:
        length = len(prompt.token_ids)
        if length + plan.max_new_tokens > plan.max_positions:
            raise UserError(
                f"sample {prompt.id!r}: prompt of {length} tokens + {plan.max_new_tokens} new tokens (--max_gen_len) "
                f"are more than the target's {plan.max_positions} positions"
            )
        # It would end a GPU run with a device-side assert.
        check_embedded(prompt.token_ids, plan.config.vocab_size, plan.tokenizer, f"sample {prompt.id!r}")
