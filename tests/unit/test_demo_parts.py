"""The demo's pure parts: the task, the checks, the record, the charts, the report."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from stitch.cli import main
from stitch.commands.demo import _summarize
from stitch.demo import task
from stitch.demo.checks import Check, all_checks, reward_check, swap_target
from stitch.demo.labels import LabelReport
from stitch.demo.record import Activation, RunRecord, StepRecord
from stitch.demo.report import html_report, summary_rows
from stitch.demo.run import Outcome
from stitch.demo.settings import DemoSettings
from stitch.demo.svg import Lane, bar_chart, histogram, line_chart, timeline
from stitch.demo.view import open_view
from stitch.errors import InvalidInput
from stitch.types import Ref

SETTINGS = DemoSettings(out=Path("unused"))


def good_labels() -> LabelReport:
    return LabelReport(
        2e-4, 0.95, trajectories=4, tokens=32, spans=5, versions=3, accepted=5,
        neighbours=10, rejected=10, error_max=1e-6,
    )  # fmt: skip


def report(replica: str, version: int, *, state: str = "READY", swap_s: float = 0.01) -> dict:
    return {
        "replica_id": replica, "state": state, "phase": "IDLE", "lag": 0,
        "served": {"run_id": "demo", "version": version},
        "gate_closed_s": swap_s * 2, "swap_s": swap_s, "recompute_s": None,
    }  # fmt: skip


def filled(steps: int = 20) -> RunRecord:
    now = iter(float(n) / 10 for n in range(10_000))
    record = RunRecord(lambda: next(now))
    for step in range(1, steps + 1):
        record.observe(report("replica-0", step))
        record.steps.append(
            StepRecord(step, float(step), step, step / steps, 1.0, 0.1, 1.0, 2, 0.1, 0.5, 0.02)
        )
        record.delta_bytes[step] = 1_000_000 + step
        record.kinds[step] = "anchor" if step == 1 else "delta"
        record.staleness.counts[step % 3] = step
    record.ended("replica-1", killed=True)
    record.note("replica-1 got SIGKILL <script>")
    record.observe(report("replica-2", steps))
    return record


def test_each_answer_token_is_verified() -> None:
    prompt = task.make_prompt(random.Random(0))
    assert len(prompt) == task.PROMPT_TOKENS
    assert task.token_rewards(prompt, prompt[1:-1]) == [1.0] * task.ANSWER_TOKENS
    wrong = [*prompt[1:5], *([task.EOS] * 4)]
    assert task.token_rewards(prompt, wrong) == [1.0] * 4 + [0.0] * 4


@pytest.mark.parametrize(
    ("rewards", "passed"),
    [
        ([0.1] * 10 + [0.9] * 10, True),
        ([0.06, 0.07, 0.05, 0.06] * 5, False),  # what a learning rate of 0 gives
        ([0.9] * 10 + [0.1] * 10, False),
        ([0.1, 0.9], True),
        ([], False),
    ],
)
def test_the_reward_must_rise_by_the_margin(rewards: list[float], passed: bool) -> None:
    assert reward_check(rewards, SETTINGS).passed is passed


def test_labels_pass_only_if_right_is_accepted_and_wrong_is_not() -> None:
    assert good_labels().passed
    one_wrong = good_labels()
    one_wrong.accepted -= 1
    assert not one_wrong.passed
    too_lax = good_labels()
    too_lax.rejected = 9
    assert not too_lax.passed
    nothing = LabelReport(2e-4, 0.95)
    assert not nothing.passed


def test_without_neighbours_the_check_says_that_none_could_be_tested() -> None:
    alone = good_labels()
    alone.neighbours = alone.rejected = 0
    checks = all_checks(SETTINGS, filled(), alone, latest=1, live=[], missing={})
    detail = next(check.detail for check in checks if check.name == "labels are true")
    assert "none could be tested" in detail
    assert "rejected in" not in detail
    assert "none could be tested" in html_report(SETTINGS, filled(), alone, [])


def test_progress_of_the_label_check_is_a_line_every_few_seconds() -> None:
    console = Console(file=io.StringIO(), width=80)
    view = open_view(SETTINGS, console)
    now = [0.0]
    record = RunRecord(lambda: now[0])
    view.attach(record)
    for done, now[0] in ((0, 1.0), (1, 2.0), (2, 5.0), (3, 6.0)):
        record.phase = f"checking labels: {done} of 3 versions"
        view.progress()
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "   1.0 s  checking labels: 0 of 3 versions",
        "   6.0 s  checking labels: 3 of 3 versions",
    ]


def test_the_summary_breaks_between_words_on_a_narrow_terminal() -> None:
    record = filled()
    checks = all_checks(SETTINGS, record, good_labels(), latest=20, live=["[r]"], missing={})
    outcome = Outcome(record, good_labels(), checks, Ref("demo", 20), Path("demo-out/report.html"))
    narrow = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    _summarize(outcome, narrow)
    lines = narrow.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    words = {word for check in checks for word in check.detail.split()}
    shown = {word for line in lines for word in line.split()}
    assert words <= shown


def test_an_interrupt_says_where_to_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stitch.demo.run.run_demo", interrupted)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().err
    assert "interrupted; no report was written" in said
    assert str(tmp_path / "logs") in said


def test_axes_keep_their_names_and_marks_apart() -> None:
    chart = ElementTree.fromstring(
        line_chart([("reward", [(0, 0.0), (9, 1.0)])], x_name="seconds", y_name="reward", y_max=1.0)
    )
    height = {text.text: float(text.get("y", "0")) for text in chart.iter("text")}
    assert height["1"] - height["reward"] >= 12
    bars = ElementTree.fromstring(
        bar_chart([(0, 5, 0), (1, 0, 0), (2, 700, 0)], x_name="age", y_name="n", label="l")
    )
    texts = [t for t in bars.iter("text") if t.get("text-anchor") == "middle"]
    assert [text.text for text in texts] == ["0", "1", "2"]


def test_a_missed_target_is_shown_and_does_not_decide() -> None:
    record = filled()
    record.activations = [Activation("r", 0.0, 1, 0.2, 0.09, None)]
    target = swap_target(record, SETTINGS)
    assert not target.passed
    assert not target.required
    assert "90.0 ms" in target.detail


def test_all_checks_name_what_is_missing() -> None:
    record = filled()
    missing = {"replica-0": "at version 3"}
    checks = all_checks(
        SETTINGS, record, good_labels(), latest=20, live=["replica-2"], missing=missing
    )
    by_name = {check.name: check for check in checks}
    assert not by_name["replicas converged"].passed
    assert "replica-0: at version 3" in by_name["replicas converged"].detail
    assert by_name["a killed replica was replaced"].passed
    assert "replica-2 joined" in by_name["a killed replica was replaced"].detail


def test_the_record_counts_each_activation_once() -> None:
    record = filled(steps=5)
    record.observe(report("replica-0", 5))
    record.observe(report("replica-0", 4, state="UNKNOWN"))
    record.observe(report("replica-0", 5))
    assert [a.version for a in record.activations if a.replica == "replica-0"] == [1, 2, 3, 4, 5]
    assert record.tracks["replica-1"].state == "KILLED"


@pytest.mark.parametrize(
    "chart",
    [
        line_chart([("a", [(0, 0.1), (1, 0.5)])], x_name="x", y_name="y", marks=[(0.5, "<m>")]),
        line_chart([], x_name="x", y_name="y"),
        line_chart([("flat", [(1, 0), (1, 0)])], x_name="x", y_name="y"),
        bar_chart([(1, 5, 0), (2, 7, 1)], x_name="x", y_name="y", label="<l>"),
        histogram([("a", [1.0, 2.0, 90.0]), ("b", [0.0])], x_name="ms"),
        histogram([("a", [])], x_name="ms"),
        timeline(
            [Lane("r<0>", 0.0, None, True, [(1.0, "READY", 1), (2.0, "UNKNOWN", None)])],
            end_s=5.0, version_max=3, marks=[(1.0, "m")],
        ),
        timeline([], end_s=1.0, version_max=1, marks=[]),
    ],
)  # fmt: skip
def test_charts_are_well_formed(chart: str) -> None:
    root = ElementTree.fromstring(chart)
    assert root.tag == "svg"
    for element in root.iter("rect"):
        assert float(element.get("width", "0")) >= 0
        assert float(element.get("height", "0")) >= 0


def test_the_report_is_whole_and_loads_nothing() -> None:
    record = filled()
    page = html_report(SETTINGS, record, good_labels(), [Check("reward rose", True, "a < b")])
    for words in ("Reward", "Replicas", "Pause", "Labels", "Publications", "a &lt; b"):
        assert words in page
    assert page.count("<svg") >= 3
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert "failed" in html_report(SETTINGS, record, good_labels(), [Check("x", False, "")])


def test_the_summary_survives_an_empty_run() -> None:
    assert dict(summary_rows(RunRecord(lambda: 0.0)))["versions published"] == "0"


def test_settings_are_checked() -> None:
    for wrong in ({"steps": 1}, {"replicas": 0}, {"lr": -1.0}, {"lr": float("nan")}):
        with pytest.raises(InvalidInput):
            DemoSettings(out=Path("x"), **wrong)
    assert DemoSettings(out=Path("x"), replicas=1).kill_step is None
    assert DemoSettings(out=Path("x"), steps=10).kill_step == 5
