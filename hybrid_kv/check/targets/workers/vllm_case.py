"""Play of requests over vLLM, a step at a time.

They are those of a target, or the case of a reproducer (`probes.script`). A reproducer contains
this file, so it imports none of its neighbours.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

NUM_LIKELIEST = 5
MOST_IDLE = 1000  # steps; the chunks of all prompts are fewer
LIBRARIES: list[Any] = []  # a library that is collected takes its operators along


def declare_vision() -> None:
    """Declare the operators of torchvision that a CPU build of torch lacks.

    Models that could see want them.
    """
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        LIBRARIES.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


def engine(case: dict[str, Any], model: Any) -> Any:
    import vllm
    from vllm.v1.engine.llm_engine import LLMEngine

    model.kernel_block_size = case["kernel_block_size"]
    model.adapt(model)
    model.register()
    for name in case["changes"]:
        getattr(model, name)()
    folder = tempfile.mkdtemp()
    with open(f"{folder}/config.json", "w") as file:
        json.dump(case["config"], file)
    options = {"enforce_eager": True, "skip_tokenizer_init": True, **case["options"]}
    if case.get("gpu") is not None:
        gpu = sys.modules["vllm_gpu"]
        gpu.finish()
        gpu.choose(case["gpu"], options, model)
    model.add_head(options, folder)
    llm = LLMEngine.from_engine_args(vllm.EngineArgs(folder, **options))
    model.renew(llm)
    return llm


def print_steps(llm: Any) -> None:
    """Print what each step runs."""
    scheduler, number = llm.engine_core.engine_core.scheduler, 0
    schedule = scheduler.schedule

    def and_print(*arguments: Any) -> Any:
        nonlocal number
        found, number = schedule(*arguments), number + 1
        new = {one.req_id for one in found.scheduled_new_reqs}
        rows = []
        for name, count in found.num_scheduled_tokens.items():
            drafts = len(found.scheduled_spec_decode_tokens.get(name, ()))
            is_new, with_drafts = (
                " (new)" * (name in new),
                f", {drafts} of them drafts" * (drafts > 0),
            )
            rows.append(f"request {name.split('-')[0]}{is_new} {count} tokens{with_drafts}")
        print(f"  step {number}: {'; '.join(rows) or 'nothing'}")
        return found

    scheduler.schedule = and_print


def play(
    llm: Any, requests: list[dict[str, Any]], preempt_every: int, first: int = 0
) -> list[dict[str, Any]]:
    """Return the answers to requests, with the fields of `targets.target`.

    The first request is called by the number `first`.
    """
    answers: list[dict[str, Any]] = [{} for _ in requests]
    parts: list[dict[int, Any]] = [{} for _ in requests]  # of n answers, an output has one
    waiting, running = list(range(len(requests))), set[int]()
    undisturbed, step, last = 0, 0, 0
    while waiting or running:
        for i in due(requests, waiting, len(running), step):
            waiting.remove(i)
            try:
                send(llm, str(first + i), requests[i])
                running.add(i)
            except refusals() as error:
                answers[i]["error"] = line_of(error)
        known = sum(map(num_tokens, parts))
        if preempt_every and known - undisturbed >= preempt_every:
            undisturbed = known
            llm.reset_prefix_cache(reset_running_requests=True)
        step += 1
        outputs = llm.step()
        last = step if outputs else last
        if step - last > MOST_IDLE:
            raise RuntimeError(f"{len(running)} requests run, and {MOST_IDLE} steps bring no token")
        for output in outputs:
            if (i := int(output.request_id) - first) not in running:
                continue
            note(output, answers[i], parts[i])
            if not output.finished:
                if not is_to_abort(requests[i], parts[i]):
                    continue
                llm.abort_request([output.request_id])
            running.remove(i)
    return [answer | texts_of(each) for answer, each in zip(answers, parts, strict=True)]


def due(
    requests: list[dict[str, Any]], waiting: list[int], num_running: int, step: int
) -> list[int]:
    """Return the requests among `waiting` that are sent before a step."""
    num_ended = len(requests) - len(waiting) - num_running
    ready = [
        i
        for i in waiting
        if requests[i].get("after", 0) <= num_ended and requests[i].get("step", 0) <= step
    ]
    if ready or num_running:
        return ready
    return waiting[:1]  # a step that nothing runs in is never reached


def note(output: Any, answer: dict[str, Any], parts: dict[int, Any]) -> None:
    """Keep what an output of a step says of a request."""
    answer["cached_tokens"] = output.num_cached_tokens
    if output.prompt_logprobs:
        # The first token has no log-probability.
        answer["prompt_logprobs"] = by_token(output.prompt_logprobs[1:])
    parts |= {part.index: part for part in output.outputs}


def num_tokens(parts: dict[int, Any]) -> int:
    """Return how many tokens a request's answers have together."""
    return sum(len(answer.token_ids) for answer in parts.values())


