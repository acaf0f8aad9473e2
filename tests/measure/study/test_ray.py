"""A study on two nodes of Ray on this machine, one of which is killed; and a swarm."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.measure.results.store import read_rows
from hybrid_kv.measure.study import swarm, work
from hybrid_kv.measure.study.run import gather, locally, over_ray, run_study

ray = pytest.importorskip("ray", reason="ray is not installed: pip install .[cluster]")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=":")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8}
    )
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_node_that_is_killed_loses_and_doubles_no_row(
    study: Any, cluster: Any, tmp_path: Path
) -> None:
    second = cluster.add_node(num_cpus=1, object_store_memory=10**8)
    cells = study("guard --n={n}", levels=range(40))
    done_cells: list[str] = []
    killed = threading.Event()

    def report(cell: Any, done: Any) -> None:
        done_cells.append(cell.id)
        if len(done_cells) == 5:
            cluster.remove_node(second, allow_graceful=False)
            killed.set()

    pool = over_ray(cluster.address, 60, retries=3)
    known = run_study(cells, tmp_path / "ray", pool, 3, report)
    assert killed.is_set() and [one["code"] for one in known.values()] == [0] * 40
    assert gather(tmp_path / "ray", cells) == 40
    run_study(cells[:4], tmp_path / "here", locally(2, 60), 0, lambda *_: None)
    gather(tmp_path / "here", cells)
    rows, here = (
        sorted(read_rows(tmp_path / name / "rows.parquet")["value"]) for name in ("ray", "here")
    )
    assert rows == [n**2 for n in range(40)] and here == rows[:4]


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_swarm_on_ray_sees_what_it_sees_here(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "SEEDS_PER_BATCH", 2)

    def play(pool: work.Pool) -> swarm.Tally:
        clock = iter(range(100))
        made = swarm.Swarm(
            30, 3, tmp_path, lambda _: None, lambda *_: None, lambda: float(next(clock))
        )
        return replace(made.run(pool), cpu_seconds=0.0)

    there, here = play(work.over_ray(cluster.address, 0)), play(swarm.here)
    assert there == here and here.seeds == 4 and here.settings
