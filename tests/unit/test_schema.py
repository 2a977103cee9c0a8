"""How a joiner may differ from the members: not at all."""

import sys

from elastic_train.launch.code import code_digests
from elastic_train.membership.schema import Difference, describe, differences, most_common

OURS = {"config/width": "32", "state/params/w": "float32[8,32]", "code/recipe.py": "aa", "versions/jax": "0.12.0"}


def test_equal_schemas_do_not_differ():
    assert differences(OURS, dict(OURS)) == []


def test_what_is_likely_the_cause_comes_first():
    theirs = {**OURS, "state/params/w": "float32[8,16]", "config/width": "16", "code/recipe.py": "bb"}
    assert [each.key for each in differences(OURS, theirs)] == ["code/recipe.py", "config/width", "state/params/w"]


def test_of_the_state_parameters_come_first():
    theirs = {**OURS, "state/opt_state/mu/w": "float32[1]", "state/params/w": "float32[1]"}
    assert [each.key for each in differences(OURS, theirs)] == ["state/params/w", "state/opt_state/mu/w"]


def test_absent_keys_differ_but_not_modules_that_one_side_has_not_imported():
    theirs = {key: value for key, value in OURS.items() if key.startswith(("config", "versions"))}
    assert differences(OURS, theirs) == [Difference("state/params/w", "float32[8,32]", "absent")]


def test_words_name_a_dozen_and_count_the_rest():
    theirs = {**OURS, **{f"state/{number:02}": "float32[1]" for number in range(14)}}
    text = describe(differences(OURS, theirs))
    assert "state/00: absent with the members, float32[1] here" in text
    assert "state/11" in text and "state/12" not in text and "and 2 more" in text
    assert "must not depend on the host" in text
    edited = describe(differences(OURS, {**OURS, "code/recipe.py": "bb"}))
    assert "undo the change, or stop the run and start it again" in edited


def test_the_majority_counts_and_on_a_tie_the_first():
    other = {**OURS, "config/width": "16"}
    assert most_common([other, OURS, OURS]) == OURS
    assert most_common([other, OURS]) == other


def test_digests_of_code_ignore_comments_and_see_changes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def digests(source: str) -> dict[str, str]:
        (tmp_path / "digested_recipe.py").write_text(source)
        (tmp_path / "digested_helper.py").write_text("x = 1\n")
        for name in ("digested_recipe", "digested_helper"):
            sys.modules.pop(name, None)
        __import__("digested_recipe")
        return code_digests("digested_recipe")

    before = digests("import digested_helper\nrate = 1\n")
    assert sorted(before) == ["digested_helper.py", "digested_recipe.py"]
    assert digests("import digested_helper  # why\n\nrate = 1\n") == before
    after = digests("import digested_helper\nrate = 2\n")
    assert after["digested_recipe.py"] != before["digested_recipe.py"]
    assert after["digested_helper.py"] == before["digested_helper.py"]
