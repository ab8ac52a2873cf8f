"""Grafana's board asks for metrics and labels that the server has."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflash_jax.base.outputs import EngineStats
from dflash_jax.options.serve_args import ServeArgs
from dflash_jax.serve.answers.metrics import Finished, Metrics

BOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel["targets"]]
QUERIES += [(variable["name"], variable["query"]) for variable in BOARD["templating"]["list"] if "label" in variable]
PREFIX = ServeArgs().metrics_prefix


@pytest.fixture(scope="module")
def labels_by_sample():
    """The labels of every sample that a server has which served something."""
    metrics = Metrics(lambda: EngineStats(num_accepted_tokens_per_pos=(1,)), prefix=PREFIX, model="m")
    metrics.observe(Finished(("stop",), 1, 2, 1, 1, queue=0.0, first_token=0.1, total=1.0))
    metrics.observe_chunk(0.1, 1)
    families = text_string_to_metric_families(metrics.text().decode())
    return {sample.name: {*sample.labels, "instance"} for family in families for sample in family.samples}


@pytest.mark.parametrize(("title", "query"), [query for query in QUERIES if query[1] != "prometheus"])
def test_metrics_and_labels_of_a_query_exist(title, query, labels_by_sample):
    names = re.findall(rf"{PREFIX}\w+", query)
    assert names, title
    assert {*names} <= labels_by_sample.keys()
    used = {*re.findall(r"(\w+)=~", query)} | {*re.findall(r"by \((\w+)\)", query)}
    assert used <= set().union(*(labels_by_sample[name] for name in names))


def test_panels_do_not_overlap_and_all_counters_are_on_the_board(labels_by_sample):
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len({*places}) == len(places)
    shown = {name for _, query in QUERIES for name in re.findall(rf"{PREFIX}\w+", query)}
    counters = {name for name in labels_by_sample if name.endswith("_total")}
    assert counters <= shown
