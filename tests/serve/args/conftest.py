"""Files that flags name, in the working folder of every test."""

import pytest
import yaml


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Files that flags name, in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (tmp_path / name).write_text("PEM")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "plain.jinja").write_text("always the same")
    (tmp_path / "blank").write_text("\n")
    (tmp_path / "keys").write_text("# keys\n\n k1 \nk2\n")
    (tmp_path / "no_keys").write_text("# none\n\n")
    (tmp_path / "bad_keys").write_text("one\nto ken\n")
    (tmp_path / "latin").write_bytes(b"\xe9{")
    (tmp_path / "sampling").mkdir()
    (tmp_path / "sampling" / "generation_config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def config(files):
    def write(content) -> list[str]:
        (files / "c.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return ["--config", "c.yaml"]

    return write
