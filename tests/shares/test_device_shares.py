"""The shares of unequal devices beside every possible split."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import AutoparError, InfeasibleError
from autopar.shares.device_shares import DeviceSpeed, best_shares, proportional_shares

DEVICE = st.builds(
    DeviceSpeed, st.floats(0.1, 5), st.sampled_from((0.0, 0.5, 4.0)), st.sampled_from((None, 0, 1, 3, 20))
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.lists(DEVICE, min_size=1, max_size=3))
def test_no_split_is_faster(num_rows: int, devices: list[DeviceSpeed]) -> None:
    def holds(sizes: tuple[int, ...]) -> bool:
        return sum(sizes) == num_rows and all(
            device.most_rows is None or size <= device.most_rows for size, device in zip(sizes, devices)
        )

    every = [sizes for sizes in product(range(num_rows + 1), repeat=len(devices)) if holds(sizes)]
    if not every:
        with pytest.raises(InfeasibleError, match="memory of the devices holds"):
            best_shares(num_rows, devices)
        return
    found = best_shares(num_rows, devices)
    least = min(max(device.step_s(size) for device, size in zip(devices, sizes)) for sizes in every)
    assert found.step_s == pytest.approx(least) and holds(found.sizes)
    assert found.lower_bound_s <= found.step_s * (1 + 1e-9)


def test_the_bound_is_the_sum_of_the_speeds() -> None:
    found = best_shares(1000, [DeviceSpeed(0.5), DeviceSpeed(1.0), DeviceSpeed(2.0)])
    assert found.lower_bound_s == pytest.approx(1000 / (2 + 1 + 0.5)) and found.step_s < 1.005 * found.lower_bound_s


def test_a_device_that_would_be_waited_for_is_left_out() -> None:
    assert best_shares(8, [DeviceSpeed(1.0), DeviceSpeed(1.0), DeviceSpeed(9.0)]).sizes == (4, 4, 0)
    assert best_shares(8, [DeviceSpeed(1.0), DeviceSpeed(1.0, fixed_s=8.0)]).sizes == (8, 0)


@given(st.integers(0, 50), st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
def test_proportional_shares_are_within_a_row(num_rows: int, weights: list[int]) -> None:
    sizes = proportional_shares(num_rows, weights)
    assert sum(sizes) == num_rows
    assert all(abs(size - num_rows * weight / sum(weights)) < 1 for size, weight in zip(sizes, weights))


def test_bad_speeds_and_rows_are_refused() -> None:
    for make in (lambda: DeviceSpeed(0.0), lambda: DeviceSpeed(1.0, -1.0), lambda: DeviceSpeed(1.0, most_rows=-1)):
        with pytest.raises(AutoparError, match="row"):
            make()
    with pytest.raises(AutoparError, match="one row or more"):
        best_shares(0, [DeviceSpeed(1.0)])
