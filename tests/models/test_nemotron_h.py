"""NemotronH in engines whose states have another dtype, and whose pool is too small for all requests."""

import pytest

from tests.models.parity import compare, load
from tests.models.tiny_nemotron import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("nemotron_h"), "M-M*-M*-", n_groups=1, num_key_value_heads=1)


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float32", "float64")], ids="-".join)
def test_states_of_another_dtype_than_the_model(tiny, dtypes):
    model, folder = tiny
    compare(model, load(folder, dtype=dtypes[0], mamba_ssm_cache_dtype=dtypes[1], max_num_batched_tokens=17))


def test_a_pool_too_small_for_all_preempts(tiny):
    model, folder = tiny
    small = {"block_size": 2, "max_num_batched_tokens": 17}
    least = 1 + load(folder, **small).plan.config.max_blocks_per_request(48)
    engines = (load(folder, **small, num_blocks=least + more) for more in range(0, 8, 2))
    assert sum(compare(model, engine)[1] for engine in engines) > 0
