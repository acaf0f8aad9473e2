"""Runs from files of several programs, told apart by their content.

A line per question: ours, lm-eval's `samples_*.jsonl`, sgl-eval's `output-rs*.jsonl`. The score
alone: sgl-eval's `metrics.json`, the JSON of vLLM's `gsm8k_eval.py --save-results`.
"""

from __future__ import annotations

from pathlib import Path

from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.accuracy import sgl_eval, vllm_gsm8k
from hybrid_kv.measure.accuracy.answers import Answers, Totals, json_document, json_lines, read_text
from hybrid_kv.measure.accuracy.run import STRICT
from hybrid_kv.measure.accuracy.samples import answers_in, results_beside


def read_run(path: str | Path, answer_filter: str = STRICT) -> Answers | Totals:
    """Read a run in any of the formats.

    Args:
        path: a file, or sgl-eval's folder of a run.
        answer_filter: lm-eval's and ours, which say what counts as right.

    Raises:
        HybridKVError: the file is broken, of no known format, or says nothing about accuracy.
    """
    path = Path(path)
    if path.is_dir():
        return sgl_eval.read_folder(path)
    text = read_text(path)
    if path.suffix == ".json":
        document = json_document(text, str(path))
        if sgl_eval.is_metrics(document):
            return sgl_eval.read_metrics(path, document)
        if vllm_gsm8k.is_result(document):
            return vllm_gsm8k.totals(path, text, document)
        raise HybridKVError(
            f"{path} is neither a metrics.json of sgl-eval nor a result of vLLM's gsm8k_eval.py"
        )
    _, first = next(json_lines(text, str(path)), (0, {}))
    if sgl_eval.is_answer(first):
        return sgl_eval.read_repeat(path)
    return answers_in(path.name, str(path), text, answer_filter, results_beside(path))


def read_answers(file: str | Path, answer_filter: str = STRICT) -> Answers:
    """Read a file that has an answer to each question; `.gz` is decompressed.

    Raises:
        HybridKVError: as `read_run`; it has the score alone.
    """
    run = read_run(file, answer_filter)
    if isinstance(run, Totals):
        raise HybridKVError(f"{file} has the score alone; a file with every answer is needed")
    return run
