"""Training data: its content, resuming of a run byte for byte, and refusals."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from dflash_jax import LLM, ConfigError, SamplingParams
from dflash_jax.text.repetition import repeated_ngrams
from dflash_jax.text.tokenizer import Tokenizer
from dflash_jax.train.data import command, run
from dflash_jax.train.data.complete import complete, complete_parts
from dflash_jax.train.data.folder import MANIFEST, DataFolder, read_manifest
from dflash_jax.train.data.options import DataOptions
from dflash_jax.train.data.prompts import drop_duplicates, parse_prompts
from dflash_jax.train.data.run import make_data, reason_to_drop
from dflash_jax.train.data.self_prompts import user_header
from dflash_jax.train.data.shards import Sample, read_jsonl, read_shards
from tests.pairs import BYTE_VOCABULARY, EOS, TARGET, write_byte_tokenizer, write_model
from tests.phases import phases

LINES = [
    {"messages": [{"role": "user", "content": "Hello"}]},
    {"prompt": "Once upon a time"},
    {"messages": [{"role": "user", "content": " Hello\n"}, {"role": "assistant", "content": "Hi"}]},  # a duplicate
    {"prompt_token_ids": [72, 105], "task": "greet"},
    {"prompt": "a" * 64},  # leaves no room for an answer
    {"prompt": "Once  upon a\ttime"},  # a duplicate
    {"prompt": "Twice upon a time"},
]
ENDS = [EOS, *range(16)]
OF_ANSWERS = ("responses", "failed", "too_short", "repetitive")
OF_PROMPTS = ("prompts", "prompts_duplicate", "prompts_unusable", "prompts_too_long", "prompts_unused")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random target over bytes whose answers are short, since many tokens end them."""
    folder = tmp_path_factory.mktemp("pair") / "target"
    sizes = {"vocab_size": BYTE_VOCABULARY, "eos_token_id": EOS, "num_hidden_layers": 1}
    write_byte_tokenizer(write_model(folder, TARGET | sizes, 0, scale=0.1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return folder


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, max_model_len=64, max_num_seqs=4, enable_prefix_caching=False)


@pytest.fixture
def options(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return DataOptions(prompts=(path,), temperatures=(0.0, 1.0), max_tokens=12, seed=3, shard_size=3)


SELF = DataOptions(self_prompts=9, prompt_max_tokens=24, max_tokens=3, temperatures=(1.0,), shard_size=5)


def begin(path, options):
    return DataFolder(path, model="tiny", arguments=options.arguments())


def make(llm, path, options):
    make_data(llm, options, begin(path, options))
    return contents(path)


def contents(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def lines(path):
    return [json.loads(line) for file in sorted(path.glob("shard-*")) for line in file.read_text().splitlines()]


def check_counts(path):
    counts = read_manifest(path).counts
    assert counts["prompts_read"] == sum(counts.get(name, 0) for name in OF_PROMPTS)
    assert counts["answered"] == sum(counts[name] for name in OF_ANSWERS)
    assert counts["responses"] == len(lines(path))
    assert counts["prompt_tokens"] == sum(len(line["prompt_token_ids"]) for line in lines(path))
    assert counts["response_tokens"] == sum(len(line["token_ids"]) for line in lines(path))
    return counts


def test_every_prompt_is_answered_at_every_temperature(llm, tmp_path, options):
    make(llm, tmp_path / "out", options)
    counts = check_counts(tmp_path / "out")
    assert {name: counts.get(name) for name in OF_PROMPTS} == {
        "prompts": 4,
        "prompts_duplicate": 2,
        "prompts_unusable": None,
        "prompts_too_long": 1,
        "prompts_unused": 0,
    }
    assert counts["answered"] == 8
    answers = lines(tmp_path / "out")
    assert [line["temperature"] for line in answers] == [0.0, 1.0] * 4
    prompts = [llm.tokenizer.decode(line["prompt_token_ids"]) for line in answers[::2]]
    assert prompts == [
        "<user>Hello<assistant>",
        "Once upon a time",
        llm.tokenizer.decode([72, 105]),
        "Twice upon a time",
    ]
    assert {line["source"] for line in answers} == {"prompts.jsonl"}
    for line in answers:
        *before, last = line["token_ids"]
        assert set(before).isdisjoint(ENDS)
        assert line["finish_reason"] == ("stop" if last in ENDS else "length")
        assert last in ENDS or len(before) == 11
    for line in answers[::2]:
        (alone,) = llm.generate(
            {"prompt_token_ids": line["prompt_token_ids"]}, SamplingParams(temperature=0, max_tokens=12)
        )
        assert line["token_ids"] == alone.outputs[0].token_ids


def test_seeds_decide_and_differ(llm, tmp_path, options):
    options = replace(options, temperatures=(1.0,), max_prompts=3)
    first = make(llm, tmp_path / "a", options)
    assert make(llm, tmp_path / "b", options) == first
    make(llm, tmp_path / "c", replace(options, seed=4))
    old, new = lines(tmp_path / "a"), lines(tmp_path / "c")
    assert [line["prompt_token_ids"] for line in old] == [line["prompt_token_ids"] for line in new]
    assert [line["token_ids"] for line in old] != [line["token_ids"] for line in new]
    assert check_counts(tmp_path / "a")["prompts_unused"] == 2


@pytest.mark.parametrize("source", ["files", "self"])
def test_resumes_byte_for_byte(llm, tmp_path, options, source, monkeypatch):
    options = options if source == "files" else SELF
    uninterrupted = make(llm, tmp_path / "whole", options)
    real, calls = run.responses_of, Counter()
    answering = 2 if source == "files" else 1

    def dies(*args):
        calls["answer"] += 1
        if calls["answer"] == answering + 1:
            raise RuntimeError("killed")
        return real(*args)

    monkeypatch.setattr(run, "responses_of", dies)
    with pytest.raises(RuntimeError, match="killed"):
        make(llm, tmp_path / "resumed", options)
    stopped = contents(tmp_path / "resumed")
    assert len([name for name in stopped if name.startswith("shard")]) == answering
    assert not read_manifest(tmp_path / "resumed").complete
    assert make(llm, tmp_path / "resumed", options) == uninterrupted
    total = len([name for name in uninterrupted if name.startswith("shard")])
    assert calls["answer"] == total + 1  # finished shards are not made again
    assert read_manifest(tmp_path / "resumed").complete


def test_a_part_begins_while_the_last_answers_of_another_come(llm):
    """Four slots: the short ones of six answers leave slots to the next part long before the longest has ended."""
    long, short = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (40, 2))
    prompts = [[n] for n in range(40, 46)]
    params = [long, *[short] * 5]
    advanced = Counter()

    def advance(ended, tokens):
        advanced.update(ended=ended, tokens=tokens)

    parts = complete_parts(llm, [(prompts, params)] * 3, advance)
    first = next(parts)
    assert advanced["ended"] > 6
    assert [len(output.token_ids) for output in first] == [40, 2, 2, 2, 2, 2]
    parts.close()  # no request may stay in the engine when the caller stops early
    assert llm.engine.is_idle
    assert [o.token_ids for o in first] == [o.token_ids for o in complete(llm, prompts, params, advance)]


def test_a_deleted_shard_is_made_again(llm, tmp_path, options):
    uninterrupted = make(llm, tmp_path / "out", options)
    (tmp_path / "out" / "shard-00001.jsonl").unlink()
    assert make(llm, tmp_path / "out", options) == uninterrupted


def test_other_arguments_are_refused(llm, tmp_path, options):
    make(llm, tmp_path / "out", options)
    for name, value in {"seed": 4, "max_tokens": 13, "temperatures": (0.0,)}.items():
        with pytest.raises(ConfigError, match=f"begun with {name}="):
            begin(tmp_path / "out", replace(options, **{name: value}))
    options.prompts[0].write_text('{"prompt": "other"}\n')
    with pytest.raises(ConfigError, match="begun with prompts="):
        begin(tmp_path / "out", options)


def test_corrupt_files_are_named(llm, tmp_path, options):
    make(llm, tmp_path / "out", options)
    shard = tmp_path / "out" / "shard-00001.jsonl"
    shard.write_bytes(shard.read_bytes().replace(b"[", b"[1,", 1))
    for act in (lambda: begin(tmp_path / "out", options), lambda: list(read_shards(tmp_path / "out"))):
        with pytest.raises(ConfigError, match=r"shard-00001\.jsonl does not have the sha256"):
            act()
    assert len(list(read_shards(tmp_path / "out", check=False))) == 8
    (tmp_path / "out" / MANIFEST).write_text("{}")
    with pytest.raises(ConfigError, match=r"manifest\.json is damaged"):
        begin(tmp_path / "out", options)


def test_foreign_folders_are_left_alone(tmp_path, options):
    with pytest.raises(ConfigError, match=r"holds 'prompts\.jsonl' and no manifest\.json"):
        begin(tmp_path, options)
    with pytest.raises(ConfigError, match=r"holds no manifest\.json"):
        list(read_shards(tmp_path))


def test_shards_are_read_back(llm, tmp_path, options):
    make(llm, tmp_path / "out", options)
    expected = [Sample(tuple(line["prompt_token_ids"]), tuple(line["token_ids"])) for line in lines(tmp_path / "out")]
    assert list(read_shards(tmp_path / "out")) == expected
    assert list(read_jsonl(tmp_path / "out" / "shard-00000.jsonl", None)) == expected[:3]


def test_filters_drop_and_count(llm, tmp_path, options):
    make(llm, tmp_path / "out", replace(options, temperatures=(1.0,), max_tokens=30, min_tokens=30))
    counts = check_counts(tmp_path / "out")
    assert counts["too_short"] > 0
    assert all(len(line["token_ids"]) == 30 for line in lines(tmp_path / "out"))
    output = llm.generate({"prompt_token_ids": [72]}, SamplingParams(max_tokens=1))[0].outputs[0]
    output.finish_reason, output.token_ids = "length", [1, 2] * 20
    assert reason_to_drop(output, replace(options, max_repetition=0.5)) == "repetitive"
    assert reason_to_drop(output, options) is None
    output.finish_reason = "error"
    assert reason_to_drop(output, options) == "failed"


def test_repeated_ngrams():
    assert repeated_ngrams([1] * 7) == 0
    assert repeated_ngrams(range(100)) == 0
    assert repeated_ngrams([*range(8), *range(8)]) == pytest.approx(1 / 9)
    assert repeated_ngrams([1, 2, 1, 2, 1, 2], n=2) == pytest.approx(3 / 5)


def test_the_model_makes_prompts(llm, tmp_path):
    first = make(llm, tmp_path / "a", SELF)
    assert make(llm, tmp_path / "b", SELF) == first
    counts = check_counts(tmp_path / "a")
    assert counts["prompts"] == 9
    assert counts["prompts_unusable"] > 0  # some do not end within 24 tokens
    made = [
        json.loads(line) for name in sorted(first) if name.startswith("prompts") for line in first[name].splitlines()
    ]
    words = [m["messages"][-1]["content"] for m in made]
    assert len(set(words)) == 9
    assert all(text == text.strip() != "" for text in words)
    answers = lines(tmp_path / "a")
    assert {line["source"] for line in answers} == {"self"}
    shown = [llm.tokenizer.decode(line["prompt_token_ids"]) for line in answers]
    assert shown == [f"<user>{text}<assistant>" for text in words]
    assert make(llm, tmp_path / "c", replace(SELF, seed=1)) != first


def test_no_prompt_is_made_twice(llm, tmp_path):
    files = make(llm, tmp_path / "out", replace(SELF, self_prompts=20, prompt_max_tokens=2, shard_size=20))
    made = [line for name, content in files.items() if name.startswith("prompts") for line in content.splitlines()]
    assert len(set(made)) == len(made) < 20  # prompts of one byte, of which half are no text: too few
    counts = check_counts(tmp_path / "out")
    assert counts["prompts"] == len(made)
    assert counts["prompts_duplicate"] > 0
    assert counts["prompts_read"] == 200


def test_system_messages_take_turns(llm, tmp_path):
    make(llm, tmp_path / "out", replace(SELF, systems=("Be brief.", "Rhyme.")))
    shown = [llm.tokenizer.decode(line["prompt_token_ids"]) for line in lines(tmp_path / "out")]
    assert {text.split("<user>")[0] for text in shown} == {"<system>Be brief.", "<system>Rhyme."}


def test_header_is_the_templates(llm, model):
    assert llm.tokenizer.decode(user_header(llm.frontend, "S", {})) == "<system>S<user>"
    frontend = LLM(model, max_model_len=64, max_num_seqs=1).frontend
    for template, fault in (("{{ messages[0].content }}", "no header"), ("<user>", "does not repeat")):
        frontend.tokenizer.hf.chat_template = template
        with pytest.raises(ConfigError, match=fault):
            user_header(frontend, None, {})


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a JSON list"),
        ('{"turns": ["a"]}', "holds only 'turns'"),
        ('{"prompt": "a", "messages": []}', "holds 'messages' and 'prompt'"),
        ('{"prompt": " "}', "not blank"),
        ('{"messages": ["a"]}', "a 'role'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "before the assistant's"),
        ('{"prompt_token_ids": []}', "not empty"),
    ],
)
def test_bad_prompts_are_named(line, fault):
    with pytest.raises(ConfigError, match=rf"^p\.jsonl, line 3.*{fault}"):
        parse_prompts(f'{{"prompt": "good"}}\n\n{line}\n'.encode(), "p.jsonl", "p.jsonl")


@pytest.mark.parametrize("line", ['{"prompt_token_ids": [999]}', '{"messages": [{"role": "", "content": "a"}]}'])
def test_prompts_that_the_model_refuses_are_named(llm, tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 2: "):
        make(llm, tmp_path / "out", DataOptions(prompts=(path,)))


def test_the_first_of_duplicates_stays_in_its_place():
    texts = ["a b", "c", "a  b", "d", " c"]
    content = "\n".join(json.dumps({"prompt": text}) for text in texts).encode()
    assert [prompt.content for prompt in drop_duplicates(parse_prompts(content, "", ""))] == ["a b", "c", "d"]


def test_reads_what_others_made(model, tmp_path):
    tokenizer, path = Tokenizer(model), tmp_path / "data.jsonl"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rows = [{"messages": chat}, {"prompt": "P", "response": "R"}, {"text": "T\u2028T"}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    encode = tokenizer.encode
    assert list(read_jsonl(path, tokenizer)) == [
        Sample(tuple(encode("<user>Hi<assistant>")), (*encode("Ho"), EOS)),
        Sample(tuple(encode("P")), (*encode("R"), EOS)),
        Sample((), tuple(encode("T\u2028T"))),
    ]
    for row, fault in (
        ({"messages": chat[:1]}, "the assistant's"),
        ({"prompt": "P"}, "holds only 'prompt'"),
        ({"text": ""}, "not empty"),
        ({"prompt_token_ids": [1], "token_ids": ["a"]}, "token ids"),
    ):
        path.write_text(f'{{"text": "good"}}\n{json.dumps(row)}\n')
        with pytest.raises(ConfigError, match=rf"data\.jsonl, line 2.*{fault}"):
            list(read_jsonl(path, tokenizer))
    with pytest.raises(ConfigError, match="need a tokenizer"):
        list(read_jsonl(path.with_name(path.name), None))


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ([], "exactly one of --prompts"),
        (["--self-prompts", "3", "--prompts", "x"], "exactly one of --prompts"),
        (["--self-prompts", "3", "--max-prompts", "2"], "--max-prompts needs"),
        (["--self-prompts", "3", "--temperature", "0", "0"], "different numbers"),
        (["--self-prompts", "3", "--temperature", "-1"], "temperature=-1"),
        (["--self-prompts", "3", "--shard-size", "0"], "shard-size=0"),
        (["--self-prompts", "3", "--max-repetition", "2"], "max-repetition=2"),
        (["--prompts", "absent.jsonl"], "absent.jsonl cannot be read"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(tmp_path, capsys, flags, fault):
    assert command.main(["--out", str(tmp_path / "out"), *flags]) == 2
    assert fault in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_command_line(model, tmp_path, capsys, options, monkeypatch):
    flags = ["--model", str(model), "--out", str(tmp_path / "out"), "--prompts", str(options.prompts[0])]
    sizes = ["--max-model-len", "64", "--max-num-seqs", "4", "--max-tokens", "4", "--max-prompts", "2"]
    assert command.main([*flags, *sizes]) == 0
    shown = capsys.readouterr()
    assert phases(shown.err) == [
        *("finding the models", f"checking {tmp_path / 'out'}", "loading the models", "reading the prompts"),
        *("tokenising the prompts", "answering"),
    ]
    assert re.search(r"answering: 2 of 2, [\d,]+ tokens/s, in 0:00:", shown.err)
    assert "answering" not in shown.out
    assert check_counts(tmp_path / "out")["responses"] == 2
    arguments = read_manifest(tmp_path / "out").arguments
    assert arguments["max_model_len"] == 64
    assert len(arguments["weights_sha256"]) == 64
    monkeypatch.setattr("dflash_jax.loading.LLM", None)  # a complete folder needs no model
    assert command.main([*flags, *sizes]) == 0
    assert command.main([*flags, *sizes, "--seed", "5"]) == 2
    assert "begun with seed=0, now it is 5" in capsys.readouterr().err
