"""The password of Redis from a file, as container secrets are mounted."""

from pathlib import Path

import pytest

from shared.settings import Settings, SettingsError, load, with_password


def test_the_password_goes_into_the_url(tmp_path: Path):
    (tmp_path / "secret").write_text("p@ss/word\n")
    environment = {
        "COLLM_REDIS_URL": "rediss://gateway@redis.example:6380/0?ssl_ca_certs=/ca.pem",
        "COLLM_REDIS_PASSWORD_FILE": str(tmp_path / "secret"),
    }
    found = load(Settings, environment).redis_url
    assert found == "rediss://gateway:p%40ss%2Fword@redis.example:6380/0?ssl_ca_certs=/ca.pem"


def test_a_url_that_has_a_password_keeps_it():
    assert with_password("redis://u:own@h:1/0", "other") == "redis://u:own@h:1/0"
    assert with_password("redis://h:1/0", "word") == "redis://:word@h:1/0"
    assert with_password("redis+sentinel://a:1,b:2/s/0", "w") == "redis+sentinel://:w@a:1,b:2/s/0"


@pytest.mark.parametrize("content", [None, ""])
def test_a_missing_or_empty_file_stops_the_start_and_is_named(tmp_path: Path, content):
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match="secret holds no password"):
        load(Settings, {"COLLM_REDIS_PASSWORD_FILE": str(path)})
