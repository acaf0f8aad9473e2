"""Train a guard model.

    python -m accuracy.train --out .train/guard_model --install

The run is a function of its arguments (on one machine and torch version): data are drawn from
(seed, step, sequence), the learning rate follows the step, never the clock. It checkpoints itself
and goes on from there when started again. On a CPU two single-thread processes share each batch (6
times as fast as one process with two threads on a busy two-core machine); on a GPU one process
takes all of it.

**Path dropout** makes a model need its recurrent state. Trained plainly, attention learns nearly
all the copying, and most answers survive a zeroed state (75 of 90 points did of the first model).
So part of the training sequences takes that path away: attention may not cross a problem border,
and the tokens that tell the box size are hidden as keys from every other sentence. There only the
SSM state can bring the size. The first ``latch-only-steps`` use nothing else, later steps half and
half; inference is ordinary attention.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from accuracy import tokenizer
from accuracy.guard_model import GuardModel, new_model, save_checkpoint
from hybrid_kv.check.guard_model import FOLDERS, problems

WARMUP_STEPS = 40
FLOOR = 0.02  # the learning rate never falls below this part of its top
MTP_WEIGHTS = (0.3, 0.15, 0.1)  # loss weight of the 1st, 2nd and 3rd drafted token
MTP_SEQUENCES = 2  # sequences of each process that the MTP head trains on, to save time
QUESTION_WEIGHT = 0.1  # question tokens are mostly chance; answers weigh 1
FACTOR_WEIGHT = 3.0  # the operand after "*" is where the latch is needed

# What may not change when a run goes on.
IDENTITY = (
    "model",
    "seed",
    "batch",
    "length",
    "replicas",
    "muon_lr",
    "adam_lr",
    "latch_only_steps",
    "mtp_from_step",
)
IDENTITY += ("steps", "decay_steps")


@dataclass
class Batch:
    """One process's share of a step, b sequences of t tokens."""

    ids: Tensor  # (b, t + 1)
    weights: Tensor  # (b, t), of predicting ids[:, 1:]
    seen: Tensor  # (b, 1, t, t) bool, True where attention may read a key


# ---------------------------------------------------------------------------------------- data


def _sequence(rng: random.Random, length: int) -> tuple[np.ndarray, ...]:
    """Return tokens, loss weights, problem and sentence numbers and latch marks, each (length,)."""
    ids_of = tokenizer.token_ids()
    answer, stop, holds = ids_of[tokenizer.ANSWER], ids_of["."], ids_of[" holds"]
    ids: list[int] = [ids_of[tokenizer.EOS]] if rng.random() < 0.5 else []
    weights = [QUESTION_WEIGHT] * len(ids)
    for index, problem in enumerate(problems.problem_stream(rng)):
        if len(ids) >= length:
            break
        tokens = tokenizer.encode(("\n\n" if index else "") + problem.document())
        question = tokens.index(answer) + 1
        # The token that opens the next problem is part of the answer: it ends it.
        weights += [1.0 if index else QUESTION_WEIGHT] + [QUESTION_WEIGHT] * (question - 1)
        weights += [1.0] * (len(tokens) - question)
        ids += tokens
    array = np.array(ids[:length])
    weight = np.array(weights[:length], dtype=np.float32)
    weight[1:][array[:-1] == ids_of["*"]] *= FACTOR_WEIGHT
    problem_no = np.cumsum(array == ids_of[tokenizer.NEXT_QUESTION])
    after_stop = np.concatenate([[False], array[:-1] == stop])
    sentence_no = np.cumsum(after_stop | (array == answer)) + problem_no
    latch = np.zeros(length, dtype=bool)
    for start in np.flatnonzero(array == holds):
        latch[start : start + 4] = sentence_no[start : start + 4] == sentence_no[start]
    return array, weight, problem_no, sentence_no, latch


def make_batch(
    seed: int, step: int, sequences: range, length: int, latch_only: bool, device: torch.device
) -> Batch:
    """Return the sequences of one step.

    Even ones get path dropout, all of them if ``latch_only``.
    """
    drawn = [_sequence(random.Random(f"{seed}/{step}/{i}"), length + 1) for i in sequences]
    ids, weights, problem_no, sentence_no, latch = map(np.stack, zip(*drawn, strict=True))
    problem_no, sentence_no, latch = (a[:, :-1] for a in (problem_no, sentence_no, latch))
    dropped = np.array([latch_only or i % 2 == 0 for i in sequences])[:, None, None]
    same_problem = problem_no[:, :, None] == problem_no[:, None, :]
    same_sentence = sentence_no[:, :, None] == sentence_no[:, None, :]
    seen = (same_problem & (~latch[:, None, :] | same_sentence)) | ~dropped
    seen &= np.tri(length, dtype=bool)
    return Batch(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(weights[:, 1:].copy()).to(device),
        torch.from_numpy(seen[:, None]).to(device),
    )


