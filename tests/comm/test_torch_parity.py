"""The checks of PyTorch's own tests of communication hooks, written anew for these hooks.

| PyTorch's | here |
|---|---|
| `test_ddp_hook_pickling_powerSGD`, `test_post_localSGD_optimizer_step_reload`, `test_save_load_checkpoint` (test_c10d_gloo.py) | `test_resuming_equals_not_stopping` in test_hooks.py and test_local_sgd.py |
| `test_ddp_uneven_inputs` | `test_ranks_with_fewer_batches` |
| `test_all_gather_*`, `test_all_to_all_*` (quantization/test_quantization.py) | `test_channels_move_what_torch_moves` |
| `test_post_localSGD_optimizer_parity*`, `test_ddp_hook_parity_post_localSGD` | `test_every_four_steps_is_the_published_algorithm` |

Elsewhere: futures with callbacks, registering twice, sparse gradients, static graphs and dtypes in test_hooks.py and
test_faults.py; PowerSGD against the papers in test_powersgd_ranks.py.
"""  # noqa: E501

from __future__ import annotations

from tests.comm import torch_parity_cases as cases
from tests.comm.ranks import run_ranks


def test_ranks_with_fewer_batches() -> None:
    # bf16 rounds twice, int8 within half of 1/127 of a block's largest twice.
    bounds = {"exact": 1e-6, "bf16": 2**-7, "int8": 2 / 127}
    for found in run_ranks(cases.uneven, 2):
        for what, one in found.items():
            assert one["error"] < bounds[what.partition(",")[0]], what
            assert one["steps"] == 4


def test_a_mean_over_the_ranks_that_still_have_data_is_refused() -> None:
    for found in run_ranks(cases.uneven_by_active, 2):
        for kind in ("hook", "planner"):
            assert found[kind].startswith("ValueError: DDP hands gradients to a hook without the number of ranks"), kind
        assert "join(divide_by_initial_world_size=False)" in found["made within"]
        assert found["even"] == "nothing raised"


def test_channels_move_what_torch_moves() -> None:
    for found in run_ranks(cases.channels, 3):
        assert len(found) == 7 * 4 * 2 + 4 * 4
        assert all(found.values()), [what for what, right in found.items() if not right]
