"""One server for all tests of this folder, which leave it as they found it, and OpenAI's client of it."""

import openai
import pytest
from tokenizers import Tokenizer

from tests.pairs import RECITER
from tests.serve.live import NAME, serving

FLAGS = (
    f"--served-model-name={NAME}",
    "--max-num-seqs=4",
    "--num-speculative-tokens=15",  # so that acceptance depends on the text alone, not on what rounds cost
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--reasoning-parser=qwen3",
    "--enable-request-id-headers",
)


@pytest.fixture(scope="package")
def live(tmp_path_factory):
    """A running server of the pair that recites."""
    with serving(tmp_path_factory.mktemp("live"), *FLAGS) as server:
        yield server
        server.wait_until(server.is_idle)


@pytest.fixture(scope="package")
def client(live):
    """OpenAI's client of the server."""
    with openai.OpenAI(base_url=f"{live.base}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="package")
def tight():
    """A bias against white space, which the model would write without end between the parts of JSON."""
    tokenizer = Tokenizer.from_file(str(RECITER / "target" / "tokenizer.json"))
    return {str(i): -100 for i in range(tokenizer.get_vocab_size()) if tokenizer.decode([i]).isspace()}
