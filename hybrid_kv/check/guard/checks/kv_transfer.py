"""Two engines with settings of their own: one computes the prompts, the other goes on with them."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockIds
from hybrid_kv.cache.spec import MambaSpec, MLAAttentionSpec, window_of
from hybrid_kv.check.guard.exactness import Alone, DraftRecorder, K
from hybrid_kv.check.guard.play import play_seeds
from hybrid_kv.check.guard.poison import poison, poison_free_blocks
from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.scenario import (
    ScriptedProposer,
    SmallBlocksFirst,
    SmallKVFirst,
    answer_book,
    cache_options,
    has_attention,
    num_states,
)
from hybrid_kv.check.guard.step import RuleError, common_prefix
from hybrid_kv.config import HybridKVError
from hybrid_kv.engine.kv_transfer import KVTransfer
from hybrid_kv.engine.llm import LLM
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.models.exact import ExactConfig
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import Request
from hybrid_kv.sampling import SamplingParams

# Among them latents, a window alone, and three and five parts of a state.
LAYERS = ("M*", "*M", "M*M", "M", "*", "T*", "*V", "ML", "W*", "M~*", "=M+")
MAX_MODEL_LEN = 96
NUM_REQUESTS = 6
NUM_AGAIN = 2
SEEN = (
    "handed over",
    "unaligned",
    "behind accepted drafts",
    "hits before",
    "drafts accepted behind",
    "preempted behind",
    "aborted",
    "waited",
    "hits behind",
    "from a draft's row",
    "several states",
    "a window alone",
    "latents",
    "nothing missing",
    "cached on one side",
)


class Arriving(EngineObserver):
    """A check of the blocks of a request that goes on in another engine.

    It has blocks for what is computed, its next token, and states for its drafts; no more.
    """

    def __init__(self, llm: LLM) -> None:
        self._specs = [group.spec for group in llm.plan.config.groups]

    def on_arrival(self, request: Request, logical_blocks: Sequence[BlockIds]) -> None:
        held = [int(np.count_nonzero(ids != NULL_BLOCK)) for ids in logical_blocks]
        num_computed = request.num_computed_tokens
        due = list[int]()
        for spec in self._specs:
            blocks = cdiv(num_computed + 1, spec.block_size)
            if isinstance(spec, MambaSpec):
                # Blocks of states before the last one.
                num_before = (num_computed - 1) // spec.block_size
                states = blocks - num_before if spec.mode.keeps_states else 1
                blocks = states + spec.num_speculative_blocks
            window = window_of(spec)
            if window is not None:
                # No query sees a token of these blocks any more.
                blocks -= max(0, num_computed + 1 - window) // spec.block_size
            due.append(blocks)
        if held != due:
            raise RuleError(
                "arriving",
                f"a request with {num_computed} tokens holds {held} blocks; {due} are due",
            )


class TransferEngine:
    """A prefill or a decode engine with drawn settings, whose drafts follow the right tokens."""

    def __init__(self, rng: random.Random, layers: str) -> None:
        self.book = answer_book(layers)
        mode = rng.choice(["none", "align", "all"]) if num_states(layers) else "attention"
        num_drafts = rng.choice([0, 0, 1, 3])
        self.setting: dict[str, Any] = cache_options(mode, num_drafts, "none")
        if mode == "attention":
            self.setting["enable_prefix_caching"] = rng.random() < 0.5
        self.setting |= {
            "async_scheduling": rng.random() < 0.4,
            "attention_backend": rng.choice([SmallBlocksFirst.name, SmallKVFirst.name]),
            "max_num_batched_tokens": rng.choice([12, 64]),
            "max_num_seqs": rng.choice([2, 4]),
            "num_blocks": rng.choice([44, 90]),
        }
        if has_attention(layers):
            self.setting["block_size"] = rng.choice([8, 12, 16])
        else:
            self.setting["mamba_block_size"] = rng.choice([8, 16])
        if num_states(layers):
            self.setting["state_scheme"] = rng.choice(["slots", "recompute"])
        self.sequences: list[list[int]] = []  # by request, prompt and answer
        self.lengths: list[int] = []
        script = rng.choice(["right", "mixed", "rotate"])
        vocab_size = self.book.model.vocab_size
        proposer = None
        if num_drafts:
            proposer = ScriptedProposer(
                script, num_drafts, self.sequences, self.lengths, 8, vocab_size
            )
        self.llm = LLM(
            self.book.model,
            device="cpu",
            max_model_len=MAX_MODEL_LEN,
            sanitize=True,
            proposer=proposer,
            **self.setting,
        )
        self.llm.observers.append(Arriving(self.llm))
        poison(self.llm)

    def expect(self, prompt: list[int], params: SamplingParams) -> None:
        """Return the next request of this engine."""
        self.sequences.append([*prompt, *self.book.without_stop(prompt, params, MAX_MODEL_LEN)])
        self.lengths.append(len(prompt))

    def add(self, prompt: list[int], params: SamplingParams) -> Request:
        self.expect(prompt, params)
        return self.llm.add_request(prompt, params)

    def receive_request(self, kv_transfer: KVTransfer) -> Request:
        self.expect(kv_transfer.prompt_token_ids, kv_transfer.params)
        return self.llm.receive_request(kv_transfer)


class Pair:
    """A prefill engine, a decode engine, and requests that go from one to the other.

    Attributes:
        seen: how often each of `SEEN` happened.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        layers = LAYERS[seed % len(LAYERS)]
        self.prefill = TransferEngine(rng, layers)
        self.decode = TransferEngine(rng, layers)
        self._book = answer_book(layers)
        self.seen: Counter[str] = Counter()
        # The number of each request that was handed over, and the request there.
        self._went: list[tuple[int, Request]] = []
        self._done: dict[Request, str] = {}  # why each has ended
        self._num_steps = 0
        self.name = f"seed {seed}, {layers}: {self.prefill.setting} to {self.decode.setting}"
        vocabulary = ExactConfig.vocab_size
        shared = [rng.randrange(vocabulary) for _ in range(35)]
        self.requests: list[tuple[list[int], SamplingParams]] = []
        for _ in range(NUM_REQUESTS):
            unshared = [rng.randrange(vocabulary) for _ in range(rng.choice([1, 5, 12]))]
            prompt = shared[: rng.choice([0, 8, 16, 24, 31, 35])] + unshared
            noise: dict[str, Any] = rng.choice(
                [{}, {"temperature": 1.0, "seed": rng.randrange(99)}]
            )
            params = SamplingParams(max_tokens=rng.choice([2, 9, 14]), **noise)
            self.requests.append((prompt, params))
        # The longest come again, when the other side may have all of them.
        self.requests += sorted(self.requests, key=lambda request: len(request[0]))[-NUM_AGAIN:]

    def problems(self) -> Iterator[str]:
        """Yield what is wrong; nothing if all is well."""
        prefill = self.prefill.llm
        decode = self.decode.llm
        here = dict[Request, int]()
        for first, end in ((0, NUM_REQUESTS), (NUM_REQUESTS, NUM_REQUESTS + NUM_AGAIN)):
            here |= {self.prefill.add(*self.requests[i]): i for i in range(first, end)}
            while prefill.scheduler.has_requests or decode.scheduler.has_requests:
                self._step(here)
        ended_here = [(i, request) for request, i in here.items() if request in self._done]
        for i, request in [*ended_here, *self._went]:
            yield from self._wrong(i, request, self._done[request])
        self.seen["hits before"] += sum(request.hit.num_tokens > 0 for request in here)
        self.seen["drafts accepted behind"] += sum(
            new.num_accepted_draft_tokens > 0 for _, new in self._went
        )
        yield from self._again()
        for who, llm in (("prefill", prefill), ("decode", decode)):
            llm.scheduler.check_integrity()
            held = llm.manager.pool.num_blocks - 1 - llm.manager.pool.num_free_blocks
            if held:
                yield f"the {who} engine holds {held} blocks for no request"

    def _step(self, here: Mapping[Request, int]) -> None:
        """Step both engines; hand over what has its first token, or keep it a while."""
        prefill = self.prefill.llm
        decode = self.decode.llm
        self._num_steps += 1
        if prefill.scheduler.has_requests:
            self._done |= dict(prefill.step())
        for request in list(prefill.scheduler.running):
            if request.output_token_ids and self.rng.random() < 0.6:
                handed_over = self._go(request)
                if handed_over is not None:
                    self._went.append((here[request], handed_over))
        self.seen["waited"] += any(
            request.arrival is not None for request in decode.scheduler.waiting
        )
        if self._num_steps % 5 == 4 and len(decode.scheduler.running) > 1:
            decode.scheduler.preempt(decode.scheduler.running[-1])
            self.seen["preempted behind"] += 1
        if self._num_steps == 7 and decode.scheduler.running:
            decode.abort(decode.scheduler.running[0].request_id)
            self.seen["aborted"] += 1
        if decode.scheduler.has_requests:
            self._done |= dict(decode.step())

    def _go(self, request: Request) -> Request | None:
        """Hand a request over, if the step in flight does not end it.

        Its blocks are reused at once.
        """
        row = request.row
        try:
            kv_transfer = self.prefill.llm.send_request(request)
        except HybridKVError as error:
            if "ends with the step in flight" not in str(error):
                raise
            return None
        poison_free_blocks(self.prefill.llm)
        self.seen["handed over"] += 1
        self.seen["from a draft's row"] += int(self.prefill.llm.runner.cursors.window_row[row]) > 0
        self.seen["several states"] += any(len(parts) > 2 for parts in kv_transfer.layers.values())
        specs = self.prefill.llm.model.layer_specs
        self.seen["a window alone"] += any(
            not state_part.nbytes for parts in kv_transfer.layers.values() for state_part in parts
        )
        self.seen["latents"] += any(isinstance(spec, MLAAttentionSpec) for spec in specs.values())
        sides = {side.llm.manager.enable_prefix_caching for side in (self.prefill, self.decode)}
        self.seen["cached on one side"] += len(sides) == 2
        self.seen["nothing missing"] += self._has_all(kv_transfer)
        self.seen["unaligned"] += kv_transfer.num_computed_tokens % 8 > 0
        self.seen["behind accepted drafts"] += request.num_accepted_draft_tokens > 0
        return self.decode.receive_request(kv_transfer)

    def _has_all(self, kv_transfer: KVTransfer) -> bool:
        """Return whether the other side could restore all whole blocks of the request itself."""
        manager = self.decode.llm.manager
        known = kv_transfer.num_computed_tokens
        tokens = [*kv_transfer.prompt_token_ids, *kv_transfer.output_token_ids]
        hit = manager.find_longest_cache_hit(BlockHashes(), tokens, use_offload=False)
        return 0 < hit.num_tokens == known // manager.hit_granularity * manager.hit_granularity

    def _wrong(self, i: int, request: Request, reason: str) -> Iterator[str]:
        expected = self._book.answer(*self.requests[i], MAX_MODEL_LEN)
        if reason == "abort":
            expected = expected[: len(request.output_token_ids)]
        if request.output_token_ids != expected:
            first = common_prefix(request.output_token_ids, expected)
            length = len(self.requests[i][0])
            yield f"request {i} ({length} prompt tokens) differs at output token {first}"

    def _again(self) -> Iterator[str]:
        """Check that requests of the decode engine find what it published.

        These are prompts, and answers that it went on with.
        """
        decode = self.decode
        again: list[tuple[list[int], SamplingParams, Request]] = []
        for prompt, params in self.requests[:3]:
            longer = [*prompt, *self._book.answer(prompt, params, MAX_MODEL_LEN), 1]
            params = SamplingParams(max_tokens=4)
            again.append((longer, params, decode.add(longer, params)))
        while decode.llm.scheduler.has_requests:
            decode.llm.step()
        for prompt, params, request in again:
            self.seen["hits behind"] += request.hit.num_tokens > 0
            if request.output_token_ids != self._book.answer(prompt, params, MAX_MODEL_LEN):
                yield (
                    f"a prompt of {len(prompt)} tokens, {request.hit.num_tokens} "
                    "of them found, is continued wrongly"
                )


