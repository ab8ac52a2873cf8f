"""The server as a whole, over real sockets: what operators and curl see."""

import json

from tests.serve.live import NAME


def test_models_health_and_version(live):
    assert live.get("/health") == (200, b"")
    (model,) = json.loads(live.get("/v1/models")[1])["data"]
    assert model["id"] == NAME
    assert model["max_model_len"] == 4096
    assert live.get(f"/v1/models/{NAME}")[0] == 200
    status, body = live.get("/v1/models/gpt-4")
    assert status == 404
    assert json.loads(body)["error"]["type"] == "NotFoundError"
    assert live.get("/version")[0] == 200


def test_the_answer_does_not_depend_on_the_drafter(live):
    prompt = {"prompt": "You may reproduce and distribute copies of the", "max_tokens": 48, "temperature": 0}
    with_drafter = live.post("/v1/completions", prompt)[1]
    without = live.post("/v1/completions", prompt | {"speculation": False})[1]
    assert with_drafter["choices"][0]["text"] == without["choices"][0]["text"]
    assert with_drafter["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert without["metrics"]["speculative_decoding"]["num_spec_steps"] == 0


def test_spec_decode_metrics_agree(live):
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    before = [live.metric(f"spec_decode_{name}_total") for name in names]
    body = {"prompt": "7. Disclaimer of Warranty. Unless required by", "max_tokens": 64, "temperature": 0}
    spec = live.post("/v1/completions", body)[1]["metrics"]["speculative_decoding"]
    drafts, drafted, accepted, by_position = (
        live.metric(f"spec_decode_{name}_total") - b for name, b in zip(names, before, strict=True)
    )
    histogram = spec["acceptance_histogram"]
    assert sum(histogram) == spec["num_spec_steps"] == drafts
    assert sum(j * steps for j, steps in enumerate(histogram)) == spec["num_accepted_draft_tokens"] == accepted
    assert accepted == by_position
    assert accepted <= spec["num_draft_tokens"] == drafted
    assert spec["mean_acceptance_length"] == 1 + accepted / drafts
