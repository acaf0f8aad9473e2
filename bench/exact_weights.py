"""Where exact checkpoints are equal to the bit: a row for each family, engine and setting.

    python -m bench.exact_weights verify [--family F] [--out FILE.csv]
    python -m bench.exact_weights ours --setting "prefix=all spec=ngram3"
    python -m bench.exact_weights vllm --python PYTHON --setting "dtype=bfloat16"
    python -m bench.exact_weights http://127.0.0.1:8000 --family lfm2 --name llama.cpp --dtype
    float32

`verify` computes every operation in transformers; of an engine all probes are sent, and each token
and log-probability is held against transformers without a tolerance.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness.arguments import ArgumentParser
from hybrid_kv.check.probes.guarded import Guarded, ask
from hybrid_kv.check.probes.run import matrix_of, text_of
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.check.targets.kinds import kind_of
from hybrid_kv.config import ConfigError
from hybrid_kv.errors import run_command
from hybrid_kv.measure.results import Row, append_rows
from hybrid_kv.models.exact_weights.checkpoint import write_exact_weights
from hybrid_kv.models.exact_weights.families import FAMILIES
from hybrid_kv.models.exact_weights.verify import verify

ENOUGH = 160  # characters of a problem


@dataclass(frozen=True)
class Finding:
    """What became of a checkpoint in an engine and a setting.

    Attributes:
        problem: the first difference; empty if there is none.
        count: answers, or tokens, that were compared.
    """

    engine: str
    version: str
    dtype: str
    setting: str
    problem: str
    count: int
    is_served: bool = True

    def row(self, family: str) -> Row:
        """Return it as a row: 1 if all is equal to the bit."""
        params = {
            "family": family,
            "engine": self.engine,
            "version": self.version,
            "dtype": self.dtype,
            "setting": self.setting,
        }
        if self.problem:
            params["problem"] = self.problem[:ENOUGH]
        metric = "equal" if self.is_served else "served"
        value = int(not self.problem)
        return Row("exact_weights", "engines", metric, value, "", params, n=self.count)


def by_verify(folder: str) -> Iterator[Finding]:
    """Compute a checkpoint in transformers in every way."""
    import transformers

    for result in verify(folder):
        problem = str(result.difference or "")
        version = transformers.__version__
        yield Finding("transformers", version, result.dtype, result.way, problem, result.num_tokens)


def by_probes(
    target: str, python: Path | None, folder: str, settings: list[str], name: str, dtype: str
) -> Iterator[Finding]:
    """Send the probes of an exact model to an engine, in each setting.

    Settings that it refuses come last: an engine's version is known once it has started.
    """
    kind = kind_of(target, python)
    guarded = Guarded(kind, folder, thorough=False)
    refused = list[Finding]()
    for cell in matrix_of(kind, settings):
        outcomes = list[Outcome]()
        ask(guarded, cell, (), outcomes.append)
        served = [each for each in outcomes if each.verdict != "not supported"]
        wrong = next((each for each in served if each.verdict == "wrong"), None)
        problem = f"{wrong.probe}: {wrong.detail}" if wrong else ""
        is_served = any(each.num_judged for each in served) or bool(wrong)
        problem = problem if is_served else outcomes[0].detail
        default = kind.factors.get("dtype", ("float32",))[0]
        chosen = dtype or cell.get("dtype", default)
        setting = text_of({factor: level for factor, level in cell.items() if factor != "dtype"})
        count = sum(each.num_judged for each in served)
        version = guarded.version
        finding = Finding(name or kind.name, version, chosen, setting, problem, count, is_served)
        if is_served:
            yield finding
        else:
            refused.append(finding)
    yield from (replace(finding, version=guarded.version) for finding in refused)


def main() -> None:
    parser = ArgumentParser("python -m bench.exact_weights", __doc__)
    parser.add_argument("target", help="`verify`, an engine, or a server's URL")
    parser.add_argument("--family", action="append", help="may be repeated; default: all")
    parser.add_argument("--folder", help="of a checkpoint that a server has; default: it is made")
    parser.add_argument("--python", type=Path, help="of an environment with the engine")
    parser.add_argument("--setting", action="append", default=[], help="as --matrix of the guard")
    parser.add_argument("--name", default="", help="of the engine in rows")
    parser.add_argument("--dtype", default="", help="that a server computes in")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="append rows to it")
    options = parser.parse_args()
    for family in options.family or FAMILIES:
        if family not in FAMILIES:
            raise ConfigError(f"--family {family}: use one of {', '.join(FAMILIES)}")
        with tempfile.TemporaryDirectory() as made:
            folder = options.folder or made
            if options.folder is None:
                write_exact_weights(family, folder)
            if options.target == "verify":
                findings = by_verify(folder)
            else:
                findings = by_probes(
                    options.target,
                    options.python,
                    folder,
                    options.setting,
                    options.name,
                    options.dtype,
                )
            for finding in findings:
                verdict = finding.problem or "equal to the bit"
                where = f"{family}, {finding.engine} {finding.version}, {finding.dtype}"
                print(f"{where}, {finding.setting}: {verdict} ({finding.count})", flush=True)
                if options.out is not None:
                    append_rows(options.out, [finding.row(family)])


if __name__ == "__main__":
    run_command(main)
