"""Servers that take turns are compared with the first."""

import json

import bench_in_turns
import pytest

from tests.bench.mock_server import DONE, Mock, Reply, serving, text, usage


def test_the_slower_server_is_seen_to_be_slower(tmp_path):
    pieces = [text("Hel"), text("lo", finish_reason="length"), usage(4), DONE]
    mocks = [Mock(lambda body, number, pause=pause: Reply(pieces, pause=pause)) for pause in (0.0, 0.03)]
    with serving(mocks[0]) as fast, serving(mocks[1]) as slow:
        servers = [f"fast={fast.url}", f"slow={slow.url}"]
        bench_in_turns.main([*servers, "--turns=3", "--streams=2", f"--out={tmp_path / 'out.json'}"])
    result = json.loads((tmp_path / "out.json").read_text())
    base, other = result["quartiles"]["fast"], result["quartiles"]["slow"]
    assert (base["first_token_ms_more"], base["share_of_speed"]) == (0, 1)
    assert other["first_token_ms_more"] >= 15
    assert other["share_of_speed"] < 0.7
    assert len(fast.bodies) == len(slow.bodies) == 2 * (3 + bench_in_turns.WARM_UPS)


@pytest.mark.parametrize("server", ["a", "a=", "=http://127.0.0.1:8000"])
def test_a_server_has_a_name_and_a_url(capsys, server):
    assert bench_in_turns.main(["bare=http://127.0.0.1:1", server]) == 2
    assert capsys.readouterr().err == f"error: {server!r} must be NAME=URL, such as bare=http://127.0.0.1:8000.\n"
