"""The tasks: gsm8k_synth (generated, offline) and lm-eval's gsm8k (the hub's or a folder's)."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.config import ConfigError
from hybrid_kv.files import read_text
from hybrid_kv.models.config_file import HUB_SECONDS, first_line, hub_answers

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask

TASKS = ("gsm8k_synth", "gsm8k")
GSM8K_FILES = ("train.jsonl", "test.jsonl")
# What lm-eval's filters give when they find nothing, and what a rejected request gets: the engine's
# own message has numbers, which `flexible-extract` would take for the answer.
NO_ANSWER = "[invalid]"
FEWSHOT_SEED = (
    1234  # lm-eval's default: seed 0 gives the prompts that `lm_eval --tasks gsm8k` gives
)


def check_task(task: str, gsm8k_dir: str | Path | None = None, limit: int | None = None) -> None:
    """Refuse a task that cannot be loaded, before anything slow starts.

    Raises:
        ConfigError: an unknown task, a limit below 1, or a folder without readable GSM8K files.
    """
    if task not in TASKS:
        raise ConfigError(f"task {task!r} is unknown; use one of {', '.join(TASKS)}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} must be an integer >= 1")
    if gsm8k_dir is None:
        return
    if task != "gsm8k":
        raise ConfigError(
            f"gsm8k_dir={gsm8k_dir} is for task gsm8k; {task} makes its own documents"
        )
    for name in GSM8K_FILES:
        _check_jsonl(Path(gsm8k_dir) / name)


def _check_jsonl(file: Path) -> None:
    try:
        lines = read_text(file).removesuffix("\n").split("\n")
    except OSError as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{file}: {reason}; the folder must hold {' and '.join(GSM8K_FILES)}"
        ) from None
    if lines == [""]:
        raise ConfigError(f"{file} is empty")
    for number, line in enumerate(lines, 1):
        try:
            doc = json.loads(line)
            fine = isinstance(doc["question"], str) and isinstance(doc["answer"], str)
        except (ValueError, KeyError, TypeError, RecursionError):
            fine = False
        if not fine:
            raise ConfigError(
                f"{file} line {number} is not a JSON object with the texts question and answer"
            )


def load_task(
    task: str, seed: int = 0, limit: int | None = None, gsm8k_dir: str | Path | None = None
) -> ConfigurableTask:
    """Load an lm-eval task, ready for `lm_eval.evaluate`.

    Args:
        task: one of `TASKS`.
        seed: of the documents (gsm8k_synth) or of the choice of shots (gsm8k).
        limit: how many documents will be used; only gsm8k_synth, which makes no more, uses it.
        gsm8k_dir: a folder with train.jsonl and test.jsonl; None loads gsm8k from the hub.

    Raises:
        ConfigError: the task is unknown or its documents cannot be had.
    """
    check_task(task, gsm8k_dir, limit)
    from lm_eval.tasks import TaskManager

    config = _synth_config(seed, limit) if task == "gsm8k_synth" else _gsm8k_config(gsm8k_dir)
    if task == "gsm8k" and gsm8k_dir is None:
        _require_hub(config["dataset_path"])
    with quiet_lm_eval():
        try:
            # Without lm-eval's own tasks, whose index takes 10 s to read.
            loaded = TaskManager(include_defaults=False).load([config])["tasks"][task]
        except (
            Exception
        ) as error:  # datasets and the hub's client raise many unrelated types for "cannot be had"
            if task == "gsm8k_synth":
                raise
            where = (
                f"from {gsm8k_dir}"
                if gsm8k_dir is not None
                else "from the hub; offline, give --gsm8k-dir"
            )
            raise ConfigError(f"gsm8k cannot be loaded {where} ({first_line(error)})") from None
    shots = loaded.config.num_fewshot
    if gsm8k_dir is not None:
        there = len(loaded.training_docs())
        if there < shots:
            raise ConfigError(
                f"{gsm8k_dir}: train.jsonl has {there} questions, a prompt shows {shots} of them"
            )
    loaded.set_fewshot_seed(FEWSHOT_SEED + seed)
    return loaded


def question_hashes(
    task: str,
    seed: int,
    limit: int,
    gsm8k_dir: str | Path | None = None,
    template: Callable[..., str] | None = None,
) -> dict[int, tuple[str, str]]:
    """Return lm-eval's hashes of document and prompt of each question, by doc_id.

    The task is not run.

    Args:
        template: of conversations, where the run applies it.

    Raises:
        ConfigError: as `load_task`.
    """
    from lm_eval.utils import handle_non_serializable, hash_string

    hashes = {}
    for request in _requests(task, seed, limit, gsm8k_dir, template):
        doc = json.dumps(request.doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
        hashes[request.doc_id] = (hash_string(doc), hash_string(request.arguments[0]))
    return hashes


def prompts(task: str, seed: int, limit: int, gsm8k_dir: str | Path | None = None) -> list[str]:
    """Return the texts of the first questions, with their shots, as a model gets them.

    Raises:
        ConfigError: as `load_task`.
    """
    return [request.arguments[0] for request in _requests(task, seed, limit, gsm8k_dir)]


def _requests(
    task: str,
    seed: int,
    limit: int,
    gsm8k_dir: str | Path | None,
    template: Callable[..., str] | None = None,
) -> list[Instance]:
    loaded = load_task(task, seed, limit, gsm8k_dir)
    with quiet_lm_eval(), redirect_stderr(io.StringIO()):  # its bar cannot be switched off
        chat = {} if template is None else {"apply_chat_template": True, "chat_template": template}
        loaded.build_all_requests(limit=limit, rank=0, world_size=1, **chat)
    return list(loaded.instances)


def _synth_config(seed: int, limit: int | None) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    config: dict[str, Any] = load_yaml(Path(__file__).parent / "gsm8k_synth.yaml")
    config["metadata"] |= {"dataset_seed": seed} | (
        {"num_docs": limit} if limit is not None else {}
    )
    return config


def _gsm8k_config(folder: str | Path | None) -> dict[str, Any]:
    """Return lm-eval's gsm8k.yaml; a folder replaces its documents and nothing else."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    config: dict[str, Any] = load_yaml(Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml")
    if folder is not None:
        files = {Path(name).stem: str(Path(folder).resolve() / name) for name in GSM8K_FILES}
        config |= {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files},
        }
    return config


def _require_hub(dataset: str) -> None:
    """Raise if the hub does not answer.

    Its client would retry for most of a minute, and print that.
    """
    from huggingface_hub import is_offline_mode

    if not is_offline_mode() and not hub_answers(dataset, "README.md", "dataset"):
        raise ConfigError(
            f"{dataset} cannot be loaded, the hub does not answer within {HUB_SECONDS} s; give "
            "--gsm8k-dir, or set HF_HUB_OFFLINE=1 to use an earlier download"
        )


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Keep lm-eval's advice and datasets' bars off the terminal."""
    import datasets

    log = logging.getLogger("lm_eval")
    level = log.level
    bars = datasets.are_progress_bars_disabled()
    log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        log.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
