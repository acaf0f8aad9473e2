"""A request and a step of it: the terms of the scheduler, the runner and their observers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.partial_blocks import PartialBlocks
from hybrid_kv.cache.request_blocks import NO_BLOCKS, NO_HIT, NewBlocks, PrefixHit
from hybrid_kv.cache.spec import StateProgress
from hybrid_kv.sampling import SamplingParams, TokenLogprobs


@dataclass(eq=False)
class Request:
    """A request and how far it is."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    output_token_ids: list[int] = field(default_factory=list)
    # Of each output token, if the request wants them
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Of each prompt token but the first, likewise
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Proposals for the tokens after the last known one
    draft_token_ids: list[int] = field(default_factory=list)
    progress: StateProgress = field(default_factory=StateProgress)
    num_preemptions: int = 0
    num_verifications: int = 0  # steps that verified drafts …
    num_draft_tokens: int = 0  # … so many of them …
    # … and found right; those after the token that ended it do not count
    num_accepted_draft_tokens: int = 0
    # A step that has run, but whose tokens are not known here yet
    in_flight: ScheduledRequest | None = None
    is_finished: bool = False
    hit: PrefixHit = NO_HIT  # of the first admission, without its chains
    junction: int = 0  # of the hit of the last admission
    row: int = -1  # of the block tables; -1 while waiting
    # Fills its blocks with what another engine has computed, all of its tokens but the last; None
    # once it has.
    arrival: Callable[[Request, NewBlocks], None] | None = None

    def __post_init__(self) -> None:
        self.block_hashes = BlockHashes(self.params.cache_salt)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens in the cache, all of them accepted."""
        return self.progress.computed

    @property
    def resume_points(self) -> tuple[int, int]:
        """Tokens after which another request may go on from its states (`cache.retention`)."""
        return len(self.prompt_token_ids) - 1, self.junction

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids


@dataclass(eq=False, kw_only=True)
class ScheduledRequest:
    """A step of one request: `num_tokens` of its tokens, from `num_computed_tokens` on.

    The last `num_drafts` of them are drafts. With asynchronous scheduling the step before may still
    be in flight, and the request *awaits* its drafts: these and the tokens before them are the
    runner's to fill in, `num_drafts` is how many there is room for, and `num_computed_tokens` is
    what is certain.
    """

    request: Request
    num_tokens: int
    num_computed_tokens: int
    samples: bool  # the step computes the last known token, so that its logits give the next one
    overwrite: bool = False  # the row has a new owner
    # These two are filled in once there is room; nothing changes after that.
    new_blocks: NewBlocks = NO_BLOCKS
    partial: PartialBlocks | None = None  # that a prefill leaves
    awaits_drafts: bool = False
    drafts: tuple[int, ...] = ()
    num_drafts: int = 0
    attempt: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.awaits_drafts:
            self.num_drafts = len(self.drafts)
        # A request that was preempted since has no use for what the step computed, only for its
        # tokens.
        self.attempt = self.request.num_preemptions

    @property
    def is_decode(self) -> bool:
        """True for a verify step: one known token plus its drafts.

        Nothing but decodes follows a decode.
        """
        return (
            self.samples and self.num_computed_tokens > 0 and self.num_tokens == 1 + self.num_drafts
        )

    @property
    def is_stale(self) -> bool:
        return self.attempt != self.request.num_preemptions
