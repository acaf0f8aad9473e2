"""Tables of a GPU."""

from __future__ import annotations

import re

import pytest

from tests.dashboard.html import section

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_a_gpus_tables_name_every_subject_of_every_case(full: str) -> None:
    text = section(full, "gpu")
    assert re.findall(r"<summary>(.*?)</summary>", text) == ["state_update", "conv_update", "expansion"]
    lines = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in re.findall(r"<tr >(.*?)</tr>", text)]
    assert len(lines) == 2 * 4 + 2
    case = "<br><small>K=1, model=nano, num_reqs=16</small>"
    assert lines[0] == [f"slots{case}", "20 µs <small>(18 µs to 22 µs)</small>", "1,500 GB/s", "45 %", ""]
    assert lines[3][0] == f"torch (eager){case}" and lines[3][-1] == "4.5×"
    assert lines[9] == ["triton<br><small>num_rows=256</small>", "9 µs", "", "", ""]
