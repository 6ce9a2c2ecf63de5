"""The hub: downloads go on as before; one that does not answer costs seconds, not a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.fake_hub import REPO, FakeHub, run_with_hub, serve
from tests.helpers.models import build_tokenizer, make_tiny_model

NOBODY = "http://127.0.0.1:9"  # a port that nothing listens on
STATUSES = {401: "None", 404: "None", 429: "None", 503: "{url} answers with HTTP status 503"}
PROBE = f"""
from rlkv.models.builtin import connection_error
for status in {list(STATUSES)}:
    print(connection_error(f"{REPO}-{{status}}", "config.json"))
"""
LOAD = """
import sys, time, warnings
from rlkv.models.loading import load_model
import transformers.models.llama.modeling_llama  # the time of imports is not what is measured
warnings.simplefilter("always")
for repo in sys.argv[1:]:
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        try:
            model, tokenizer = load_model(repo, device="cpu")
            print("loaded", sum(p.numel() for p in model.parameters()), len(tokenizer))
        except ValueError as error:
            print("refused:", error)
    print("warned:", *[w.message for w in caught if "hub" in str(w.message)])
    print(time.monotonic() - started)
"""


def test_only_a_hub_that_does_not_work_counts_as_away(tmp_path: Path) -> None:
    with serve(FakeHub()) as hub:
        expected = [answer.format(url=hub.url) for answer in STATUSES.values()]
        assert run_with_hub(PROBE, hub.url, tmp_path) == expected
        asked = [request for request in hub.requests if REPO in request]
        assert asked == [f"HEAD /{REPO}-{status}/resolve/main/config.json" for status in STATUSES]
        del hub.requests[:]
        offline = run_with_hub(PROBE, hub.url, tmp_path, HF_HUB_OFFLINE="1")
        assert offline == ["None"] * len(STATUSES)
        assert hub.requests == []


@pytest.mark.slow
def test_download_then_cache_then_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    home = tmp_path / "home"
    tokenizer = build_tokenizer()
    model = make_tiny_model("llama", vocab_size=len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded = f"loaded {sum(p.numel() for p in model.parameters())} {len(tokenizer)}"

    with serve(FakeHub(folder)) as hub:
        assert run_with_hub(LOAD, hub.url, home, REPO)[:2] == [loaded, "warned:"]
        assert f"GET /{REPO}/resolve/main/model.safetensors" in hub.requests
        del hub.requests[:]
        offline = run_with_hub(LOAD, hub.url, home, REPO, HF_HUB_OFFLINE="1")
        assert offline[:2] == [loaded, "warned:"]
        assert hub.requests == []

    lines = run_with_hub(LOAD, NOBODY, home, REPO, "owner/other")
    found, warned, seconds, refused, nothing, more_seconds = lines
    assert found == loaded
    assert "Connection refused" in warned
    assert warned.endswith("owner/model comes from its local cache")
    assert refused.startswith("refused: cannot load model 'owner/other': ")
    assert "Connection refused" in refused
    assert "its local cache does not hold it either" in refused
    assert nothing == "warned:"
    assert max(float(seconds), float(more_seconds)) < 10  # 46 s with the retries of the client
