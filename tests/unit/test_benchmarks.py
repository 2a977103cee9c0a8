"""The pure parts of the benchmarks, and that results name no host and no directory of a machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import control_plane
import fault_cost
import report
import seed_fault
import step_time
from turns import END, Turn, Turns


def test_a_result_names_no_host_and_no_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import platform

    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/step_time.py", "recipes/gpt.py", "--out", str(out)])
    found = report.about()
    report.write(found, out)
    text = out.read_text()
    assert found["command"] == "python benchmarks/step_time.py recipes/gpt.py --out result.json"
    assert str(tmp_path) not in text and "/somewhere" not in text and platform.node() not in text
    assert found["versions"]["jax"] and found["hardware"]["cores"] >= 1 and len(found["load_average"]) == 3


def test_what_is_trained_is_passed_on_as_it_was_given() -> None:
    parser = report.parser_for_recipe("A text.", workers=3)
    given = parser.parse_args(["recipes/gpt.py", "--config", "gpt.toml", "--set", "a=1", "b=2", "--set", "c=3"])
    assert (given.recipe, given.workers, given.out) == ("recipes/gpt.py", 3, None)
    options = report.recipe_options(given, "d=4")
    assert options == ["--config", "gpt.toml", "--set", "a=1", "b=2", "c=3", "d=4"]
    again = parser.parse_args([given.recipe, *options])
    assert (again.config, again.set) == (given.config, [*given.set, "d=4"])
    assert report.recipe_options(parser.parse_args(["recipes/gpt.py"])) == []


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert report.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "quartile_1": 1.0, "quartile_3": 3.0, "num": 3}
    assert report.spread([5.0]) == {"median": 5.0, "quartile_1": 5.0, "quartile_3": 5.0, "num": 1}


def test_growth_is_a_line_and_an_exponent() -> None:
    fitted = control_plane.fit([10, 100, 1000], [0.2 + 0.01 * n for n in (10, 100, 1000)])
    assert fitted["at_zero"] == pytest.approx(0.2)
    assert fitted["per_100_workers"] == pytest.approx(1.0)
    assert control_plane.fit([10, 100], [1.0, 100.0])["exponent_at_the_end"] == 2.0
    assert control_plane.fit([10], [1.0]) == {}


def test_ratios_are_taken_turn_by_turn_to_the_faster_plain_loop() -> None:
    memory = {"peak_device_mib": 100.0}
    found = step_time.compared(
        {
            "plain": {"turns": [[0.010, 0.010], [0.040, 0.040]], "memory": memory},
            "plain_late": {"turns": [[0.020], [0.080]], "memory": memory},
            "ours-4": {"turns": [[0.011], [0.044]], "memory": {"peak_device_mib": 103.0}},
        },
        num_samples=16,
    )
    ours = found["variants"]["ours-4"]
    assert found["plain_is"] == "plain"
    # The machine was four times slower in the second turn; the ratio does not show it.
    assert ours["ratio_to_plain"]["median"] == ours["ratio_to_plain"]["quartile_3"] == pytest.approx(1.1)
    assert ours["peak_device_ratio"] == 1.03
    assert found["variants"]["plain"]["samples_per_s"] == pytest.approx(16 / 0.025)


def test_a_turn_is_taken_once_and_told_when_all_members_have(tmp_path: Path) -> None:
    driver = Turns(tmp_path)
    members = [Turns(tmp_path, member) for member in range(2)]
    driver.give(turn := Turn(0, "plain"))
    assert [member.wait("seed", "plain") for member in members] == [turn, turn]
    members[1].done(turn, {"value": 1})
    assert driver.told(turn, 2) == []
    members[0].done(turn, {"value": 0})
    assert driver.told(turn, 2) == [{"value": 0}, {"value": 1}]
    driver.give(Turn(1, END))  # a turn that was taken is not given again: what comes next is the end
    assert members[0].wait("plain") == Turn(1, END)


def test_an_epoch_is_split_into_parts_that_add_up(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    lines = [
        {"line": "process", "time": 100.0, "unix_time": 1100.0},
        {"line": "concluded", "time": 110.0, "epoch": 1, "number": 9, "verdict": "shrink", "next_epoch": 2},
        {"line": "enter", "time": 110.2, "epoch": 2, "number": 0},
        {"line": "exit", "time": 110.3, "epoch": 2, "number": 0},
        {"line": "enter", "time": 110.6, "epoch": 2, "number": 1},
        {"line": "exit", "time": 110.65, "epoch": 2, "number": 1},
        {"line": "concluded", "time": 110.7, "epoch": 2, "number": 1, "verdict": "commit", "next_epoch": 2},
    ]
    joiners = [lines[0], *lines[2:]]  # who was not there before cannot tell what the change cost
    for name, written in (("0-1", joiners), ("1-0", lines)):
        (tmp_path / "blocks" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    parts = fault_cost.epoch_parts(tmp_path, {"epoch": 2, "heal_s": 0.1, "reported_time": 1111.0})
    assert parts.pop("concluded") == 1110.0
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["compile"] == pytest.approx(0.2)
    assert parts["communicator"] == pytest.approx(0.4)
    assert parts["redo"] == pytest.approx(0.2)
    with pytest.raises(SystemExit, match="epoch 3"):
        fault_cost.epoch_parts(tmp_path, {"epoch": 3, "heal_s": 0.0, "reported_time": 0.0})


def test_the_guides_loss_counts_failed_attempts() -> None:
    lines = [
        {"error": None, "ended": 9.0},
        {"error": "XlaRuntimeError", "ended": 20.0},
        {"error": None, "ended": 22.0},
    ]
    found = seed_fault.loss(lines, 10.0, {"began": 20.0, "met": 20.5, "healed": 20.5, "ended": 22.0})
    assert found["kill_to_next_commit_s"] == 12.0
    assert found["failed_attempts"] == 1
    assert found["detect_and_agree_s"] + found["rebuild_communicator_s"] + found["redo_and_compile_s"] == 12.0