def drafts_behind(seed: int) -> CheckResult:
    """Hand over requests of a random model, and compare the drafts of its head with those alone."""
    from hybrid_kv.models.random_checkpoint import quiet, write_checkpoint

    mode = ("align", "all", "none")[seed % 3]
    options = {"mamba_cache_mode": mode, "speculative_method": "mtp", "num_speculative_tokens": K}
    order: list[int] = []
    recorder = DraftRecorder(order)
    done = dict[int, list[int]]()
    with tempfile.TemporaryDirectory() as folder, quiet():
        write_checkpoint("nemotron_h", folder)
        alone = Alone(folder, seed)
        prefill = alone.engine(**options)
        decode = alone.engine(**options)
        decode.observers.append(recorder)
        sent = [prefill.add_request(prompt, alone.params) for prompt in alone.prompts]
        while prefill.scheduler.has_requests or decode.scheduler.has_requests:
            for request, _ in prefill.step() if prefill.scheduler.has_requests else ():
                done[sent.index(request)] = request.output_token_ids
            for request in [
                running for running in prefill.scheduler.running if running.output_token_ids
            ]:
                order.append(sent.index(request))
                decode.receive_request(prefill.send_request(request))
                poison_free_blocks(prefill)
            for request, _ in decode.step() if decode.scheduler.has_requests else ():
                done[order[int(request.request_id)]] = request.output_token_ids
        due = alone.drafts_alone(mode)
    num_other = sum(done.get(i) != output.token_ids for i, (output, _) in enumerate(alone.known))
    wrong, count = recorder.compare(due)
    detail = "" if count else "void: no drafts to compare"
    if num_other:
        detail = f"{num_other} requests got other tokens"
    if wrong:
        detail = f"{wrong} of {count} times a request got other drafts than alone"
    return CheckResult(
        "wrong drafts behind KV transfer",
        wrong,
        "drafts",
        "0",
        count,
        detail,
        {"seed": seed, "mode": mode},
    )


@check(
    "kv transfer",
    quick=16,
    full=64,
    long=320,
    seconds=0.15,
    place=37,
    needs="safetensors tokenizers transformers",
)
def check_kv_transfer(run: Run) -> Iterator[CheckResult]:
    """Check that every request gets the oracle's tokens, on whatever side it ends."""
    yield play_seeds(run, Pair, SEEN, "requests continued wrongly after KV transfer", "handed over")
    if run.amount:
        yield drafts_behind(run.seed)
