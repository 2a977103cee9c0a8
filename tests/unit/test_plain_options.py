"""`python recipes/x.py`: what is wrong with its options is told at once."""

from __future__ import annotations

import sys

import pytest

from elastic_train.plain import main
from recipes.digits_mlp import Digits


def test_missing_packages_are_told_with_the_settings_that_are_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sklearn", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    for wrong in ([], ["width=wide"]):
        monkeypatch.setattr(sys, "argv", ["digits_mlp.py", "--set", "tensorboard=true", *wrong])
        with pytest.raises(SystemExit) as ended:
            main(Digits)
        assert ended.value.code == 2
        *others, needs, asked = capsys.readouterr().err.splitlines()
        assert needs.endswith("Digits needs what is not installed: sklearn (pip install 'elastic-train[recipes]')")
        assert asked.startswith("tensorboard = true, but the package tensorboardX is not installed")
        assert len(others) == len(wrong)
