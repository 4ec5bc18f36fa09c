"""Pages in a real browser, headless, by what a person does: open, fold, hover, search, switch plans, zoom.

They need Debian's chromium and chromium-driver, which `make test-page` installs, and are skipped where there are none.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.answers.scaling import ScalingPoint
from autopar.page.page_data import PageData, sweep_page
from autopar.page.write_page import write_page
from tests.page.page_cases import DEPTH, NAUGHTY, page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no chromium and chromedriver on this machine: `make test-page` installs both"
)
# Without the flags on networking, Chromium looks for servers of its own at every start.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --window-size=1300,1000"
)
STAGED = "pp=2,dp=2"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


class Reader:
    """A person before a page."""

    def __init__(self, driver, path: Path, content: PageData) -> None:
        self.driver = driver
        driver.get_log("browser"), driver.get_log("performance")
        write_page(str(path), content)
        driver.get(f"file://{path}")
        self.until(lambda: driver.execute_script("return document.body.dataset.ready") == "yes")

    def until(self, holds, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.05)

    def all(self, css: str) -> list:
        return self.driver.find_elements("css selector", css)

    def one(self, css: str):
        found = self.all(css)
        assert len(found) == 1, f"{css}: {len(found)}"
        return found[0]

    def text(self, css: str) -> str:
        return " ".join(each.text for each in self.all(css))

    def click(self, element) -> None:
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def heads(self) -> list[str]:
        return [each.text for each in self.all(".head .name")]

    def point_at(self, element, x: int = 0, y: int = 0) -> str:
        """The text beside the pointer."""
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        webdriver.ActionChains(self.driver, duration=0).move_to_element_with_offset(element, x, y).perform()
        self.until(lambda: not self.all("#about.away"))
        return self.text("#about")

    def choose(self, css: str, text: str) -> None:
        (option,) = [each for each in self.all(f"{css} option") if each.text == text]
        option.click()

    def check_quiet(self) -> None:
        """No error, and nothing was fetched but the file."""
        assert not [each for each in self.driver.get_log("browser") if each["level"] == "SEVERE"]
        asked = [
            each["message"] for each in self.driver.get_log("performance") if "requestWillBeSent" in each["message"]
        ]
        assert not [each for each in asked if '"url":"http' in each or '"url":"ws' in each]


def test_a_plan_is_opened_folded_pointed_at_searched_and_switched(browser, folder: Path) -> None:
    content = page("dp=2,tp=2")
    reader = Reader(browser, folder / "plan.html", content)
    # Opened: the figures of the plan, and its model as blocks, with a name that is a script as text.
    assert "%" in reader.text("#summary") and f"\u00d7{DEPTH - 1}" in reader.text(".copies")
    assert NAUGHTY in reader.heads() and not reader.all("#page script")
    # Folded and unfolded.
    before = len(reader.heads())
    reader.click(reader.one("#fold-all"))
    reader.until(lambda: len(reader.heads()) < before)
    reader.click(reader.one('[data-path="blocks"] > .head'))
    reader.until(lambda: reader.all('[data-path^="blocks."]'))
    reader.click(reader.one("#unfold-all"))
    reader.until(lambda: len(reader.heads()) > before and reader.all(".leaf"))
    # Pointed at: line, bytes and milliseconds.
    linear = next(each for each in reader.all(".leaf.op") if each.text.startswith("linear"))
    told = reader.point_at(linear)
    assert "page_cases.py:" in told and "forward" in told and "µs" in told and "on dp" in told
    weight = next(each for each in reader.all(".leaf.tensor") if each.text.startswith("weight"))
    reader.until(lambda: "iB" in reader.point_at(weight))
    assert "blocks.0.0.weight" in reader.text("#about")
    # Searched: a copy in the middle is found in the block that stands for it, and others are not.
    reader.click(reader.one("#fold-all"))
    reader.one("#search").send_keys("blocks.3.0.weight")
    reader.until(lambda: reader.text("#hits") == "1 found")
    (found,) = reader.all(".leaf.found")
    assert "weight" in found.text and "blocks.1.0.weight" in found.get_attribute("data-path")
    reader.one("#search").clear()
    reader.one("#search").send_keys("no_such")
    reader.until(lambda: reader.text("#hits") == "0 found")
    # Another plan: by its name in the table, and by the list.
    reader.one("#search").clear()
    step = reader.text("#summary .card strong")
    reader.click(next(each for each in reader.all(".pick") if each.text == "zero3"))
    reader.until(lambda: reader.text("#shown") == "zero3")
    assert reader.text("#summary .card strong") != step
    reader.choose("#switch", "this plan")
    reader.until(lambda: reader.text("#summary .card strong") == step)
    reader.check_quiet()


def test_the_timeline_of_stages_is_zoomed_and_pointed_at(browser, folder: Path) -> None:
    reader = Reader(browser, folder / "staged.html", page(STAGED))
    lanes = reader.one("#lanes")
    reader.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", lanes)
    reader.until(lambda: lanes.get_attribute("data-drawn") == "yes")
    assert "microbatch" in reader.point_at(lanes, -lanes.size["width"] // 2 + 100, -lanes.size["height"] // 2 + 16)
    reader.click(reader.one("#zoom-in"))
    reader.until(lambda: lanes.get_attribute("data-zoom") == "25.0 75.0")
    reader.click(reader.one("#zoom-all"))
    reader.until(lambda: lanes.get_attribute("data-zoom") == "0.0 100.0")
    assert "stage" in reader.text("#summary") and "bubble" in reader.text("#summary")
    reader.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", reader.one("#memory"))
    reader.choose("#rank", "1")
    reader.until(lambda: len(reader.all("#rank-times canvas, #rank-bytes canvas, #curve canvas")) == 3)
    # A hand plan in stages: its schedule in all sections, and back.
    step, other = reader.text("#summary .card strong"), "pp=2,vp=2,zero2,interleaved,m=8"
    reader.click(next(each for each in reader.all(".pick") if each.text == other))
    reader.until(lambda: reader.text("#shown") == other)
    assert "interleaved" in reader.text("#summary") and reader.text("#summary .card strong") != step
    reader.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", reader.one("#lanes"))
    reader.until(lambda: reader.one("#lanes").get_attribute("data-drawn") == "yes")
    reader.choose("#switch", "this plan")
    reader.until(lambda: reader.text("#summary .card strong") == step)
    reader.check_quiet()


def test_a_point_of_a_sweep_shows_its_plan(browser, folder: Path) -> None:
    points = [
        (ScalingPoint("m", "h100", 4, 4096, 0, mesh, 1.0, 0.9, 8.0, 0.0, 0.5, 1e9, 2.0), page(mesh).views[0])
        for mesh in ("dp=2,tp=2", STAGED)
    ]
    bad = ScalingPoint("m", "h100", 8, 4096, 0, error="nothing fits <i>here</i>")
    reader = Reader(browser, folder / "sweep.html", sweep_page("m over devices", [*points, (bad, None)]))
    assert "nothing fits <i>here</i>" in reader.text("#sweep .failed")
    reader.until(lambda: reader.all("#points[data-drawn] canvas"))
    assert "pp=2" not in reader.text("#summary")
    reader.click(reader.all("#sweep .pick")[1])
    reader.until(lambda: "pp=2" in reader.text("#summary"))
    reader.click(next(each for each in reader.all(".measure") if each.text == "MFU"))
    reader.until(lambda: reader.one(".measure[aria-pressed=true]").text == "MFU")
    reader.check_quiet()
