"""The fit recovers a known cluster from its own prices, with noise and outliers too."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.calibrate.fit_cluster import fit_cluster
from autopar.calibrate.fit_report import report
from autopar.calibrate.line_fit import fit_line
from autopar.calibrate.link_levels import level_sizes, ranks_per_host
from autopar.calibrate.measure import FULL, QUICK, Measured, OnRank, in_steps, measure_links
from autopar.calibrate.probe_ops import OpTime, UpdateTime, memory_bound, of_rows, products
from autopar.calibrate.time_links import KINDS, CollectiveTime, Groups, TimedLinks
from autopar.costmodel.cluster.device_groups import seen_by
from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.load_cluster import cluster_from_json
from autopar.costmodel.cluster.measured_terms import GroupRate, MemoryShare, ProductShare, memory_share, product_share
from autopar.costmodel.collective_time import collective_times
from autopar.costmodel.memory import update_time
from autopar.costmodel.roofline import shapes_time
from autopar.costmodel.stage_transfer import transfer
from autopar.errors import AutoparError

CPU = torch.device("cpu")
RATES = tuple(GroupRate(2, share, base_s, kind) for kind, share, base_s in (("all_reduce", 0.4, 3e-4), ("p2p", 1, 0.0)))
DATE = "2026-11-23T12:00:00+00:00"
TRUTH = Cluster(
    "truth",
    (LinkLevel(2, 1e-4, 2e9, RATES), LinkLevel(2, 1e-3, 1e8)),
    {"float32": 5e10, "bfloat16": 2e11},
    8e9,
    2**30,
    "made up",
    {"all_gather": 1.4},
    4e9,
    "cpu",
    kernel_s=2e-5,
    product_shares=(ProductShare(0.25, 8), ProductShare(1.0, 512), ProductShare(0.5, op="aten.matmul")),
    memory_shares=(MemoryShare(""), MemoryShare("aten.gelu", 0.2, 0.1), MemoryShare("aten.relu", 1.5, 1.5)),
)


def timed(ops: Iterator, cluster: Cluster) -> tuple[OpTime, ...]:
    return tuple(
        OpTime(op, *shapes_time(op, tuple(v.shape for v in op.inputs), tuple(v.shape for v in op.outputs), cluster))
        for op in ops
    )


def on_rank(cluster: Cluster, device: torch.device = CPU) -> OnRank:
    by_dtype = {
        str(dtype).removeprefix("torch."): timed(products(device, dtype, is_quick=False), cluster)
        for dtype in (torch.float32, torch.bfloat16)
    }
    updates = tuple(UpdateTime(8, size, 8 * (2e-4 + 7 * size / 4e9)) for size in (256, 2**18, 2**22))
    dtypes = (torch.float32, torch.bfloat16)[: 1 + (device != CPU)]
    in_memory = sum((timed(memory_bound(device, dtype, is_quick=False), cluster) for dtype in dtypes), ())
    return OnRank(
        by_dtype, in_memory, timed(of_rows(2), cluster), updates, 4e9, 2**30, fresh_s_per_byte=3e-10 * (device == CPU)
    )


def links(cluster: Cluster) -> tuple[CollectiveTime, ...]:
    times = []
    for groups, level in ((Groups(2, 1, 2), 0), (Groups(2, 2, 4), 1)):
        for size in FULL.sizes:
            reach = cluster.levels[level]
            times.append(CollectiveTime("p2p", groups, size, reach.latency_s + size / reach.bandwidth_bytes_per_s))
            for kind in KINDS:
                seconds = collective_times(cluster, (2, 2), (1 - level,), kind, size)
                times.append(CollectiveTime(kind, groups, size, float(seconds)))
    return tuple(times)


def scaled(share: float) -> Cluster:
    """The truth with devices of this share of its rates."""
    rates = {dtype: share * rate for dtype, rate in TRUTH.flops_per_s.items()}
    return replace(TRUTH, flops_per_s=rates, memory_bandwidth_bytes_per_s=share * TRUTH.memory_bandwidth_bytes_per_s)


@cache
def measured() -> Measured:
    return Measured(("a", "a", "b", "b"), (2, 2), (on_rank(TRUTH),) * 4, links(TRUTH), DATE)


def test_prices_of_a_known_cluster_are_recovered():
    fitted = fit_cluster(measured(), "fitted", "cpu", "gloo", ())
    assert fitted.cluster.calibration.worst_error < 0.05  # `tiny` ops move some bytes, so a kernel is not exact
    assert fitted.cluster.flops_per_s["bfloat16"] == pytest.approx(2e11, rel=0.02)
    assert fitted.cluster.memory_bandwidth_bytes_per_s == pytest.approx(8e9, rel=0.02)
    assert fitted.cluster.kernel_s == pytest.approx(2e-5, rel=0.1)
    assert fitted.cluster.update_s == pytest.approx(2e-4, rel=0.01)
    assert fitted.cluster.fresh_s_per_byte == 3e-10
    gelu = next(row for row in fitted.cluster.memory_shares if row.op == "aten.gelu")
    assert (gelu.forward, gelu.backward) == pytest.approx((0.2, 0.1), rel=0.02)
    assert not fitted.slow_hosts and cluster_from_json(fitted.cluster.to_json()) == fitted.cluster


def test_a_gpu_has_shares_by_dtype_and_of_rows_that_are_no_whole_units():
    gelus = MemoryShare("aten.gelu", 0.8, 0.4, "float32"), MemoryShare("aten.gelu", 0.4, 0.2)
    truth = replace(
        TRUTH,
        flops_per_s={"float32": 5e13, "bfloat16": 8e14},
        memory_bandwidth_bytes_per_s=3e12,
        device_type="cuda",
        kernel_s=2e-6,
        product_shares=(
            ProductShare(0.25, 16),
            ProductShare(1.0, 4096, backward=0.8),
            ProductShare(0.5, op="aten.matmul"),
        ),
        memory_shares=(MemoryShare(""), *gelus),
        unaligned_shares={"bfloat16": 0.2},
    )
    rank = replace(on_rank(truth, torch.device("cuda")), float8_flops_per_s=1.5e15)
    fitted = fit_cluster(Measured(("a",), (1,), (rank,), (), DATE), "fitted", "cuda", "nccl", TRUTH.levels).cluster
    assert fitted.peak_flops_per_s(torch.float8_e4m3fn) == 1.5e15
    assert fitted.calibration.fit_error < 0.01
    assert fitted.unaligned_shares == pytest.approx({"float32": 1.0, "bfloat16": 0.2}, rel=0.05)
    for dtype, (forward, backward) in (("float32", (0.8, 0.4)), ("bfloat16", (0.4, 0.2))):
        share = memory_share(fitted.memory_shares, "aten.gelu", dtype)
        assert (share.forward, share.backward) == pytest.approx((forward, backward), rel=0.02)
    whole, of_backward = product_share(fitted.product_shares, "aten.linear", "bfloat16", 4096)
    assert of_backward / whole == pytest.approx(0.8, rel=0.02)
    assert cluster_from_json(fitted.to_json()) == fitted


def test_prices_of_collectives_of_sizes_that_were_not_timed():
    fitted = fit_cluster(measured(), "fitted", "cpu", "gloo", ()).cluster
    for kind in KINDS:
        for axis in (0, 1):
            for size in (3_000, 300_000, 30_000_000):
                price = collective_times(fitted, (2, 2), (axis,), kind, size)
                assert price == pytest.approx(float(collective_times(TRUTH, (2, 2), (axis,), kind, size)), rel=0.02)


def test_the_fit_error_is_that_of_the_noise():
    random.seed(0)
    exact = measured()
    noisy = tuple(replace(time, seconds=time.seconds * random.uniform(0.9, 1.1)) for time in exact.links)
    fitted = fit_cluster(replace(exact, links=noisy), "fitted", "cpu", "gloo", ()).cluster
    assert 0.01 < fitted.calibration.fit_error < 0.1
    for kind in KINDS:
        assert collective_times(fitted, (2, 2), (1,), kind, 2**21) == pytest.approx(
            float(collective_times(TRUTH, (2, 2), (1,), kind, 2**21)), rel=0.1
        )


def test_a_slow_host_is_told_and_plans_wait_for_it():
    slow = scaled(0.4)
    both = replace(measured(), ranks=(on_rank(TRUTH), on_rank(TRUTH), on_rank(slow), on_rank(slow)))
    fitted = fit_cluster(both, "fitted", "cpu", "gloo", ())
    assert list(fitted.slow_hosts) == ["host 1 (b)"] and fitted.slow_hosts["host 1 (b)"] > 1.5
    assert fitted.cluster.flops_per_s["float32"] == pytest.approx(2e10, rel=0.02)
    assert "group of 2, fitted of host 1: products 20 Gflop/s" in report(fitted)
    assert "memory of new tensors of 32 MiB or more: 322 ms a GiB" in report(fitted)


def test_hosts_that_are_alike_are_a_group_each_with_its_own_rows():
    slow = scaled(0.4)
    both = replace(measured(), ranks=(on_rank(TRUTH), on_rank(TRUTH), on_rank(slow), on_rank(slow)))
    cluster = fit_cluster(both, "fitted", "cpu", "gloo", ()).groups
    assert [count for count, _ in cluster.groups.members] == [2, 2]
    for truth, (_, one) in zip((TRUTH, slow), cluster.groups.members):
        assert one.flops_per_s["float32"] == pytest.approx(truth.flops_per_s["float32"], rel=0.02)
        assert one.calibration.num_ranks == 2 and one.calibration.fit_error < 0.05
    for kind in KINDS:
        price = collective_times(seen_by(cluster, 1), (2, 2), (0,), kind, 300_000)
        assert price == pytest.approx(float(collective_times(TRUTH, (2, 2), (0,), kind, 300_000)), rel=0.05)
    assert cluster_from_json(cluster.to_json()) == cluster
    batch = torch.empty(56_000, 512, device="meta")
    plan = autopar.plan(nn.Linear(512, 512), "dp=4", args=(batch,), cluster=cluster, pins={"weight": "B"})
    ((_, rows),) = plan.mesh.shares
    # a little less than 2.5: the update takes as long for fewer rows
    assert sum(rows) == 56_000 and 2.4 < rows[0] / rows[-1] < 2.5


def test_hosts_alike_with_others_between_are_two_groups():
    ranks = tuple(on_rank(cluster) for cluster in (TRUTH, scaled(0.97), scaled(0.4), TRUTH))
    hosts, sizes = ("a", "b", "c", "d"), (1, 4)
    of_four = (CollectiveTime("p2p", Groups(2, 1, 4), size, 1e-4 + size / 1e9) for size in FULL.sizes)
    fitted = fit_cluster(Measured(hosts, sizes, ranks, tuple(of_four), DATE), "fitted", "cpu", "gloo", ())
    assert [count for count, _ in fitted.groups.groups.members] == [2, 1, 1]


def test_all_ranks_have_the_date_of_the_measurement():
    """Each rank fits by itself, and their clocks differ: the date is not that of the fit."""
    fitted = fit_cluster(measured(), "a", "cpu", "gloo", ())
    assert fitted.cluster.calibration is not None and fitted.cluster.calibration.date == DATE


def test_one_device_takes_the_links_it_is_given():
    alone = Measured(("a",), (1,), measured().ranks[:1], (), DATE)
    fitted = fit_cluster(alone, "fitted", "cpu", "gloo", TRUTH.levels).cluster
    assert fitted.levels == TRUTH.levels and fitted.calibration.backend == ""


def test_report_tells_the_error_of_the_fit_and_of_each_term():
    text = report(fit_cluster(measured(), "fitted", "cpu", "gloo", ()))
    assert "mean error" in text and "all_reduce among 2 ranks, 1 apart" in text and "products float32 50." in text


@pytest.mark.parametrize("outlier", [0, 2, 5])
def test_an_outlier_does_not_move_the_line(outlier):
    sizes = [2.0**power for power in (10, 13, 16, 18, 20, 22, 24)]
    times = [1e-4 + size / 1e9 for size in sizes]
    times[outlier] *= 5
    line = fit_line(sizes, times)
    assert (line.alpha_s, line.beta_s_per_byte) == pytest.approx((1e-4, 1e-9), rel=0.15)


def test_a_line_has_no_negative_part():
    line = fit_line([1e3, 1e6], [1e-3, 1e-4])
    assert line.alpha_s >= 0 and line.beta_s_per_byte >= 0


def test_hosts_are_a_level_even_where_bandwidth_does_not_step():
    assert level_sizes(4, 2, {1: 100.0, 2: 100.0}) == (2, 2)
    assert level_sizes(4, 4, {1: 100.0, 2: 80.0}) == (4,)
    assert level_sizes(2, 1, {1: 100.0}) == (2,)


@pytest.mark.parametrize(
    ("hosts", "error"), [(["a", "b", "a", "b"], "host by host"), (["a", "a", "a", "b"], "3 on a, 1 on b")]
)
def test_ranks_that_do_not_fill_equal_hosts_are_refused(hosts, error):
    with pytest.raises(AutoparError, match=error):
        ranks_per_host(hosts)


class Disturbed:
    """Links of equal speed; of the sends between ranks of one distance all but the last are slower."""

    def __init__(self, distance: int) -> None:
        self.distance, self.num_sends = distance, 0

    def sends(self, groups: Groups, sizes: list[int]) -> Iterator[CollectiveTime]:
        self.num_sends += 1
        is_slow = groups.stride == self.distance and self.num_sends <= 8
        yield from (CollectiveTime("p2p", groups, size, size / 1e9 * (5 if is_slow else 1)) for size in sizes)

    def collective(self, kind: str, groups: Groups, sizes: list[int]) -> Iterator[CollectiveTime]:
        yield from (CollectiveTime(kind, groups, size, size / 1e9) for size in sizes)


@pytest.mark.parametrize("distance", [1, 2])
def test_a_busy_machine_shows_no_step_of_bandwidth(distance):
    sizes, _ = measure_links(Disturbed(distance), 4, 4, QUICK, lambda _: None)
    assert sizes == (4,)


def test_updates_of_parameters_that_caches_hold_are_as_fast_as_timed_and_large_ones_as_slow():
    times = {64: 4e-5, 2**18: 1.4e-4, 2**22: 3.2e-3, 2**24: 2e-2}
    rank = replace(on_rank(TRUTH), updates=tuple(UpdateTime(4, size, 4 * time_s) for size, time_s in times.items()))
    fitted = fit_cluster(replace(measured(), ranks=(rank,) * 4), "fitted", "cpu", "gloo", ())
    assert max(point.error for point in fitted.points if point.term == "update") < 0.01
    between = update_time(7.0 * 2**23, fitted.cluster)
    assert 2 * times[2**22] < between < times[2**24]
    assert update_time(7.0 * 2**26, fitted.cluster) == pytest.approx(4 * times[2**24], rel=0.01)
    assert update_time(7.0 * 2**24, fitted.cluster.at_best()) < 0.5 * times[2**24]


class Late:
    """Links whose ranks keep others waiting for 3 ms."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def lateness_s(self, groups: Groups) -> float:
        assert groups == Groups(4, 1, 4)
        return 3e-3


