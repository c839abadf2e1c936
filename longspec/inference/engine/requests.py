"""The interface of the scheduler: requests, events and errors. Importing it loads no library."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from longspec.errors import UserError
from longspec.inference.request import Sampling

if TYPE_CHECKING:
    import numpy as np

Origin = Literal["target", "draft", "lookup"]
"""The source of a token: the target (first and bonus tokens), or an accepted proposal of a draft or of prompt lookup.
What both propose counts as lookup."""


def round_origins(from_lookup: Sequence[bool]) -> list[Origin]:
    """The origins of a round's tokens. from_lookup: whether each accepted node comes from prompt lookup."""
    return [*("lookup" if is_match else "draft" for is_match in from_lookup), "target"]


FinishReason = Literal["stop", "length", "cancelled", "error"]
"""stop: an EOS token or a stop string; length: max_new_tokens; cancelled: by client or shutdown; error: see message."""


class QueueFull(Exception):
    """The queue holds `max_queue` requests; try again later."""


class RequestTooLarge(UserError):
    """Prompt and new tokens do not fit into a row of the cache or into the target's positions."""


class NotServing(Exception):
    """The scheduler is draining, closed, or has failed; it takes no more requests."""


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    """Token ids, at least one."""
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; the one that occurs is emitted last."""
    speculate: bool = True
    """False decodes as `vanilla`: one token per round."""
    logprobs: bool = False
    alternatives: int = 0
    """Most probable tokens to report with each token, 0 to MOST_ALTERNATIVES. Such rounds are not CUDA graphs."""
    scores_prompt: bool = False
    """Report the log-probabilities of the prompt's tokens, too. The whole prompt is then read again."""
    trace: bool = False
    """Send each round's tree along with its tokens."""

    @property
    def longest(self) -> int:
        """Most tokens of the prompt and its answer together."""
        return len(self.prompt) + self.max_new_tokens


MOST_ALTERNATIVES = 20
"""Alternatives that are computed per token."""
Alternatives = list[tuple[int, float]]
"""The most probable tokens at a place, with their log-probabilities, the most probable first."""


@dataclass(frozen=True)
class Tree:
    """The proposal of one round. Node 0 is the root, the newest token before the round."""

    tokens: list[int]
    """Token id of each node."""
    parents: list[int]
    """Number of each node's parent; -1 for the root and for unused nodes."""
    accepted: list[int]
    """Numbers of the accepted nodes below the root, from the top down."""
    origins: list[Origin]
    """One per accepted node."""


class Tokens(NamedTuple):
    """New tokens of one request, in order; at least one."""

    ids: list[int]
    origins: list[Origin]
    """One per token."""
    logprobs: list[float] | None = None
    """Natural log-probability of each token under the target at temperature 1, unfiltered; None unless requested."""
    tree: Tree | None = None
    """None unless requested, and for the first token, which prefill chooses."""
    alternatives: list[Alternatives] | None = None
    """One per token; None unless requested."""


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of further tokens of the prompt, in order from the second one on. They precede all `Tokens`."""

    logprobs: list[float]
    alternatives: list[Alternatives]
    """One per token."""


@dataclass(frozen=True)
class Timings:
    """Times in seconds."""

    queue_s: float = 0.0
    """From `submit` to the start of prefill."""
    ttft_s: float = 0.0
    """From `submit` to the first token; 0 if there was none."""
    decode_s: float = 0.0
    """From the first token to the last."""
    rounds: int = 0
    """Verification passes of this request."""


@dataclass(frozen=True)
class Finished:
    """The last event of a request, sent exactly once."""

    reason: FinishReason
    message: str = ""
    """Explains reason "error"."""
    timings: Timings = Timings()


Event = PromptScores | Tokens | Finished
OnEvent = Callable[[Event], None]
"""Called on the engine's thread; it must return at once. If it raises, the request ends with reason "error"."""


@dataclass(eq=False)
class Ticket:
    """A submitted request, as `Scheduler.cancel` takes it."""

    request: Request
    on_event: OnEvent
    submitted: float
    """time.perf_counter() at submission."""
    started: float = 0.0
    """The same at the start of prefill."""
    cached_prompt_tokens: int = 0
    """Prompt tokens whose keys and values are reused. Set at the start of prefill."""
    round_s: float = 0.0
    """Its share of the time of the rounds so far, in seconds; rows of a round have equal shares."""
    plans: Counter[str] = field(default_factory=Counter)
    """Number of its rounds per plan of method "auto"."""
    cancelled: FinishReason | None = None
    """The reason to end it. Set by `cancel`; the engine's thread acts on it before its next round."""
    failure: str = ""
    """Why `on_event` failed; the request then ends with reason "error"."""

    prompt: "np.ndarray" = field(init=False, repr=False)
    """int64 [P]; set with its row."""
    reads_alone: bool = False
    """Whether its prompt is not read together with others: to be scored, or because such a pass has failed."""
    root: int | None = None
    """The newest token; None before the end of prefill."""
    first_token: float = 0.0
    """time.perf_counter(), as the next one."""
    setup_before: float = 0.0
    """Seconds of the batch's setup up to the start of prefill."""
    setup_s: float = 0.0
    """Seconds of the batch's setup between the start of prefill and the first token."""
    last_token: float = 0.0
    new_tokens: int = 0
    rounds: int = 0

    @property
    def timings(self) -> Timings:
        """Times of a request that ends now."""
        return Timings(
            queue_s=(self.started or time.perf_counter()) - self.submitted,
            ttft_s=self.first_token - self.submitted if self.new_tokens else 0.0,
            decode_s=self.last_token - self.first_token,
            rounds=self.rounds,
        )


@dataclass
class Counts:
    """Totals since the start."""

    finished: Counter[str] = field(default_factory=Counter)
    """Number of finished requests by `FinishReason`."""
    prompt_tokens: int = 0
    """Prompt tokens of requests whose prefill has begun."""
    cached_prompt_tokens: int = 0
    """Part of `prompt_tokens` that was reused."""
    new_tokens: int = 0
    prefill_s: float = 0.0
    """Time of the host in prefill, and of the device where the host waits for it."""
    rounds: int = 0
    """Rounds of the whole batch, with those whose results were dropped."""
    row_rounds: int = 0
    """Verification passes, counted per row while it holds a running request that speculates."""
    accepted_tokens: int = 0
    """Draft tokens emitted by these passes."""
    decoded_tokens: int = 0
    """Tokens emitted by these passes, the bonus tokens included; over `row_rounds` it is the acceptance length."""


@dataclass(kw_only=True)
class Snapshot(Counts):
    """Figures of a scheduler."""

    healthy: bool
    """Whether the engine's thread runs."""
    error: str
    """Cause of a failure of the whole engine; empty without one."""
    max_rows: int
    capacity: int
    """Cache slots per row: prompt, new tokens, and one round's tree must fit."""
    queued: int
    """Requests that wait for a row."""
    running: int
    """Rows that hold a request, the one in prefill included."""
    requests: int = 0
    """Submitted requests, without refused ones."""
