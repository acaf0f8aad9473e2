"""SGLang's scheduler in this process, its own event loop, and requests that are played in it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import hicache, kernels

MOST_IDLE = 2000  # steps that bring no token; the chunks of all prompts are fewer
IDLE_STEPS = 3  # until the last results are processed and SGLang has checked its pools


class EndOfPlay(BaseException):
    """Ends SGLang's loop."""


def checkpoint_of(config: dict[str, Any]) -> str:
    """Return the folder of a checkpoint in which SGLang sees the exact model's configuration."""
    folder = tempfile.mkdtemp()
    width = config["head_dim"]
    about = {**config, "model_type": kernels.MODEL_TYPE, "hidden_size": 2 * width + 1}
    with open(f"{folder}/config.json", "w") as file:
        json.dump(about, file)
    return folder


class SglangScheduler:
    """A scheduler with the exact model, as the process of a server has it.

    Args:
        config: of the exact model's checkpoint.
        options: SGLang's server arguments.
        changes: names of attributes of SGLang's scheduler module, and their values.

    Raises:
        ValueError: SGLang refuses an option, or overrides it.
    """

    def __init__(
        self, config: dict[str, Any], options: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> None:
        from sglang.srt.managers import scheduler as module
        from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        from . import graphs, model

        kind = next(layer["kind"] for layer in config["exact"]["layers"] if layer["kind"])
        model.register(kind, options["attention_backend"])
        kernels.chunk_size = config["mamba_chunk_size"]
        if options.get("enable_hierarchical_cache"):
            hicache.install()
        for name, value in changes.items():
            setattr(module, name, value)
        args: Any = ServerArgs(model_path=checkpoint_of(config), **options)
        if hasattr(args, "resolve"):  # where that is not done at once
            args.resolve()
        for name, value in options.items():
            if name in CHECKED and getattr(args, name) != value:
                raise ValueError(f"SGLang took {name}={value} and made it {getattr(args, name)}")
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        sender: Any = SenderWrapper
        sender.send_output = lambda _, output, request=None: self._receive(output)
        self._counts = dict.fromkeys(("hits", "verifications", "accepted", "preemptions"), 0.0)
        self._num_drafts = options.get("speculative_num_draft_tokens", 1) - 1
        self._play: RequestPlay | None = None
        self._num_sent = 0
        self.scheduler = module.Scheduler(args, PortArgs.init_new(args))
        if "cuda_graph_bs_decode" in options:
            graphs.install(self.scheduler.tp_worker.model_runner)
        self.scheduler.request_receiver = self
        self.report: Callable[[Any], None] = lambda batch: None
        run_batch = self.scheduler.run_batch

        def run_and_report(batch: Any, *arguments: Any, **named: Any) -> Any:
            self.report(batch)
            return run_batch(batch, *arguments, **named)

        self.scheduler.run_batch = run_and_report
        self.fill_with_noise()

    def recv_requests(self, local_reqs: Any = None) -> list[Any]:
        """Return what SGLang's loop receives in this step: it calls this in place of a socket."""
        assert self._play is not None
        return [*(local_reqs or []), *self._play.step(self.scheduler)]

    def _receive(self, output: Any) -> None:
        if self._play is not None:
            self._play.receive(output, self._counts)

    def ask(self, requests: list[dict[str, Any]], preempt_every: int = 0) -> list[dict[str, Any]]:
        """Play requests until all have ended; answers have the fields of `targets.target`."""
        self._play = RequestPlay(requests, preempt_every, self._num_sent)
        self._num_sent += len(requests)
        try:
            self.scheduler.run_event_loop()
        except EndOfPlay:
            return self._play.answers
        raise RuntimeError("SGLang's event loop has ended")

    def counters(self) -> dict[str, float]:
        """Return what occurred since the start; each verification is of as many drafts."""
        return {**self._counts, "drafts": self._num_drafts * self._counts["verifications"]}

    def reset(self) -> None:
        """Forget the prefix cache.

        Raises:
            RuntimeError: SGLang says that it did not.
        """
        if not self.scheduler.flush_cache():
            raise RuntimeError("flush_cache says that it did not")
        self.fill_with_noise()

    def fill_with_noise(self) -> None:
        """Fill the pools, in which nothing is held, with numbers that are no token's.

        What a request reads before it wrote it then shows.
        """
        noise = torch.Generator().manual_seed(0)
        worker = self.scheduler.tp_worker.model_runner
        states = worker.req_to_token_pool.mamba_pool.mamba_cache
        pool = getattr(worker.token_to_kv_pool, "full_kv_pool", worker.token_to_kv_pool)
        for buffer in (*states.conv, states.temporal):
            buffer.random_(1, kernels.PRIME, generator=noise)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.view(torch.int32).random_(1, kernels.PRIME, generator=noise)


# SGLang overrides some options by itself.
CHECKED = (
    "disable_radix_cache",
    "disable_overlap_schedule",
    "page_size",
    "chunked_prefill_size",
    "enable_mixed_chunk",
    "mamba_radix_cache_strategy",
    "mamba_track_interval",
    "speculative_algorithm",
    "enable_hierarchical_cache",
)


class RequestPlay:
    """Requests that are played together, and what has become of them.

    Args:
        first: number of the first request, by which it is called.
    """

    def __init__(self, requests: list[dict[str, Any]], preempt_every: int, first: int) -> None:
        self.answers: list[dict[str, Any]] = [{"token_ids": []} for _ in requests]
        self._requests = requests
        self._preempt_every = preempt_every
        self._first = first
        self._waiting = list(range(len(requests)))
        self._running = set[int]()
        self._aborted = set[int]()
        self._step = self._last_step = self._undisturbed = self._known = self._idle = 0

    def _name(self, i: int) -> str:
        return f"{self._first + i:08d}"  # SGLang ends all requests whose names begin with a name

    def step(self, scheduler: Any) -> list[Any]:
        """Return what is sent before a step.

        Raises:
            RuntimeError: requests run and bring no token.
        """
        self._step += 1
        known = sum(len(answer["token_ids"]) for answer in self.answers)
        if known != self._known or not self._running:
            self._known = known
            self._last_step = self._step
        if self._step - self._last_step > MOST_IDLE:
            raise RuntimeError(
                f"{len(self._running)} requests run, and {MOST_IDLE} steps bring no token"
            )
        messages = self._arrivals()
        for i in sorted(self._running - self._aborted):
            limit = self._requests[i].get("abort_after")
            if limit is not None and len(self.answers[i]["token_ids"]) >= limit:
                self._aborted.add(i)
                messages.append(abort_of(self._name(i)))
        if self._preempt_every and known - self._undisturbed >= self._preempt_every:
            self._undisturbed = known
            messages += preemption()
        if not self._running:
            self._idle += 1
            if self._idle > IDLE_STEPS and scheduler.is_fully_idle():
                raise EndOfPlay
        return messages

    def _arrivals(self) -> list[Any]:
        ended = len(self._requests) - len(self._waiting) - len(self._running)
        ready = [
            i
            for i in self._waiting
            if self._requests[i].get("after", 0) <= ended
            and self._requests[i].get("step", 0) <= self._step
        ]
        # A step that nothing runs in is never reached.
        arrivals = ready or (self._waiting[:1] if not self._running else [])
        for i in arrivals:
            self._waiting.remove(i)
            self._running.add(i)
        return [message_of(self._name(i), self._requests[i]) for i in arrivals]

    def receive(self, output: Any, counters: dict[str, float]) -> None:
        """Take what SGLang sends to its tokenizer."""
        match type(output).__name__:
            case "BatchTokenIDOutput":
                for row, name in enumerate(output.rids):
                    self._take(int(name) - self._first, row, output, counters)
            case "AbortReq":
                self._running.discard(int(output.rid) - self._first)

    def _take(self, i: int, row: int, output: Any, counters: dict[str, float]) -> None:
        answer = self.answers[i]
        answer["token_ids"] += list((output.output_ids or {row: ()})[row])
        answer["cached_tokens"] = output.cached_tokens[row]
        if output.finished_reasons[row] is None:
            return
        self._running.discard(i)
        # With drafts SGLang does not cut an aborted answer at its length.
        answer["token_ids"] = answer["token_ids"][: self._requests[i]["max_tokens"]]
        counters["hits"] += output.cached_tokens[row]
        rows = {
            "preemptions": output.retraction_counts,
            "verifications": output.spec_verify_ct,
            "accepted": output.spec_num_correct_drafts,
        }
        for name, values in rows.items():
            counters[name] += values[row] if values else 0


def message_of(name: str, ask: dict[str, Any]) -> Any:
    """Return a request as SGLang's tokenizer sends it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(
        max_new_tokens=ask["max_tokens"],
        temperature=ask.get("temperature", 0.0),
        ignore_eos=True,
    )
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text=None,
        input_ids=array("q", ask["prompt"]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
        cache_salt=ask.get("salt") or None,
    )


def abort_of(name: str) -> Any:
    """Return what ends a request early."""
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid=name)


def preemption() -> list[Any]:
    """Return what a user sends who pauses all that runs, forgets prefixes, and goes on."""
    from sglang.srt.managers import io_struct

    return [
        io_struct.PauseGenerationReqInput(mode="retract"),
        io_struct.FlushCacheReqInput(),
        io_struct.ContinueGenerationReqInput(),
    ]


def print_steps(engine: SglangScheduler) -> None:
    """Print what each step runs."""
    number = 0

    def report(batch: Any) -> None:
        nonlocal number
        number += 1
        mode = batch.forward_mode.name.lower()
        lengths = getattr(batch, "extend_lens", None) if batch.forward_mode.is_extend() else None
        rows = [
            f"request {int(request.rid)}" + (f" {lengths[i]} tokens" if lengths else "")
            for i, request in enumerate(batch.reqs)
        ]
        print(f"  step {number}, {mode}: {'; '.join(rows)}")

    engine.report = report


def main(case: dict[str, Any]) -> None:
    """Play the case of a reproducer, and end with 1 while its answer is wrong."""
    import sglang

    os.environ |= case["environment"]
    print(f"SGLang {sglang.__version__}")
    engine = SglangScheduler(case["config"], case["options"], case["changes"])
    print_steps(engine)
    answers: list[dict[str, Any]] = []
    for number, sent in enumerate(case["rounds"], 1):
        print(f"round {number}, {len(sent['requests'])} requests:")
        answers = engine.ask(sent["requests"], sent.get("preempt_every", 0))
    got = answers[case["index"]]["token_ids"][: len(case["expected"])]
    print(f"request {case['index']}: expected {case['expected']}\n           got      {got}")
    sys.stdout.flush()
    os._exit(got != case["expected"])