def test_collectives_of_ranks_that_share_cores_are_late_as_in_steps():
    timed = [CollectiveTime(kind, Groups(4, 1, 4), 2**20, 1e-2) for kind in (*KINDS, "p2p")]
    seconds = [one.seconds for one in in_steps(Late("cpu"), 4, timed, lambda _: None)]
    assert seconds == pytest.approx([1.3e-2] * len(KINDS) + [1e-2])
    for device, num_ranks in (("cuda", 4), ("cpu", 1)):
        assert in_steps(Late(device), num_ranks, timed, lambda _: None) == timed


def test_a_rank_that_is_done_computes_while_others_time_their_ops(monkeypatch):
    asked, done = [], []

    class Met:
        def is_completed(self) -> bool:
            asked.append(None)
            return len(asked) > 3

        def wait(self) -> None:
            done.append(None)

    monkeypatch.setattr(dist, "barrier", lambda **_: Met())
    monkeypatch.setattr(torch, "mm", lambda *_: done.append("product"))
    TimedLinks(CPU, 1.0, 0.1, _world=["all"]).stay_busy()
    assert done == ["product"] * 3 + [None]


def test_messages_that_buffers_on_the_way_take_at_once_do_not_make_large_ones_cheaper():
    """Of links behind a token bucket, the largest messages are priced as they were timed, and so are the smallest."""
    draw = random.Random(0)
    own = replace(measured(), hosts=("a",) * 4, level_sizes=(4,))
    for beta in (1e-9, 1e-8, 5e-8):
        floors, times = {kind: draw.uniform(1e-3, 5e-3) for kind in ("p2p", *KINDS)}, []
        for kind, least_s in floors.items():
            seconds = [max(least_s, beta * (size + 2**12)) * draw.uniform(0.97, 1.03) for size in FULL.sizes]
            groups = Groups(2 if kind == "p2p" else 4, 1, 4)
            times += [CollectiveTime(kind, groups, *one) for one in zip(FULL.sizes, seconds)]
        fitted = fit_cluster(replace(own, links=tuple(times)), "fitted", "cpu", "gloo", ())
        off = [point for point in fitted.points if "among" in point.term and point.error > 0.08]
        assert not off
        again = cluster_from_json(fitted.cluster.to_json())
        assert again == fitted.cluster
        assert transfer(again, 2, 1).send_s(64) == pytest.approx(floors.pop("p2p"), rel=0.05)
        for kind, least_s in floors.items():
            assert float(collective_times(again, (4,), (0,), kind, 64.0)) == pytest.approx(least_s, rel=0.05)


def test_the_least_base_latency_is_nothing_and_never_less():
    """Of the collective whose hops take least, the rest of its latency is 0 but for rounding."""
    draw, sizes = random.Random(0), FULL.sizes
    for _ in range(40):
        latency_s = draw.uniform(1e-6, 1e-3)
        times = [CollectiveTime("p2p", Groups(2, 1, 8), size, 1e-2 + size / 1e9) for size in sizes]
        for number, kind in enumerate(KINDS):
            base_s = (number + 1) * latency_s
            times += [CollectiveTime(kind, Groups(8, 1, 8), size, base_s + size / 1e9) for size in sizes]
        own = replace(measured(), hosts=("a",) * 8, level_sizes=(8,), ranks=measured().ranks * 2, links=tuple(times))
        (level,) = fit_cluster(own, "fitted", "cpu", "gloo", ()).cluster.levels
        assert 0 <= min(rate.base_latency_s for rate in level.group_rates) < 1e-9
