# The end of a reproducer, see `probes.script`: plays a case over vLLM alone. `model` is the module that has `register`.

import json
import os
import sys
import tempfile
from typing import Any

LIBRARIES: list[Any] = []  # a library that is collected takes its operators along


def declare_vision() -> None:
    """Declare the operators of torchvision that a CPU build of torch lacks, and models that could see want."""
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
            is_new, with_drafts = " (new)" * (name in new), f", {drafts} of them drafts" * (drafts > 0)
            rows.append(f"request {name.split('-')[0]}{is_new} {count} tokens{with_drafts}")
        print(f"  step {number}: {'; '.join(rows) or 'nothing'}")
        return found

    scheduler.schedule = and_print


def play(llm: Any, requests: list[dict[str, Any]], preempt_every: int) -> list[list[int]]:
    """As `Engine.ask` of `vllm.py` does, without aborted requests' last tokens."""
    from vllm import SamplingParams

    found: list[list[int]] = [[] for _ in requests]
    waiting, running, step, undisturbed = list(range(len(requests))), set[int](), 0, 0
    while waiting or running:
        ended = len(requests) - len(waiting) - len(running)
        ready = [i for i in waiting if requests[i].get("after", 0) <= ended and requests[i].get("step", 0) <= step]
        for i in ready or (waiting[:1] if not running else []):
            one = requests[i]
            waiting.remove(i)
            running.add(i)
            prompt = {"prompt_token_ids": list(one["prompt"])} | (
                {"cache_salt": one["salt"]} if one.get("salt") else {}
            )
            params = SamplingParams(
                max_tokens=one["max_tokens"], temperature=one.get("temperature", 0.0), seed=one.get("seed"),
                ignore_eos=True, detokenize=False,
            )  # fmt: skip
            llm.add_request(str(i), prompt, params)
        known = sum(map(len, found))
        if preempt_every and known - undisturbed >= preempt_every:
            undisturbed = known
            llm.reset_prefix_cache(reset_running_requests=True)
        step += 1
        for output in llm.step():
            i = int(output.request_id)
            found[i] = list(output.outputs[0].token_ids)
            limit = requests[i].get("abort_after")
            if limit is not None and not output.finished and len(found[i]) >= limit:
                llm.abort_request([output.request_id])
            elif not output.finished:
                continue
            running.discard(i)
    return found


def main(case: dict[str, Any], model: Any) -> None:
    import vllm

    print(f"vLLM {vllm.__version__}")
    llm = engine(case, model)
    print_steps(llm)
    for number, one in enumerate(case["rounds"], 1):
        print(f"round {number}, {len(one['requests'])} requests:")
        answers = play(llm, one["requests"], one.get("preempt_every", 0))
    got = answers[case["index"]][: len(case["expected"])]
    print(f"request {case['index']}: expected {case['expected']}\n           got      {got}")
    sys.stdout.flush()
    os._exit(got != case["expected"])
