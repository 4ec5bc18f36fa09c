"""The least cover against every subset."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.layouts.least_cover import least_cover


@given(sizes=st.lists(st.sampled_from([1, 3, 7, 8, 20, 64, 65]), max_size=9), need=st.integers(-3, 200))
def test_no_subset_covers_with_less(sizes: list[int], need: int) -> None:
    sums = [sum(one) for count in range(len(sizes) + 1) for one in combinations(sizes, count)]
    found = least_cover(sizes, need)
    if need > sum(sizes):
        assert found is None
    else:
        assert sum(sizes[i] for i in found) == min(x for x in sums if x >= need)
        assert len(set(found)) == len(found)


def test_many_alike_and_large_are_covered_to_a_millionth():
    sizes = [2**26 + 12345] * 300 + [2**22 + 1] * 900 + [17] * 300
    need = 0.37 * sum(sizes)
    taken = sum(sizes[i] for i in least_cover(sizes, need))
    assert need <= taken <= need * (1 + 1e-3)
    assert least_cover(sizes, sum(sizes)) == tuple(range(len(sizes)))


def test_large_ones_first():
    assert least_cover([2, 2, 4], 4) == (2,) and least_cover([2, 2, 4], 5) == (0, 2)
