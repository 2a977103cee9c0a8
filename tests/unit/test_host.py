"""What a host needs before its agent starts."""

from pathlib import Path

import pytest

from elastic_train.errors import UsageError
from elastic_train.launch.environment import SECRET_VARIABLE
from elastic_train.launch.host import find_secret


@pytest.mark.parametrize("content", ["s3cret", "s3cret\n", " s3cret\r\n"])
def test_a_secret_that_was_copied_with_a_newline_fits(tmp_path: Path, content: str) -> None:
    (tmp_path / "secret").write_bytes(content.encode())
    assert find_secret(tmp_path, {}) == "s3cret"


def test_the_environment_comes_before_the_file_and_one_of_them_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{SECRET_VARIABLE} is not set"):
        find_secret(tmp_path, {})
    (tmp_path / "secret").write_text("other")
    assert find_secret(tmp_path, {SECRET_VARIABLE: "s3cret"}) == "s3cret"
