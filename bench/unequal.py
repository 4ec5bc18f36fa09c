"""Shares of a batch on 8 V100 and 8 P100, by calculation from published seconds a step; no device is used.

    python -m bench.unequal

Of each model the seconds of a step at one batch on each kind of device were measured by others. What is calculated
assumes that they grow with the rows, and no communication: it is what shares alone can give. A device takes its rows in
as many microbatches as are accumulated, so that the whole rows of a step are shared out more finely.
"""

from autopar.shares.device_shares import DeviceSpeed, PlannedShares, best_shares, proportional_shares
from bench.papers.section import table
from bench.report import Row, add

# Rows of a step, and its seconds on a V100 and on a P100.
MEASURED = {
    "ResNet50": (64, 0.2503, 0.4150),
    "ShuffleNetv2": (128, 0.2163, 0.3645),
    "VGG19": (32, 0.2586, 0.3778),
    "BERT": (8, 0.4413, 0.6069),
    "Swin": (32, 0.4132, 0.5935),
}
EACH = 8  # devices of each kind
PEAKS = (15.7, 9.3)  # Tflop/s of float32, NVIDIA's data sheets of V100 SXM2 and P100 PCIe
ACCUMULATED = (1, 2, 4, 8)
COLUMNS = (
    "row",
    "rows of a V100",
    "rows of a P100",
    "equal shares, s",
    "shares, s",
    "over equal shares, times",
    "ideal, times",
    "peak flop/s, times",
)


def row_name(model: str, count: int) -> str:
    """
    >>> row_name("BERT", 4)
    'BERT, 8 rows x 4 accumulated'
    """
    return f"{model}, {MEASURED[model][0]} rows x {count} accumulated"


TABLE = table("8 V100 and 8 P100", COLUMNS, (row_name(model, count) for model in MEASURED for count in ACCUMULATED))


def shared(model: str, count: int) -> tuple[PlannedShares, list[DeviceSpeed]]:
    """The best shares of the whole rows of a step, and the devices."""
    rows, *seconds = MEASURED[model]
    devices = [DeviceSpeed(one / rows) for one in seconds for _ in range(EACH)]
    return best_shares(2 * EACH * rows * count, devices), devices


def measure(model: str, count: int) -> Row:
    """One row: all three ways to share out the same batch."""
    found, devices = shared(model, count)
    equal_s, total = max(device.step_s(MEASURED[model][0] * count) for device in devices), sum(found.sizes)
    by_peak = proportional_shares(total, [peak for peak in PEAKS for _ in range(EACH)])
    by_peak_s = max(device.step_s(size) for device, size in zip(devices, by_peak))
    figures = (
        _span(found.sizes[:EACH]),
        _span(found.sizes[EACH:]),
        equal_s,
        found.step_s,
        equal_s / found.step_s,
        equal_s / found.lower_bound_s,
        equal_s / by_peak_s,
    )
    return dict(zip(COLUMNS, (row_name(model, count), *figures)))


def _span(sizes: tuple[int, ...]) -> str:
    return str(min(sizes)) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"


def main() -> None:
    """Calculate all rows and write the results."""
    rows = [measure(model, count) for model in MEASURED for count in ACCUMULATED]
    add("unequal", [TABLE], {TABLE.title: rows}, {})


if __name__ == "__main__":
    main()
