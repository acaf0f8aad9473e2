"""mlx-lm, in an environment of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_kv.targets.models import model_folder
from hybrid_kv.targets.remote import Remote, python_of
from hybrid_kv.targets.script import beginning, ending, turns_of, with_folder
from hybrid_kv.targets.workers.mlx import LONGEST, SERVER_CACHES, as_on_the_hub

name = "mlx"
size = "tiny"
factors = {
    # kept: a caller goes on with a request's cache; saved: through a file; lru: what the server does.
    "prefix": ("off", "kept", "saved", "lru"),
    "spec": ("none", "draft2"),  # drafts by the same model with a little noise on its weights
    "chunk": ("whole", "17"),  # prefill_step_size
    "batch": ("one", "together"),  # generate_step one after another, or BatchGenerator
}


def start(folder: str, settings: Mapping[str, str]) -> Remote:
    """See `targets.target.Kind`."""
    return Remote(name, python_of(name, "mlx_lm"), folder, settings)


# By level of `prefix`: what is imported, how the store is made, a prompt's cache taken and one given.
_STORES = {
    "off": ("", "", "cache, rest = None, prompt", ""),
    "kept": (
        "",
        "kept = {}\n",
        """begins = [one for one in kept if len(one) < len(prompt) and list(one) == prompt[: len(one)]]
    held = max(begins, key=len, default=())
    cache, rest = (kept.pop(held) if held else None), prompt[len(held) :]""",
        "kept[tuple({tokens})] = {cache}",
    ),
    "lru": (
        "from mlx_lm.models.cache import LRUPromptCache",
        f"store = LRUPromptCache({SERVER_CACHES})\n",
        'cache, rest = store.fetch_nearest_cache("", prompt)',
        'store.insert_cache("", {tokens}, {cache})',
    ),
}


def script(case: Any) -> str | None:
    """Plays a `probes.reproducer.Case` again.

    None where it would take a draft model, caches in files, or requests that come and go.
    """
    level = {factor: case.settings.get(factor, levels[0]) for factor, levels in factors.items()}
    together = level["batch"] == "together"
    asks = [ask for one in case.rounds for ask in one.asks]
    if level["spec"] != "none" or level["prefix"] == "saved" or any(ask.abort_after or ask.after for ask in asks):
        return None
    uses, made, take, give = _STORES[level["prefix"]]
    step = LONGEST if level["chunk"] == "whole" else int(level["chunk"])
    play = _together(step, take, give, case) if together else _one_by_one(step, take, give, case.index)
    changed = _changed(case.model)
    imports = ["import sys", "from pathlib import Path"]
    imports += ["from math import inf"] * ("inf" in str(changed))
    if together:
        imports += ["from mlx_lm.generate import BatchGenerator", uses]
    else:
        imports += ["import mlx.core as mx", "from mlx_lm.generate import generate_step", uses]
        imports += ["from mlx_lm.models.cache import make_prompt_cache"]
    begin = "\n".join([*filter(None, imports), "from mlx_lm.utils import load_model"])
    return f"""{beginning(case, with_folder(case.model))}{begin}

turns = {turns_of(case, one_by_one=False)}
model, _ = load_model(Path(sys.argv[1]){f", model_config={changed}" if changed else ""})
{made}{play}{ending(case, "rows[len(expected) - 1][expected[-1]].item()", "len(prompt) - len(rest)")}"""


def _changed(model: str) -> dict[str, Any]:
    """What mlx-lm has to be told of a checkpoint's config."""
    with model_folder(model) as folder:
        config = json.loads((Path(folder) / "config.json").read_text())
    return {key: value for key, value in as_on_the_hub(config).items() if value != config.get(key)}


def _one_by_one(step: int, take: str, give: str, index: int) -> str:
    given = "\n    " + give.format(tokens="prompt + got", cache="cache") if give else ""
    return f"""prompts = [one for turn in turns for one in turn]
for prompt, most in prompts[: len(prompts) - len(turns[-1]) + {index + 1}]:
    {take}
    cache = cache or make_prompt_cache(model)
    steps = generate_step(mx.array(rest), model, max_tokens=most, prompt_cache=cache, prefill_step_size={step})
    got, rows = map(list, zip(*steps, strict=True)){given}
"""


def _together(step: int, take: str, give: str, case: Any) -> str:
    rows = "\n            rows.setdefault(one.uid, []).append(one.logprobs)" if case.logprob is not None else ""
    given = f"""
        ended = (one.uid for one in found[0] if one.end_of_segment and not one.end_of_prompt)
        for cache, held in generator.extract_cache([*ended]).values():
            {give.format(tokens="held[:]", cache="cache")}""" if give else ""  # fmt: skip
    kept = f"""
            if one.finish_reason is not None:
                {give.format(tokens="one.all_tokens[:]", cache="one.prompt_cache")}""" if give else ""  # fmt: skip
    take = take.replace("\n", "\n    ")
    return f"""generator, answers, rows = BatchGenerator(model, prefill_step_size={step}), {{}}, {{}}
for turn in turns:
    answers.clear(), rows.clear()
    for prompt, most in turn:
        {take}
        held = prompt[: len(prompt) - len(rest)]
        answers[generator.insert([rest], [most], caches=[cache], all_tokens=[held])[0]] = []
    while any(found := generator.next()):{given}
        for one in found[1]:
            answers[one.uid].append(one.token){rows}{kept}
got, rows = [list(one.values())[{case.index}] if one else [] for one in (answers, rows)]
"""
