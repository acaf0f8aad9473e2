"""Multiple choice, perplexity and chat by lm-eval's command line, against lm-eval's `hf`."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_kv.check.guard_model import FOLDER, problems
from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.measure.accuracy import tasks
from tests.measure.accuracy.lm import engine_model, instance

REGISTER = str(Path(tasks.__file__).parent / "register.yaml")
ITEMS = problems.eval_set(5, 12, shots=2)
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt "
    "%} Say:{% endif %}"
)


@pytest.fixture
def task_files(tmp_path: Path) -> dict[str, str]:
    """Write a multiple-choice task and a perplexity task over the same documents, a file each."""
    docs = []
    for i, item in enumerate(ITEMS):
        lines = item.answer.rsplit(" ", 1)[0]
        choices = [f"{lines} {item.final + delta}" for delta in (0, 1, 10)] + ["1+1=2\n#### 2"]
        docs.append(
            {
                "question": item.prompt,
                "choices": choices[i % 4 :] + choices[: i % 4],
                "label": -i % 4,
            }
        )
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
        "test_split": "test",
    }
    choice = source | {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    rolling = source | {
        "task": "perplexity",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    files = {}
    for config in (choice, rolling):
        file = tmp_path / f"{config['task']}.yaml"
        file.write_text(yaml.safe_dump(config))
        files[str(config["task"])] = str(file)
    return files


Samples = dict[str, list[dict[str, Any]]]


@pytest.fixture
def run_lm_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, Any], Samples]]:
    """Run lm-eval's command line in this process, without its index of tasks (10 s)."""
    import lm_eval.tasks
    from lm_eval.__main__ import cli_evaluate

    monkeypatch.setattr(
        lm_eval.tasks,
        "TaskManager",
        functools.partial(lm_eval.tasks.TaskManager, include_defaults=False),
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[dict[str, Any], Samples]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        monkeypatch.setattr(
            "sys.argv", ["lm_eval", *arguments, "--output_path", str(out), "--log_samples"]
        )
        cli_evaluate()
        (results,) = out.rglob("results_*.json")
        samples = {
            file.name.removeprefix("samples_").rsplit("_", 1)[0]: [
                json.loads(line) for line in file.read_text().splitlines()
            ]
            for file in out.rglob("samples_*.jsonl")
        }
        return json.loads(results.read_text()), samples

    return call


def scores(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    """Return each choice's log-likelihood and greediness; True for a whole text, which lacks it."""
    found = [response for (response,) in sample["resps"]]  # lm-eval writes them as texts
    return [
        (float(one[0]), one[1] == "True") if isinstance(one, list) else (float(one), True)
        for one in found
    ]


def test_choices_and_texts_score_as_under_hf(
    task_files: dict[str, str], run_lm_eval: Callable[..., tuple[dict[str, Any], Samples]]
) -> None:
    # In float32 a score of -80 is 1.1e-4 from that in float64 here, 3e-5 under hf: improbable
    # tokens have large logits.
    exact = f"pretrained={FOLDER},dtype=float64,mamba_ssm_cache_dtype=float64"
    tasks = ",".join([REGISTER, *task_files.values()])
    ours, our_samples = run_lm_eval("--model", "hybrid_kv", "--model_args", exact, "--tasks", tasks)
    theirs, their_samples = run_lm_eval(
        "--model",
        "hf",
        "--model_args",
        f"pretrained={FOLDER},dtype=float32",
        "--tasks",
        ",".join(task_files.values()),
        "--device",
        "cpu",
    )
    assert our_samples.keys() == their_samples.keys() == {"choices", "perplexity"}
    num_scores = 0
    for task, samples in our_samples.items():
        for one, other in zip(samples, their_samples[task], strict=True):
            assert (one["prompt_hash"], one["doc_id"]) == (other["prompt_hash"], other["doc_id"])
            for (value, greedy), (expected, expected_greedy) in zip(
                scores(one), scores(other), strict=True
            ):
                assert abs(value - expected) <= 1e-4
                assert greedy == expected_greedy
                num_scores += 1
    assert num_scores == len(ITEMS) * 5
    picked = [max(range(4), key=lambda i: scores(one)[i]) for one in our_samples["choices"]]
    assert picked == [
        max(range(4), key=lambda i: scores(one)[i]) for one in their_samples["choices"]
    ]
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["results"]["choices"][metric] == theirs["results"]["choices"][metric]
    assert ours["results"]["choices"]["acc,none"] == 1  # a trained model, which knows the right one


def test_lm_evals_other_options_reach_the_engine(
    run_lm_eval: Callable[..., tuple[dict[str, Any], Samples]], caplog: pytest.LogCaptureFixture
) -> None:
    synth = str(Path(REGISTER).with_name("gsm8k_synth.yaml"))
    results, samples = run_lm_eval(
        "--model",
        "hybrid_kv",
        "--tasks",
        synth,
        "--limit",
        "3",
        "--num_fewshot",
        "2",
        "--batch_size",
        "2",
        "--gen_kwargs",
        "max_gen_toks=4",
    )
    assert results["n-shot"]["gsm8k_synth"] == 2 and results["config"]["gen_kwargs"] == {
        "max_gen_toks": 4
    }
    own = [sample for sample in samples["gsm8k_synth"] if sample["filter"] == "strict-match"]
    assert len(own) == 3
    for sample in own:
        assert sample["arguments"]["gen_args_0"]["arg_0"].count("Answer:") == 3
        ((text,),) = sample["resps"]
        assert 0 < len(text) <= 4 * 2  # its tokens are digits and signs, a space before some
    assert "at most 2 requests run at once" in caplog.text


def test_a_chat_template_makes_the_prompts(
    tmp_path: Path,
    task_files: dict[str, str],
    run_lm_eval: Callable[..., tuple[dict[str, Any], Samples]],
) -> None:
    chat = tmp_path / "chat"
    shutil.copytree(FOLDER, chat, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    file = chat / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    arguments = (
        "--model",
        "hybrid_kv",
        "--tasks",
        f"{REGISTER},{task_files['choices']}",
        "--limit",
        "2",
    )
    results, samples = run_lm_eval(
        *arguments, "--model_args", f"pretrained={chat}", "--apply_chat_template"
    )
    assert results["chat_template"] == TEMPLATE
    for sample, item in zip(samples["choices"], ITEMS[:2], strict=True):
        assert sample["arguments"]["gen_args_0"]["arg_0"] == item.prompt + " Say:"
    with pytest.raises(
        HybridKVError, match="has no chat template; leave --apply_chat_template out"
    ):
        run_lm_eval(*arguments, "--apply_chat_template")


def test_a_text_longer_than_the_model_is_scored_in_windows() -> None:
    def rolling(max_model_len: int) -> float:
        lm = engine_model(progress=False, device="cpu", max_model_len=max_model_len)
        (total,) = lm.loglikelihood_rolling([instance("loglikelihood_rolling", (ITEMS[0].prompt,))])
        return total

    whole, cut = rolling(512), rolling(64)
    assert cut < whole < 0  # the windows see less of the text

    lm = engine_model(progress=False, device="cpu", max_model_len=64)
    ids = [lm.prefix_token_id, *lm.tok_encode(ITEMS[0].prompt)]
    assert len(ids) > 2 * lm.max_length
    total = 0.0
    for start in range(0, len(ids) - 1, lm.max_length):
        tokens = ids[start + 1 : start + 1 + lm.max_length]
        context = ids[max(0, start + 1 + len(tokens) - lm.max_length - 1) : start + 1]
        total += lm._loglikelihood_tokens([(None, context, tokens)])[0][0]
    assert cut == pytest.approx(total, abs=1e-4)


def test_a_context_that_is_too_long_loses_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    lm = engine_model(progress=False, device="cpu", max_model_len=64)
    context = lm.tok_encode(ITEMS[0].prompt)
    ((long, _), (short, _)) = lm._loglikelihood_tokens(
        [(None, context, [7, 8]), (None, context[-62:], [7, 8])]
    )
    assert long == short
    assert "1 of 2 contexts were cut from the left" in caplog.text
    for wrong in ([], [7] * 64):
        with pytest.raises(
            HybridKVError, match=f"continuation of {len(wrong)} tokens cannot be scored"
        ):
            lm._loglikelihood_tokens([(None, context, wrong)])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"batch_size": 1}, None),
        ({"batch_size": "auto:4"}, None),
        ({"batch_size": "16"}, 16),
        ({"batch_size": "auto", "max_batch_size": 8}, 8),
        ({"batch_size": 16, "max_num_seqs": 3}, 3),
    ],
)
def test_batch_sizes_are_requests_at_once(
    arguments: dict[str, Any], expected: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    lm = engine_model(device="cpu", max_model_len=64, **arguments)
    default = engine_model(device="cpu", max_model_len=64).llm.config.scheduler.max_num_seqs
    assert lm.llm.config.scheduler.max_num_seqs == (expected or default)
    assert ("batch_size" in caplog.text) == (expected is not None)


def test_a_batch_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size='many' must be a number or auto"):
        engine_model(batch_size="many")


class _Words:
    """A tokenizer that adds a bos, as those of many checkpoints do."""

    bos_token, bos_token_id, eos_token_id = "<s>", 1, None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [1 if word == "<s>" else 2 for word in text.split()]
        return [1, *ids] if add_special_tokens else ids

    def decode(self, token_ids: list[int]) -> str:
        return " ".join("x" for _ in token_ids)


def test_a_text_with_a_bos_gets_no_second_one() -> None:
    lm = engine_model(
        llm=LLM(FOLDER, tokenizer=_Words(), device="cpu", max_model_len=64), progress=False
    )
    assert lm.tok_encode("a b") == [1, 2, 2]
    assert lm.tok_encode("<s> a b") == [1, 2, 2]
    assert lm.tok_encode("a b", add_special_tokens=False) == [2, 2]
    sent = [
        instance("generate_until", (text, {"until": []}), i)
        for i, text in enumerate(("a", "<s> a"))
    ]
    lm.generate_until(sent)
    assert [lm.outputs["toy", i][0].prompt_token_ids for i in range(2)] == [[1, 2]] * 2