# ---------------------------------------------------------------------------------------- loss


def _weighted(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted cross-entropy, and the part of it on answer tokens."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    loss = loss.view_as(weights)
    answers = (weights >= 1).float()
    mean = (loss * weights).sum() / weights.sum().clamp(min=1)
    return mean, (loss.detach() * answers).sum() / answers.sum().clamp(min=1)


def batch_loss(model: GuardModel, batch: Batch, with_mtp: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss to minimise, the answer loss, and that of the first drafted token."""
    ids, weights = batch.ids, batch.weights
    hidden, balance = model.decode(ids[:, :-1], batch.seen)
    loss, answer_loss = _weighted(model.lm_head(hidden), ids[:, 1:], weights)
    loss = loss + balance
    mtp_loss = torch.zeros((), device=ids.device)
    if with_mtp:
        ids, weights, hidden = (a[:MTP_SEQUENCES] for a in (ids, weights, hidden))
        length = weights.shape[1]
        drafted = hidden
        for k, part in enumerate(MTP_WEIGHTS, start=1):
            # At i: the state that stands for i + k - 1, the known token i + k, and i + k + 1 due.
            drafted = model.draft_hidden(drafted[:, : length - k], ids[:, k:length])
            in_answer = weights[:, : length - k] >= 1
            term, first = _weighted(
                model.lm_head(drafted), ids[:, k + 1 :], weights[:, k:] * in_answer
            )
            loss = loss + part * term
            if k == 1:
                mtp_loss = first
    return loss, answer_loss, mtp_loss


# ----------------------------------------------------------------------------------- optimiser


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made (nearly) orthogonal, for matrices (..., m, n).

    The leading dimensions are those of experts.

    torch's takes single matrices, and bfloat16 for them: 1 s a step on a CPU.
    """

    def __init__(self, weights: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for weight in group["params"]:
            if weight.grad is not None:
                buffer = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                buffer.lerp_(weight.grad, 1 - group["momentum"])
                update = _orthogonalise(weight.grad.lerp(buffer, group["momentum"]))
                rows, columns = weight.shape[-2:]
                weight.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def _orthogonalise(x: Tensor) -> Tensor:
    """Return the matrix after five Newton-Schulz steps: singular values go to about 1."""
    if x.shape[-2] > x.shape[-1]:
        return _orthogonalise(x.mT).mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def lr_scale(step: int, steps: int, decay_steps: int) -> float:
    """Return the factor of the rate: warm-up, flat, then a linear fall over ``decay_steps``."""
    return min(1, (step + 1) / WARMUP_STEPS) * min(1, max(FLOOR, (steps - step) / decay_steps))


# ------------------------------------------------------------------------------------ training


class Trainer:
    """One process of the run; ``rank`` of ``world`` replicas."""

    def __init__(self, args: argparse.Namespace, rank: int = 0, world: int = 1) -> None:
        self.args, self.rank, self.world = args, rank, world
        self.device = torch.device(args.device)
        torch.manual_seed(args.seed)
        self.model = new_model(args.model).to(self.device)
        named = self.model.named_parameters()
        matrices = [
            p
            for n, p in named
            if p.dim() > 1 and not any(x in n for x in ("embed", "lm_head", "conv1d"))
        ]
        chosen = set(map(id, matrices))
        self.rest = [p for p in self.model.parameters() if id(p) not in chosen]
        self.optimizers = [
            Muon(matrices, args.muon_lr),
            torch.optim.AdamW(self.rest, args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(
                each, lambda step: lr_scale(step, args.steps, args.decay_steps)
            )
            for each in self.optimizers
        ]
        self.step = 0
        share = args.batch // world
        self.sequences = range(rank * share, (rank + 1) * share)

    def train_step(self) -> tuple[float, float]:
        """Take one optimiser step; return the answer loss and the MTP loss of this process."""
        args = self.args
        latch_only = self.step < args.latch_only_steps
        batch = make_batch(
            args.seed, self.step, self.sequences, args.length, latch_only, self.device
        )
        self.model.zero_grad()
        loss, answer_loss, mtp_loss = batch_loss(self.model, batch, self.step >= args.mtp_from_step)
        loss.backward()
        self._average_gradients()
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        for part in (*self.optimizers, *self.schedules):
            part.step()
        self.step += 1
        return float(answer_loss), float(mtp_loss)

    def _average_gradients(self) -> None:
        if self.world == 1:
            return
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = nn.utils.parameters_to_vector(grads)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / self.world, grads)

    # ------------------------------------------------------------------------------ state file

    def save_state(self, path: Path) -> None:
        """Write everything the run needs to go on, in one atomic step."""
        state = {
            "step": self.step,
            "args": {k: v for k, v in vars(self.args).items() if isinstance(v, int | float | str)},
            "model": self.model.state_dict(),
            "optimizers": [part.state_dict() for part in (*self.optimizers, *self.schedules)],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load_state(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        then, now = state["args"], vars(self.args)
        if changed := [name for name in IDENTITY if then[name] != now[name]]:
            raise SystemExit(f"{path} is of a run with other {', '.join(changed)}; use --fresh")
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for part, values in zip(
            (*self.optimizers, *self.schedules), state["optimizers"], strict=True
        ):
            part.load_state_dict(values)


def build_tokenizer(rigid: bool) -> PreTrainedTokenizerFast:
    """Return `accuracy.tokenizer` as transformers knows it.

    transformers gives a Qwen3.5 checkpoint a pre-tokenizer of its own, whatever tokenizer.json
    says. A ``rigid`` tokenizer has its words as added tokens, too: these are cut out of a text
    before that, the longest first.
    """
    core = Tokenizer(models.WordLevel(dict(tokenizer.token_ids()), unk_token=tokenizer.UNK))
    if rigid:
        core.add_tokens([AddedToken(token, normalized=False) for token in tokenizer.vocabulary()])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(tokenizer.PATTERN), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=tokenizer.UNK,
        eos_token=tokenizer.EOS,
        bos_token=tokenizer.EOS,
        pad_token=tokenizer.EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and its companions, with which AutoTokenizer loads the folder.

    config.json is there already.
    """
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    build_tokenizer(rigid=model_type.startswith("qwen")).save_pretrained(folder)


def run(rank: int, args: argparse.Namespace, world: int, rendezvous: str) -> None:
    """Train in one process of the world."""
    if args.device == "cpu":
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # long decays underflow; denormals are slow on a CPU
    if world > 1:
        dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    state_file = out / "train_state.pt"
    trainer = Trainer(args, rank, world)
    if state_file.exists() and not args.fresh:
        trainer.load_state(state_file)
    wait_for_all(world)  # no process may write the state file before all have read it
    train(trainer, args, rank, world)
    if world > 1:
        dist.destroy_process_group()


def wait_for_all(world: int) -> None:
    """Return when each of the processes has come here."""
    if world > 1:
        dist.barrier()


def train(trainer: Trainer, args: argparse.Namespace, rank: int, world: int) -> None:
    """Train up to the last step, with a line every 50 steps and a checkpoint now and then."""
    bar = tqdm(total=args.steps, initial=trainer.step, disable=rank > 0, mininterval=10)
    sums, count, started, begin = [0.0, 0.0], 0, time.monotonic(), trainer.step
    while trainer.step < args.steps:
        losses = trainer.train_step()
        sums = [s + x for s, x in zip(sums, losses, strict=True)]
        count += 1
        bar.update()
        if trainer.step % 50 == 0:
            elapsed = time.monotonic() - started
            rate = (trainer.step - begin) * args.batch * args.length / elapsed
            answer_loss, mtp_loss = (one / count for one in sums)
            sums, count = [0.0, 0.0], 0
            if rank == 0:
                bar.write(
                    f"{trainer.step}: answer loss {answer_loss:.5f}, MTP loss {mtp_loss:.5f}, "
                    f"{rate:.0f} tokens/s"
                )
        if trainer.step % args.checkpoint_every == 0 or trainer.step == args.steps:
            if rank == 0:
                out = Path(args.out)
                trainer.save_state(out / "train_state.pt")
                save_checkpoint(trainer.model, out / "checkpoint")
                save_tokenizer(out / "checkpoint")
            wait_for_all(world)
    bar.close()


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", choices=tuple(FOLDERS), default="nemotron_h")
    p.add_argument("--steps", type=int, default=4000)
    p.add_argument("--out", default=".train/guard_model", help="state file and checkpoint go here")
    p.add_argument("--install", action="store_true", help="copy the checkpoint into the package")
    p.add_argument("--fresh", action="store_true", help="ignore a state file in --out")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--batch", type=int, default=8, help="sequences per step, over all processes")
    p.add_argument("--length", type=int, default=512, help="tokens per sequence")
    p.add_argument("--latch-only-steps", type=int, default=1200)
    p.add_argument("--mtp-from-step", type=int, default=1800)
    p.add_argument("--decay-steps", type=int, default=2200)
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--adam-lr", type=float, default=4e-3)
    p.add_argument("--checkpoint-every", type=int, default=250)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--replicas", type=int, help="processes; default 2 on a CPU, 1 on a GPU")
    return p


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    args.replicas = world = args.replicas or (2 if args.device == "cpu" else 1)
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch} does not divide among {world} processes")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"{folder}/rendezvous"
        if world == 1:
            run(0, args, world, rendezvous)
        else:
            mp.spawn(run, (args, world, rendezvous), nprocs=world)
    if args.install:
        shutil.copytree(Path(args.out) / "checkpoint", FOLDERS[args.model], dirs_exist_ok=True)


if __name__ == "__main__":
    main()
