"""Logits of every token through the engine against transformers' model of the same random weights.

Tolerance: 2e-5 of max|logit|, the difference of chunked and recurrent float32 arithmetic (see
tests/kernels/ssd/test_reference.py). Greedy tokens are compared too, where margins are wider than rounding.
"""

import torch

from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.record import record_logits
from hybrid_kv.guard.exactness import Alone, describe
from hybrid_kv.guard.poison import poison
from hybrid_kv.guard.scenario import SmallKVFirst
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.sampling import SamplingParams
from tests.models.tiny_nemotron import Characters

TOLERANCE = 2e-5
ENGINES = (
    {"max_num_batched_tokens": 200, "attention_backend": "TORCH"},
    {"max_num_batched_tokens": 17, "attention_backend": "FLASH_ATTN", "captured_batch_sizes": (8,)},
    {"max_num_batched_tokens": 7, "attention_backend": SmallKVFirst.name, "captured_batch_sizes": (3, 4)},
)
LENGTHS = (40, 1, 23, 16)


def checkpoint(factory, model_type, keys=None, seed=1, **how):
    """transformers' model and its folder; see `write_checkpoint`."""
    folder = factory.mktemp(model_type)
    return write_checkpoint(model_type, folder, "tiny", seed, keys, **how), folder


def prompts(vocab_size):
    g = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (length,), generator=g).tolist() for length in LENGTHS]


def load(folder, **options):
    options = {"max_num_seqs": 4, "max_model_len": 64, "device": "cpu", "dtype": "float32"} | options
    llm = LLM(folder, tokenizer=Characters(), **options)
    poison(llm)
    return llm


def check_parity(model, folder, engines=ENGINES):
    """In several engines, and with every few steps a preemption in the last."""
    texts = prompts(model.config.get_text_config().vocab_size)
    known = {}

    def expected_of(ids):
        if tuple(ids) not in known:
            with torch.inference_mode():
                known[tuple(ids)] = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        return known[tuple(ids)]

    def preempt(llm):
        if llm.num_steps % 4 == 3 and len(llm.scheduler.running) > 1:
            llm.scheduler.preempt(llm.scheduler.running[-1])

    worst, preemptions = 0.0, 0
    for engine in engines:
        llm = load(folder, **engine)
        disturb = preempt if engine is engines[-1] else None
        for output, logits in record_logits(llm, texts, SamplingParams(max_tokens=8), disturb):
            assert output.error is None
            expected = expected_of(output.prompt_token_ids + output.token_ids)
            assert logits.shape == expected.shape
            scale = float(expected.abs().max())
            worst = max(worst, float((logits - expected).abs().max()) / scale)
            assert worst <= TOLERANCE
            answers = expected[len(output.prompt_token_ids) - 1 :]
            top = answers.topk(2).values
            assert float((top[:, 0] - top[:, 1]).min()) > 4 * TOLERANCE * scale, "margins too small to compare tokens"
            assert answers.argmax(-1).tolist() == output.token_ids
            preemptions += output.num_preemptions
    assert preemptions
    return worst


def check_exactness(folder):
    """In float64, every kind of engine that the model can be run in against each request alone."""
    alone = Alone(folder)
    problems = {describe(cell): found.problem for cell in alone.cells() if (found := alone.check(cell)).problem}
    assert not problems
