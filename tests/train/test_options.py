"""Options of a run: flags before presets, presets before defaults, each of its own type."""

import sys
from pathlib import Path

import pytest

from dflash_jax import ConfigError
from dflash_jax import train as room
from dflash_jax.train import __main__ as command_line
from dflash_jax.train.command import parse


def test_options_come_from_flags_before_presets(tmp_path):
    preset = tmp_path / "preset.yaml"
    preset.write_text("target: T\nblock-size: 8\nlayer-types: [full_attention]\nlearning-rate: 6.0e-4\n")
    config = parse(["--config", str(preset), "--data", "D", "E", "--out", "O", "--block-size", "10"])
    assert (config.target, config.data, config.block_size) == ("T", ("D", "E"), 10)
    assert (config.layer_types, config.learning_rate, config.decay) == (("full_attention",), 6e-4, 5.0)
    preset.write_text("learning-rat: 1\n")
    with pytest.raises(ConfigError, match="no option 'learning_rat'"):
        parse(["--config", str(preset), "--data", "D", "--out", "O"])
    with pytest.raises(ConfigError, match="--out is missing"):
        parse(["--target", "T", "--data", "D"])
    with pytest.raises(ConfigError, match="batch_tokens=10 "):
        parse(["--target", "T", "--data", "D", "--out", "O", "--batch-tokens", "10"])


def test_values_of_a_preset_have_the_types_of_their_options(tmp_path):
    preset, flags = tmp_path / "preset.yaml", ["--target", "T", "--out", "O"]
    preset.write_text("learning_rate: 1e-3\nweight_decay: 0\nminutes: 5\ndata: D\ngamma: null\n")
    config = parse(["--config", str(preset), *flags])  # YAML 1.1 has 1e-3, without a dot, for a string
    assert (config.learning_rate, config.weight_decay, config.minutes) == (1e-3, 0.0, 5.0)
    assert (config.data, config.gamma) == (("D",), None)
    for line, message in {
        "learning_rate: fast": "learning_rate='fast' must be a number",
        "learning_rate: .nan": "learning_rate=nan must be a number",
        "learning_rate: true": "learning_rate=True must be a number",
        "learning_rate:": "learning_rate=None must be a number",
        "epochs: 1.5": "epochs=1.5 must be an integer",
        "epochs: 1e3": "epochs='1e3' must be an integer",
        "target_layer_ids: [1, x]": "target_layer_ids=.* must be an integer",
        "loss: 1": "loss=1 is unknown; choose one of decay, dpace",
    }.items():
        preset.write_text(line)
        with pytest.raises(ConfigError, match=message):
            parse(["--config", str(preset), "--data", "D", *flags])


@pytest.mark.parametrize("path", sorted(Path("configs/train").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_are_valid(path):
    assert parse(["--config", str(path), "--target", "T", "--data", "D", "--out", "O"])


@pytest.mark.parametrize(("module", "package"), [("optax", "optax"), ("orbax.checkpoint", "orbax-checkpoint")])
def test_a_package_of_training_that_is_not_installed_is_named(monkeypatch, capsys, module, package):
    for name in ("command", "loop", "checkpoints"):  # what imports such packages
        monkeypatch.delitem(sys.modules, f"{room.__name__}.{name}")
    monkeypatch.delattr(room, "command")
    monkeypatch.setitem(sys.modules, module, None)
    assert command_line.main(["--help"]) == 2
    assert capsys.readouterr().err == (
        f"error: training needs the package {package}, which is not installed; run pip install '.[train]' in the "
        "checkout.\n"
    )


def test_a_wrong_option_is_told_in_a_sentence(capsys):
    assert command_line.main(["--target", "T", "--data", "D"]) == 2
    assert capsys.readouterr().err.endswith("error: --out is missing; give it as a flag or in the preset.\n")
