"""The page of a timeline, in a real browser, with its mouse and its keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.pages.timeline import timeline_page
from lightning_tspipe.simulation.attribution import Idle, attribute
from lightning_tspipe.simulation.timeline import Span, Timeline
from tests.browser import Browser, Page, browser
from tests.unit.cli.profiles import step_profile

PLAN = step_profile().plan(3)
RECORDING = PLAN.simulate_recording(6)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as it:
        yield it


@dataclass
class Shown:
    """A page, and where on it the drawn times are."""

    page: Page
    timeline: Timeline

    @property
    def range(self) -> tuple[float, float]:
        """The moments at the left and the right end, in milliseconds."""
        first, last = self.page.js("Object.values((({from, to}) => ({from, to}))(view.dataset))")
        return float(first), float(last)

    def place(self, rank: int, seconds: float, drawing: int = 0) -> tuple[float, float]:
        """The point of a moment of a rank."""
        canvas = f"document.querySelectorAll('canvas')[{drawing}]"
        x, y, width, height = self.page.js(
            "(({x, y, width, height}) => [x, y, width, height])"
            f"({canvas}.getBoundingClientRect())"
        )
        first, last = self.range
        moment = (seconds - self.timeline.steady_start) * 1e3
        row = (height - 24) / self.timeline.num_ranks  # below is the axis
        return x + width * (moment - first) / (last - first), y + row * (rank + 0.5)

    def tip(self, rank: int, seconds: float, drawing: int = 0) -> list[str]:
        """What the page says of a point."""
        self.page.move(*self.place(rank, seconds, drawing))
        tip = "document.querySelector('.tip')"
        return self.page.js(f"{tip}.hidden ? '' : {tip}.innerText").split("\n")


def show(chromium: Browser, folder: Path, timelines: dict[str, Timeline]) -> Shown:
    path = folder / "timeline.html"
    path.write_text(timeline_page("a <run>", timelines, PLAN.pipeline), encoding="utf-8")
    page = chromium.open(path)
    page.js("window.view = document.querySelector('.viewer')")
    return Shown(page, next(iter(timelines.values())))


@pytest.fixture
def shown(chromium: Browser, tmp_path: Path) -> Iterator[Shown]:
    it = show(chromium, tmp_path, {"measured": RECORDING})
    yield it
    assert not it.page.problems  # such as a request for something that is not in the file


def middle(item: Span | Idle) -> float:
    return (item.start + item.end) / 2


def first_forward(timeline: Timeline, step: int) -> Span:
    spans = (each for each in timeline.of_rank(1) if each.step == timeline.steps[step])
    return next(each for each in spans if each.op == "F")


def longest_wait() -> Idle:
    waits = [each for each in attribute(RECORDING, PLAN.pipeline).idle if each.awaited]
    return max(waits, key=lambda each: each.seconds)


def test_every_action_says_what_it_is(shown: Shown) -> None:
    steady = [span for span in RECORDING.spans if span.step == RECORDING.steps[2]]
    forward = next(span for span in steady if span.op == "F" and span.rank == 1)
    title, place, batch, start = shown.tip(forward.rank, middle(forward))
    duration = (forward.end - forward.start) * 1e3
    assert title.startswith(f"student forward {forward.action}: {duration:.1f}")
    assert title.endswith(" ms")
    assert place.startswith("rank 1, stage ")
    assert batch == f"batch {forward.batch}, run in step {forward.step}"
    assert start.startswith("starts at ")
    ahead = next(span for span in steady if span.action.endswith("+1") and span.op == "T")
    assert f"batch {ahead.step + 1}, run in step {ahead.step}" in shown.tip(
        ahead.rank, middle(ahead)
    )
    assert shown.tip(0, RECORDING.start - 1.0) == [""]


def test_a_rank_that_waits_says_for_whom(shown: Shown) -> None:
    wait = longest_wait()
    assert wait.awaited is not None
    title, until, _ = shown.tip(wait.rank, middle(wait))
    words = title.split()
    assert words[:3] == ["rank", str(wait.rank), "waits"]
    assert float(words[3]) == pytest.approx(wait.seconds * 1e3, rel=0.05)
    assert words[4:] == ["ms", "for", "rank", str(wait.awaited.rank)]
    assert f"until {wait.awaited.action} has ended there" in until
    assert f"batch {wait.awaited.batch}" in until


def test_ranks_show_their_utilization_and_the_legend_what_there_is(shown: Shown) -> None:
    found = shown.page.js("[...document.querySelectorAll('.ranks li')].map(item => item.innerText)")
    start, end = RECORDING.windows[2]
    busy = f"busy {100 * RECORDING.busy(2) / (end - start):.0f} %"
    assert found[2].split("\n") == ["rank 2", busy]
    legend = shown.page.js("document.querySelector('.legend').innerText")
    assert "teacher forward, next batch" in legend
    assert "waits for a rank" in legend
    assert shown.page.js("document.title") == "a <run>"
    assert "waits longest for" in shown.page.js("document.querySelector('table').innerText")


def test_bars_have_the_colours_of_the_legend(shown: Shown) -> None:
    backward = next(span for span in RECORDING.spans if span.op == "B" and span.step > 5)
    x, y = shown.place(backward.rank, backward.start + (backward.end - backward.start) * 0.1)
    colour = shown.page.js(
        "(canvas => { const box = canvas.getBoundingClientRect();"
        f" return [...canvas.getContext('2d').getImageData({x} - box.x, {y} - box.y, 1, 1).data];"
        "})(document.querySelector('canvas'))"
    )
    assert colour == [0x00, 0x9E, 0x73, 255]


def test_the_wheel_zooms_around_the_mouse_and_a_drag_moves(shown: Shown) -> None:
    whole, span = shown.range, RECORDING.of_rank(1)[20]
    x, y = shown.place(1, middle(span))
    shown.page.wheel(x, y, -600)
    first, last = shown.range
    assert (last - first) == pytest.approx((whole[1] - whole[0]) * 0.4066, rel=1e-3)
    # What lay below the mouse still does.
    assert shown.place(1, middle(span))[0] == pytest.approx(x, abs=0.5)
    assert span.action in shown.tip(1, middle(span))[0]
    shown.page.drag((x, y), (x - 100, y))
    assert shown.place(1, middle(span))[0] == pytest.approx(x - 100, abs=0.5)
    assert span.action in shown.tip(1, middle(span))[0]
    shown.page.js("[...document.querySelectorAll('button')].at(-1).click()")
    assert shown.range == pytest.approx(whole)
    # Never beyond what there is.
    shown.page.wheel(x, y, 600)
    assert shown.range == pytest.approx(whole)
    shown.page.js("view.focus()")
    shown.page.call("Input.dispatchKeyEvent", type="keyDown", key="+", text="+")
    first, last = shown.range
    assert last - first == pytest.approx((whole[1] - whole[0]) / 1.5)


def test_two_timelines_have_one_axis(chromium: Browser, tmp_path: Path) -> None:
    slower = [replace(each, start=2 * each.start, end=2 * each.end) for each in RECORDING.spans]
    measured = Timeline(tuple(slower), 3, RECORDING.pipeline)
    it = show(chromium, tmp_path, {"measured": measured, "simulated": RECORDING})
    # In a timeline that begins elsewhere the first steady steps are below each other.
    span = first_forward(RECORDING, 3)
    again = replace(it, timeline=RECORDING)
    assert span.action in again.tip(1, middle(span), drawing=1)[0]
    it.page.wheel(*it.place(0, it.timeline.start, drawing=1), -300)
    assert span.action in again.tip(1, middle(span), drawing=1)[0]
    span = first_forward(measured, 1)
    assert span.action in it.tip(1, middle(span))[0]
    assert not it.page.problems


def test_thousands_of_actions(chromium: Browser, tmp_path: Path) -> None:
    many = PLAN.simulate(600)
    assert len(many.spans) > 20_000
    it = show(chromium, tmp_path, {"simulated": many})
    span = many.of_rank(2)[9_001 % len(many.of_rank(2))]
    for _ in range(12):
        it.page.wheel(*it.place(2, middle(span)), -400)
    assert span.action in it.tip(2, middle(span))[0]
    assert not it.page.problems


def test_texts_cannot_end_the_script(chromium: Browser, tmp_path: Path) -> None:
    it = show(chromium, tmp_path, {"</script><script>alert(1)</script>": RECORDING})
    assert "</script>" in it.page.js("document.querySelector('h3').innerText")
    assert not it.page.problems


def test_an_empty_timeline_has_no_page() -> None:
    with pytest.raises(ConfigurationError, match="no spans"):
        timeline_page("nothing", {"measured": Timeline((), 2)})
