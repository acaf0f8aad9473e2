"""The request patterns that real cache bugs need, and how each is seen.

`Patterns` sees that a pattern happened independently of what a scenario was built for. A run
without one of `REQUIRED` says nothing about the bugs that need it, and is void.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace

import torch

from hybrid_kv.cache.modes import MODES
from hybrid_kv.cache.spec import MambaSpec, window_of
from hybrid_kv.check.guard.scenario import COMMON, Scenario, answer_book, has_attention, num_states
from hybrid_kv.check.guard.step import Prefix, Ran, Track
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.recompute import RecomputeStep
from hybrid_kv.sampling import SamplingParams

# What a differential run must have seen, and what it means.
REQUIRED = {
    "chunked_prefill": "a prompt computed in several steps",
    "preemption": "a running request lost its blocks",
    "recomputed_output": "generated tokens were recomputed after a preemption",
    "preempted_while_speculating": "a request lost its blocks with drafts waiting",
    "resumed_from_cache": "a preempted request found some of its tokens in the cache",
    "mixed_step": "decodes and prefills in one step",
    "mixed_sampling": "a verified draft of a sampled request beside greedy ones",
    "padded_rows": "a decode step padded to a captured size",
    "padded_drafts": "… with drafts in it",
    "row_reuse": "a row of the block tables got a new owner",
    "block_reuse": "a block got a new owner",
    "all_blocks_used": "block ids wrapped around the pool",
    "full_pool": "a step that left no block free",
    "two_blocks": "a pool of one block beside the null block",
    "long_lived": "a request outlived eight others",
    "kernel_split": "one manager block is several kernel blocks",
    "kv_first": "layout (2, num_blocks, …)",
    "blocks_first": "layout (num_blocks, 2, …)",
    "several_groups": "groups of equal spec",
    "attention_only": "a model without Mamba layers",
    "mamba_only": "a model without attention layers",
    "short_prompt": "a prompt shorter than the convolution window",
    "one_token_prefill": "a prefill of one token",
    "one_token_of_new_request": (
        "a budget that leaves one token for a new request, in a row that another one had"
    ),
    "one_token_left": "a prompt's last token alone, beside verified drafts",
    "few_tokens_left": "the last 2 … 1 + K tokens of a prompt, beside verified drafts",
    "first_decode_beside_chunk": "a request's first decode while another's prompt is in chunks",
    "uneven_prefills": "two prefills in one step, the first no multiple of the scan chunk",
    "lone_chunks": "one request alone, in several chunks",
    "verify_shape": "a prompt of as many tokens as a verify step has, alone in its step",
    "verify_shapes": "… in a step in which every request has so many",
    "one_behind_chunk": "a prompt one token longer than the budget",
    "exact_block": "a prompt that is a multiple of the block size",
    "waiting": "a request that waited for a row or for blocks",
    "stop_token": "a request ended by a stop token",
    "stop_inside_drafts": "… with accepted drafts behind it",
    "max_model_len": "a request that ended because it reached max_model_len",
    "max_model_len_with_drafts": "… while it had drafts",
    "once_more_at_max_model_len": "… and one step late the complete request runs once more",
    "strange_drafts": "a proposer gave something else than a token, or too many",
    "junction": "a prompt of which attention had more than the states or windows",
    "junction_hit": "… and another one that resumes where they were kept for it",
    "hit_inside_block": "a hit that ends inside a block, with a prefix match unit",
    "hit_inside_first_block": "… and before the end of the first one",
    "sparse_hit": "a hit where states and windows are kept for prompts that resume",
    "sampled": "a request with a temperature",
    "top_k_beside_top_p": "a request that top-k alone and top-p alone would continue in other ways",
    "logprobs_of_sampled": "log-probabilities of a request with a temperature",
    "prompt_logprobs": "log-probabilities of a prompt, which is not read from the cache then",
    "prompt_logprobs_beside_copies": (
        "… in a step in which another request copies a state to a boundary"
    ),
    "refused": "a prompt that can never run, beside others that do",
    "accepted_draft": "a draft that was right",
    "rejected_draft": "a draft that was wrong",
    "sat_out_slots": "a running request that sat a step out behind accepted drafts, and went on",
    "sat_out_recompute": "… in scheme recompute",
    "one_row_with_drafts": "accepted drafts in an engine of one row",
    "all_accepted": "two or more drafts, all accepted",
    "all_rejected": "two or more drafts, all rejected",
    "whole_batch_rejected": "two or more rows with drafts and nothing accepted",
    "undrafted_after_accepts": "a step without drafts after two accepted ones",
    "number_of_drafts_varies": "drafts of another number than in the step before",
    "drafting_ends": "accepted drafts in a step of so many requests that it proposes none",
    "drafting_begins": "a step of few enough requests that proposes drafts again",
    "accepted_to_boundary": "accepted drafts that end exactly on a block boundary",
    "rejected_at_boundary": "… and rejected ones behind it",
    "rejected_behind_boundary": "a rejection right after a boundary was crossed",
    "middle_row_ends": "a row between others ends, which go on with different accepted counts",
    "hit_align": "a prefix restored in mode align",
    "hit_all": "a prefix restored in mode all",
    "hit_attention": "a prefix restored without Mamba layers",
    "unequal_blocks": "a prefix restored over groups of unequal block sizes",
    "between_boundaries": (
        "a group that can restore up to a token at which another group has no boundary"
    ),
    "unequal_pages": "a prefix restored over layers of one group whose pages differ",
    "hit_of_several_blocks": "a hit of two blocks and more",
    "hit_up_to_last_token": "a hit that leaves one token",
    "hit_before_last_block": "a repeated prompt of whole blocks, whose last one is computed again",
    "attention_deeper": "K/V cached beyond the last state",
    "state_deeper": "a state cached beyond the K/V",
    "no_common_depth": "a hit shorter than what each group alone could restore",
    "second_turn_align": "a hit on tokens that another request generated, in mode align",
    "second_turn_all": "… in mode all",
    "repeated_after_cut_chunk": (
        "a prompt of one or two blocks, cut between boundaries, that came again"
    ),
    "duplicates": "two equal prompts computed in one step",
    "waits_for_prefix": "a prompt that waits for the step that computes its first block",
    "shared_block": "two requests that run on one cached prefix",
    "identical_prompts": "four prompts with one beginning and different ends in one step",
    "salts_apart": "a prefix that only another salt has",
    "no_reuse": "caching on, and nothing to find",
    "eviction": "a cached block lost to another request",
    "one_step_late": "a step scheduled before the one before it was known",
    "abort_in_flight": "a request aborted between schedule and execution",
    "abort_waiting": "a waiting request aborted",
    "same_prompt_after_abort": "… and its prompt again",
    "offload_hit": "a block that came back from host memory",
    "lost_hit": "a hit that another tier lost while it was taken",
    "exact_hit": (
        "a prefix restored while all that was ever published "
        "could be found: its length follows from tokens"
    ),
    "exact_hit_of_host": "… in host memory alone, in part: the device had lost some of it",
    "hit_behind_losses": "a prefix restored after blocks were lost for good",
    "reset": "all cached blocks forgotten while requests run",
    "sleep": "all memory given back and taken again while requests run",
    "sanitized": "a scenario with the sanitizer on",
    "ring_emptied": "a ring without room for the next step, flushed into the state",
    "ring_wrapped": "a history, and the step behind it, that go round the end of the ring",
    "flushed_at_boundary": "a history flushed up to a block boundary, with tokens left behind it",
    "flushed_in_place": "a history flushed into the block that it follows",
    "flushed_at_finish": "a state that was written only because its request ended",
    "flushed_at_preemption": "… was preempted",
    "flushed_at_abort": "… was aborted",
    "hit_on_flushed": "a prefix restored from a state that was written a step late",
    "window_given_back": "a block before a sliding window that its request freed, and ran on",
    "window_hit": (
        "a prefix restored from the blocks of a sliding window, which begins after it does"
    ),
    "window_crossed": (
        "a verify step whose drafts see one block of a sliding window less than its first token"
    ),
    "shared_base": "a history behind a state that other requests may read",
    "window_ahead": (
        "a window that rejected drafts left in a logical "
        "block behind all that the next step reaches"
    ),
    "block_accepted": "a draft of a block drafter that is right",
    "block_rejected": "… and one that is wrong",
    "block_of_hit": "a first block of drafts that sees a prefix from the cache",
    "block_again": "a first block of drafts after a preemption",
    "block_paused": "a block of drafts after a step that proposed none",
    "block_wider": "more drafts at once than the drafter's window has tokens",
}

WINDOW = 3  # tokens of a convolution window
SCAN_CHUNK = 4


def _ends(ran: Ran) -> bool:
    return bool(ran.tokens) and ran.end + 1 >= ran.track.end


def _is_chunk(ran: Ran) -> bool:
    """Return whether a row runs part of a prompt, not all of it."""
    return (
        0 < ran.item.num_tokens < ran.track.prompt
        and ran.item.num_computed_tokens < ran.track.prompt
    )


class Patterns:
    """The counts of what happens in one scenario.

    Args:
        tracks: of each request, by number; the observer keeps them up to date.

    Attributes:
        seen: how often each pattern happened, those of `REQUIRED` and a few more.
        block_size: of the boundaries.
        aborted_prompts: of requests that were aborted while they ran.
        copies: whether the step has copied states to a boundary.
    """

    def __init__(self, scenario: Scenario, tracks: Sequence[Track]) -> None:
        self.seen: Counter[str] = Counter()
        self.block_size = 1
        self.aborted_prompts: set[Prefix] = set()
        self.copies = False
        self._scenario = scenario
        self._tracks = tracks
        self._row_owner: dict[int, str] = {}
        self._block_owner: dict[int, str] = {}
        self._cut_prompts: set[Prefix] = set()
        self._salts: dict[bytes, set[str]] = {}
        self._num_ended = 0
        # Running requests that the last step left out, their drafts accepted before.
        self._sat_out: set[str] = set()

    def watch(self, llm: LLM, late: Set[Prefix]) -> None:
        """Count from here on.

        Args:
            late: prefixes whose states scheme `recompute` wrote a step late, as they come.
        """
        self._llm = llm
        self._late = late
        sizes = llm.plan.sizes
        is_indexed = (
            MODES[llm.config.cache.mamba_cache_mode].keeps_states
            and sizes.mamba_block_size is not None
        )
        self.block_size = sizes.mamba_block_size or 1 if is_indexed else sizes.block_size

    def count_blocks(self, request_id: str, blocks: Sequence[int]) -> None:
        """Count the blocks that a request holds in a step."""
        for block in blocks:
            self.seen["block_reuse"] += self._block_owner.get(block, request_id) != request_id
            self._block_owner[block] = request_id

    def count_step(self, step: Sequence[Ran], history: RecomputeStep | None) -> None:
        """Count the patterns of one step that has run, before the engine takes its results.

        Args:
            history: what its decodes run again in scheme `recompute`, in the first group that has
                states.
        """
        self._count_batch(step)
        if history is not None:
            self._count_history(history)
        self._count_left_out(step)
        self._count_admissions([ran for ran in step if ran.item.overwrite])
        for index, ran in enumerate(step):
            self._count_windows(ran)
            self._count_prompt(ran, [other for other in step if other is not ran])
            if ran.tokens and not ran.is_prefill:
                self._count_drafts(ran)
            if _ends(ran):
                self._count_row_end(step, index)

    def _count_row_end(self, step: Sequence[Ran], index: int) -> None:
        """Count that the row at `index` ends."""
        self.seen["long_lived"] += self._num_ended - step[index].track.ended_before > 7
        self._num_ended += 1
        if 0 < index < len(step) - 1:
            others = [other for other in (step[index - 1], step[index + 1]) if not _ends(other)]
            self.seen["middle_row_ends"] += len({len(other.tokens) for other in others}) > 1

    def _count_batch(self, step: Sequence[Ran]) -> None:
        """Count what rows of a step have together."""
        seen = self.seen
        most = self._llm.config.speculative.num_speculative_tokens
        items = [ran.item for ran in step]
        decodes = sum(not ran.is_prefill for ran in step)
        drafted = any(item.num_drafts for item in items)
        seen["mixed_step"] += 0 < decodes < len(step)
        padded = decodes == len(step) and self._llm.runner.padded_size(decodes) > decodes
        seen["padded_rows"] += padded
        seen["padded_drafts"] += padded and drafted
        seen["full_pool"] += self._llm.manager.pool.num_free_blocks == 0
        sampled = [
            ran.item.request.params.temperature > 0
            for ran in step
            if ran.item.num_drafts and len(ran.tokens) > 1
        ]
        is_all_sampled = all(item.request.params.temperature > 0 for item in items)
        seen["mixed_sampling"] += any(sampled) and not is_all_sampled
        prefills = [ran for ran in step if ran.is_prefill]
        is_uneven = len(prefills) > 1 and prefills[0].item.num_tokens % SCAN_CHUNK > 0
        seen["uneven_prefills"] += is_uneven
        gained = [len(ran.tokens) for ran in step if ran.item.num_drafts]
        proposes = self._llm.config.speculative.drafts_after(len(step)) > 0
        seen["drafting_ends"] += max(gained, default=0) > 1 and not proposes
        seen["whole_batch_rejected"] += len(gained) > 1 and set(gained) == {1}
        is_lone = len(step) == 1 and _is_chunk(step[0])
        seen["lone_chunks"] += is_lone and step[0].item.num_computed_tokens > 0
        scored = [ran for ran in prefills if ran.item.request.params.prompt_logprobs is not None]
        seen["prompt_logprobs_beside_copies"] += self.copies and bool(scored)
        self.copies = False
        if prefills and most and all(item.num_tokens == 1 + most for item in items):
            seen["verify_shape" if len(step) == 1 else "verify_shapes"] += 1
        if MODES[self._llm.config.cache.mamba_cache_mode].keeps_states:
            size = self.block_size
            longest = max(item.num_computed_tokens + item.num_tokens for item in items)
            is_ahead = any(cdiv(ran.track.reach, size) > cdiv(longest, size) for ran in step)
            seen["window_ahead"] += is_ahead

    def _count_left_out(self, step: Sequence[Ran]) -> None:
        """Count requests that kept their blocks through a step without them, and go on."""
        in_step = {ran.item.request.request_id for ran in step}
        going_on = {ran.item.request.request_id for ran in step if not ran.item.overwrite}
        self.seen[f"sat_out_{self._llm.config.cache.state_scheme}"] += len(self._sat_out & going_on)
        left_out = {request.request_id for request in self._llm.scheduler.running} - in_step
        self._sat_out = {name for name in left_out if self._tracks[int(name)].accepted}

    def _count_history(self, step: RecomputeStep) -> None:
        seen = self.seen
        pool = self._llm.manager.pool
        spec = next(iter(self._llm.runner.builders.values())).spec
        ring_len = spec.rollback.describe()["ring_len"]
        parts = (step.src, step.dst, step.ring_start, step.n_hist, step.n_flush)
        for source, target, start, history, flush in torch.stack(parts, dim=1).tolist():
            if not source:
                continue
            # What is left behind a boundary is less than a step; a full ring is flushed whole.
            seen["ring_emptied"] += (
                flush > 0 and flush == history and flush + 2 * step.max_query_len > ring_len
            )
            seen["ring_wrapped"] += (
                history > 0 and start < ring_len < start + history + step.max_query_len
            )
            seen["flushed_at_boundary"] += 0 < flush < history
            seen["flushed_in_place"] += flush > 0 and source == target
            is_shared = int(pool.ref_count[source]) > 1 or pool.key_of(source) is not None
            seen["shared_base"] += history > 0 and is_shared

    def _count_prompt(self, ran: Ran, others: Sequence[Ran]) -> None:
        seen = self.seen
        item = ran.item
        track = ran.track
        n = item.num_computed_tokens
        end = item.num_computed_tokens + item.num_tokens
        prompt = track.prompt
        beside_drafts = any(other.item.num_drafts for other in others)
        most = self._llm.config.speculative.num_speculative_tokens
        size = self.block_size
        seen["once_more_at_max_model_len"] += end == self._llm.config.scheduler.max_model_len
        seen["chunked_prefill"] += 0 < n < prompt and n != track.hit
        seen["one_token_prefill"] += n == 0 and item.num_tokens == 1
        last = n > 0 and end == prompt
        seen["one_token_left"] += last and item.num_tokens == 1 and beside_drafts
        seen["few_tokens_left"] += last and 2 <= item.num_tokens <= 1 + most and beside_drafts
        budget = self._llm.config.scheduler.max_num_batched_tokens
        seen["one_behind_chunk"] += (
            last and item.num_tokens == 1 and prompt == budget + 1 and track.hit == 0
        )
        first_decode = n == prompt and not ran.is_prefill
        seen["first_decode_beside_chunk"] += first_decode and any(
            _is_chunk(other) for other in others
        )
        if most and others and size < prompt <= 2 * size and end < prompt and end % size:
            self._cut_prompts.add(track.prefix(prompt))

    def _count_drafts(self, ran: Ran) -> None:
        seen = self.seen
        item = ran.item
        track = ran.track
        size = self.block_size
        accepted = len(ran.tokens) - 1
        drafts = item.num_drafts
        end = item.num_computed_tokens + 1 + accepted
        crossed = end // size > item.num_computed_tokens // size
        seen["accepted_draft"] += accepted > 0
        seen["rejected_draft"] += accepted < drafts
        seen["one_row_with_drafts"] += accepted > 0 and self._llm.config.scheduler.max_num_seqs == 1
        seen["all_accepted"] += drafts > 1 and accepted == drafts
        seen["all_rejected"] += drafts > 1 and not accepted
        seen["undrafted_after_accepts"] += track.accepted > 1 and not drafts
        seen["number_of_drafts_varies"] += (
            track.previous_drafts > 0 and drafts > 0 and track.previous_drafts != drafts
        )
        seen["accepted_to_boundary"] += accepted > 0 and end % size == 0
        seen["rejected_at_boundary"] += accepted > 0 and end % size == 0 and accepted < drafts
        seen["rejected_behind_boundary"] += crossed and end % size == 1 and 0 < accepted < drafts
        seen["stop_inside_drafts"] += ran.end < item.num_computed_tokens + accepted
        whole = self._llm.config.scheduler.max_model_len
        seen["max_model_len_with_drafts"] += drafts > 0 and end + 1 == whole == track.end

    def _count_windows(self, ran: Ran) -> None:
        """Count the patterns of sliding windows in one row of a step."""
        item = ran.item
        begin = item.num_computed_tokens
        last = begin + item.num_tokens - 1
        for spec in {group.spec for group in self._llm.plan.config.groups}:
            window = window_of(spec)
            if window is None:
                continue
            blocks = [max(0, end - window + 1) // spec.block_size for end in (begin, last)]
            self.seen["window_given_back"] += blocks[0] > 0 and not item.overwrite
            self.seen["window_hit"] += blocks[0] > 0 and item.overwrite
            self.seen["window_crossed"] += item.num_drafts > 0 and blocks[0] < blocks[1]

    def _count_admissions(self, admitted: Sequence[Ran]) -> None:
        """Count the patterns of requests that start, or start again."""
        for ran in admitted:
            self._count_admission(ran)
            if not ran.item.request.num_preemptions:
                self._count_first_admission(ran)
        self._count_alike(admitted)

    def _count_admission(self, ran: Ran) -> None:
        """Count the patterns of a request that starts, or starts again."""
        seen = self.seen
        item = ran.item
        request = item.request
        n = item.num_computed_tokens
        prompt = ran.track.prefix(ran.track.prompt)
        name = request.request_id
        recycled = self._row_owner.get(request.row, name) != name
        seen["row_reuse"] += recycled
        self._row_owner[request.row] = name
        is_one_token = n == 0 and item.num_tokens == 1 < ran.track.prompt
        seen["one_token_of_new_request"] += recycled and is_one_token
        resumes = request.num_preemptions > 0
        seen["recomputed_output"] += resumes and len(request.output_token_ids) > 1
        seen["resumed_from_cache"] += resumes and n > 0
        seen["repeated_after_cut_chunk"] += n > 0 and prompt in self._cut_prompts
        seen["same_prompt_after_abort"] += prompt in self.aborted_prompts

    def _count_first_admission(self, ran: Ran) -> None:
        """Count the patterns of a request that starts for the first time."""
        seen = self.seen
        size = self.block_size
        track = ran.track
        n = ran.item.num_computed_tokens
        track.ended_before = self._num_ended
        salts = self._salts.setdefault(bytes(track.sequence[:size]), set())
        seen["salts_apart"] += track.prompt > size and n == 0 and bool(salts - {track.salt})
        salts.add(track.salt)
        if n:
            self._count_hit(track, n)
        specs = [group.spec for group in self._llm.plan.config.groups]
        group_tokens = ran.item.request.hit.group_tokens
        hits = list(zip(specs, group_tokens, strict=False))
        if not hits:
            return
        states = [tokens for spec, tokens in hits if isinstance(spec, MambaSpec)]
        kv = [tokens for spec, tokens in hits if not isinstance(spec, MambaSpec)]
        shallowest = min(group_tokens)
        seen["between_boundaries"] += any(shallowest % spec.block_size for spec in specs)
        seen["no_common_depth"] += min(tokens for _, tokens in hits) > n
        if states and kv:
            seen["attention_deeper"] += min(kv) > n
            seen["state_deeper"] += min(states) > n

    def _count_hit(self, track: Track, n: int) -> None:
        """Count a prefix of `n` tokens that a request found when it started."""
        seen = self.seen
        size = self.block_size
        plan = self._llm.plan
        mode = "attention"
        if num_states(self._scenario.layers):
            mode = self._llm.config.cache.mamba_cache_mode
        seen[f"hit_{mode}"] += 1
        seen["hit_on_flushed"] += track.prefix(n) in self._late
        seen["hit_of_several_blocks"] += n >= 2 * size
        seen["unequal_blocks"] += len({group.spec.block_size for group in plan.config.groups}) > 1
        seen["unequal_pages"] += len(set(plan.config.buffer_page_sizes)) > 1
        seen["hit_up_to_last_token"] += n == track.prompt - 1
        seen["hit_before_last_block"] += n == track.prompt - size
        seen[f"second_turn_{mode}"] += any(
            other is not track
            and other.admissions
            and other.prompt < n
            and other.prefix(n) == track.prefix(n)
            for other in self._tracks
        )

    def _count_alike(self, admitted: Sequence[Ran]) -> None:
        """Count the patterns of requests that start together, or wait for each other."""
        seen = self.seen
        size = self.block_size
        started = [
            ran
            for ran in admitted
            if ran.item.num_computed_tokens == 0 and ran.item.num_tokens >= size
        ]
        fresh = [ran.track.sequence for ran in started]
        seen["duplicates"] += len({bytes(sequence[:size]) for sequence in fresh}) < len(fresh)
        beginnings = Counter(bytes(sequence[:COMMON]) for sequence in fresh)
        num_different = len({bytes(sequence) for sequence in fresh})
        is_common = max(beginnings.values(), default=0) > 3
        seen["identical_prompts"] += is_common and num_different > 3
        scheduler = self._llm.scheduler
        if self._llm.manager.enable_prefix_caching and scheduler.waiting and admitted:
            head = scheduler.waiting[0]
            has_row = len(scheduler.running) < self._llm.config.scheduler.max_num_seqs
            begins = {
                (ran.item.request.params.cache_salt, *ran.track.sequence[:size]) for ran in started
            }
            waits = (head.params.cache_salt, *head.token_ids[:size]) in begins
            seen["waits_for_prefix"] += has_row and waits
        shared = [ran.track.prefix(size) for ran in admitted if ran.item.num_computed_tokens]
        seen["shared_block"] += len(set(shared)) < len(shared)

    def count_end(self) -> None:
        """Count the patterns of the whole scenario."""
        seen = self.seen
        scenario = self._scenario
        pool = self._llm.manager.pool
        groups = self._llm.runner.groups
        attention = [group for group in groups if not group.backend.is_ssm()]
        seen["attention_only"] += not num_states(scenario.layers)
        seen["mamba_only"] += not has_attention(scenario.layers)
        seen["kernel_split"] += any(
            group.spec.block_size > group.kernel_block_size for group in attention
        )
        for group in attention:
            seen["kv_first" if group.backend.get_kv_dim() == 0 else "blocks_first"] += 1
        seen["several_groups"] += len({group.spec for group in groups}) < len(groups)
        seen["two_blocks"] += pool.num_blocks == 2
        seen["all_blocks_used"] += len(self._block_owner) == pool.num_blocks - 1
        seen["eviction"] += pool.num_evictions
        seen["one_step_late"] += self._llm.config.async_scheduling
        seen["sanitized"] += bool(self._llm.config.sanitize)
        if self._llm.manager.offload is not None:
            seen["offload_hit"] += self._llm.manager.offload.stats.loaded_blocks
        requests = list(zip(scenario.prompts, scenario.params, strict=True))
        seen["top_k_beside_top_p"] += sum(self._needs_both(*request) for request in requests)
        seen["logprobs_of_sampled"] += sum(
            params.logprobs is not None and not params.is_greedy for _, params in requests
        )
        seen["prompt_logprobs"] += sum(not params.reads_prefix_cache for _, params in requests)
        lengths = [len(prompt) for prompt in scenario.prompts]
        seen["sampled"] += sum(params.temperature > 0 for params in scenario.params)
        seen["short_prompt"] += sum(length < WINDOW for length in lengths)
        seen["exact_block"] += sum(length % self.block_size == 0 for length in lengths)

    def _needs_both(self, prompt: Sequence[int], params: SamplingParams) -> bool:
        if params.is_greedy or not params.top_k or params.top_p == 1.0:
            return False
        book = answer_book(self._scenario.layers)
        limit = self._llm.config.scheduler.max_model_len
        variants = params, replace(params, top_k=0), replace(params, top_p=1.0)
        answers = {tuple(book.answer(prompt, variant, limit)) for variant in variants}
        return len(answers) == len(variants)

    def count_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Count the patterns that requests end with."""
        seen = self.seen
        limit = self._llm.config.scheduler.max_model_len
        seen["max_model_len"] += sum(
            len(o.prompt_token_ids) + len(o.token_ids) == limit for o in outputs
        )
        seen["refused"] += sum(output.finish_reason == "error" for output in outputs)
        seen["preemption"] += sum(output.num_preemptions for output in outputs)
        seen["stop_token"] += sum(output.finish_reason == "stop" for output in outputs)
        ran = [output for output in outputs if output.error is None]
        if self._llm.manager.enable_prefix_caching and len(ran) > 3:
            seen["no_reuse"] += not any(output.cached_tokens for output in ran)
