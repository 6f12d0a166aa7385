"""GradScaler's loop with compressed gradients: an infinity amid training, and scales that change."""

from __future__ import annotations

from tests.comm import grad_scaler_cases as cases
from tests.comm.few import few
from tests.comm.ranks import run_ranks


@few(cases.COMPRESSORS, ("PowerSGD",))
def test_a_void_step_is_as_if_it_had_not_been(names: tuple[str, ...]) -> None:
    for found in run_ranks(cases.as_if_it_had_not_been, 2, names):
        assert tuple(found) == names
        for name, one in found.items():
            assert one == {"weights": True, "residual": True}, name


@few(cases.LAWS, ("PowerSGD, hosts", "of the catalogue, flat"))
def test_residuals_follow_the_scale(names: tuple[str, ...]) -> None:
    for found in run_ranks(cases.law, 4, names, per_host=2):
        refused = found.pop("refused")
        assert refused.startswith("ValueError: DGC(")
        assert "takes the scaler from take_momentum" in refused
        assert tuple(found) == names
        for what, one in found.items():
            assert one["law"] < 1e-13, what
            assert one["residual"] > 1e-5, what


def test_a_pickle_asks_for_its_scaler_and_goes_on_with_it() -> None:
    for found in run_ranks(cases.resumed, 2):
        for kind, one in found.items():
            assert one["forgotten"].startswith("ValueError: this "), kind
            assert one["forgotten"].endswith("give it back, state.bind(model, scaler=scaler)"), kind
            assert one["law"] < 1e-13, kind
            assert one["residual"] > 1e-5, kind


def test_gradients_of_a_decorated_model_have_no_scale() -> None:
    for found in run_ranks(cases.by_loss_scale, 2):
        # Two good steps each double it, the fifth overflows.
        assert "gradients of a model that is decorated by accel.amp have no scale" in found["refused"]
        assert found["scales"] == [4.0, 4.0, 8.0, 8.0, 16.0, 8.0, 8.0]
        assert found["law"] < 1e-13
        assert found["residual"] > 1e-5


def test_a_run_without_a_scaler_goes_on_from_one_with_a_scaler() -> None:
    """Residuals were once added as they had been saved, too large by the scale."""
    for found in run_ranks(cases.without_scaler, 2):
        assert found["law"] < 1e-13
        assert found["residual"] > 1e-5
        assert found["scale"] == 1.0