def is_to_abort(ask: dict[str, Any], parts: dict[int, Any]) -> bool:
    """Return whether each of a request's answers has the tokens after which it is aborted."""
    limit = ask.get("abort_after")
    if limit is None or len(parts) < ask.get("n", 1):
        return False
    return all(len(answer.token_ids) >= limit for answer in parts.values())


def send(llm: Any, name: str, ask: dict[str, Any]) -> None:
    from vllm import SamplingParams

    temperature, n, top_k = ask.get("temperature", 0.0), ask.get("n", 1), ask.get("top_k", 0)
    if n > 1 and not temperature:  # refused; with one token to draw from, a draw is greedy
        temperature, top_k = 1.0, 1
    params = SamplingParams(
        max_tokens=ask["max_tokens"],
        temperature=temperature,
        top_k=top_k,
        top_p=ask.get("top_p", 1.0),
        seed=ask.get("seed"),
        n=n,
        logprobs=NUM_LIKELIEST if ask.get("logprobs") else None,
        prompt_logprobs=NUM_LIKELIEST if ask.get("score") else None,
        ignore_eos=True,
        detokenize=False,
    )
    prompt = {"prompt_token_ids": list(ask["prompt"])}
    if ask.get("salt"):
        prompt["cache_salt"] = ask["salt"]
    llm.add_request(name, prompt, params)


def refusals(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors with which vLLM refuses a request or a setting.

    It has no class for them up to 0.26.
    """
    import vllm.exceptions

    return *more, ValueError, getattr(vllm.exceptions, "VLLMClientError", ValueError)


def by_token(steps: Any) -> list[dict[int, float]]:
    """Return vLLM's log-probabilities as `Answer` has them."""
    return [{token: entry.logprob for token, entry in step.items()} for step in steps]


def texts_of(parts: dict[int, Any]) -> dict[str, Any]:
    texts = [list(parts[i].token_ids) for i in sorted(parts)]
    found: dict[str, Any] = {"token_ids": texts[0] if texts else [], "others": texts[1:]}
    if texts and parts[0].logprobs:
        found["logprobs"] = by_token(parts[0].logprobs)
    return found


def line_of(error: Exception) -> str:
    """Return the message of an error in one line; pydantic's first line is only a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])


def make_tight() -> None:
    """Make the pool of the next engine hold no more than its longest request takes.

    vLLM has no option for that.
    """
    import vllm.v1.engine.core as core
    from vllm.v1.core import kv_cache_utils

    plan: Callable[..., Any] = core.get_kv_cache_configs

    def tight(config: Any, specs: Any, *more: Any) -> Any:
        groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs[0]))
        needed = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
        block = kv_cache_utils._pool_bytes_per_block(config, groups)
        # The first block is the null block.
        config.cache_config.num_gpu_blocks_override = 1 + -(-needed // block)
        return plan(config, specs, *more)

    core.get_kv_cache_configs = tight


def allow_async() -> None:
    """Allow asynchronous scheduling on CPUs.

    vLLM turns it off there, where operators do not need it; the scheduler's code is the same.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def allowing(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(allowing)


def main(case: dict[str, Any], model: Any) -> None:
    import vllm

    print(f"vLLM {vllm.__version__}")
    llm = engine(case, model)
    print_steps(llm)
    for number, one in enumerate(case["rounds"], 1):
        print(f"round {number}, {len(one['requests'])} requests:")
        answers = play(llm, one["requests"], one.get("preempt_every", 0))
    got = answers[case["index"]]["token_ids"][: len(case["expected"])]
    print(f"request {case['index']}: expected {case['expected']}\n           got      {got}")
    sys.stdout.flush()
    os._exit(got != case["expected"])
