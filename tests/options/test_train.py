"""The options of training: flags and preset become one `TrainConfig`, which checks them together."""

import pytest

from dflash_jax.base.errors import ConfigError
from dflash_jax.train.command import parse

REQUIRED = ["--target", "T", "--data", "D", "--out", "O"]


@pytest.fixture
def preset(tmp_path):
    def write(text: str) -> list[str]:
        path = tmp_path / "preset.yaml"
        path.write_text(text)
        return ["--config", str(path), *REQUIRED]

    return write


def test_numbers_that_yaml_reads_as_text(preset):
    """YAML 1.1 has no number 1e-3: PyYAML reads the text "1e-3"."""
    config = parse(preset("learning_rate: 1e-3\nmax-grad-norm: 2\nweight-decay: 0"))
    assert (config.learning_rate, config.max_grad_norm, config.weight_decay) == (1e-3, 2, 0)


def test_one_value_of_a_list_needs_no_list(preset):
    assert parse(preset("layer-types: full_attention")).layer_types == ("full_attention",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate: fast", ["learning_rate='fast' must be a number above 0"]),
        ("learning_rate: 0", ["learning_rate=0 must be above 0"]),
        ("epochs: 1.5", ["epochs=1.5 must be an integer of at least 1"]),
        ("warmup-ratio: 2", ["warmup_ratio=2 must be at least 0 and at most 1"]),
        ("loss: focal", ["loss='focal' is unknown; choose one of decay, dpace"]),
        ("layer-types: [full_attention, linear]", ["layer_types='linear' is unknown", "sliding_attention"]),
        ("epoch: 1", ["preset.yaml: there is no option 'epoch'; did you mean 'epochs'?"]),
        ("zzz: 1", ["preset.yaml: there is no option 'zzz'; there are batch_tokens, "]),
        ("3: 1", ["preset.yaml: there is no option '3'"]),
        ("- epochs", ["holds no options"]),
    ],
)
def test_a_bad_preset_is_refused(preset, text, words):
    with pytest.raises(ConfigError) as error:
        parse(preset(text))
    for word in words:
        assert word in str(error.value)


def test_a_bad_name_in_a_flag_is_refused_as_in_a_preset():
    with pytest.raises(ConfigError, match=r"^loss='focal' is unknown; choose one of decay, dpace\.$"):
        parse([*REQUIRED, "--loss", "focal"])
