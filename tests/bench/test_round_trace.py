"""The part of a round that `bench round` assigns to each kernel of a trace."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from dflash_jax.bench.round_trace import Kernel, Scopes, kernels_of, part_of, spans


@pytest.mark.parametrize(
    ("scope", "name", "part"),
    [
        ("jit(verify)/TargetModel/layers_3/mlp/dot_general", "nvjet_hsh_64x8", "verify_gemm"),
        ("jit(verify)/TargetModel/layers_3._add_norm/shard_map/dot_general", "fusion_3", "verify_gemm"),
        ("jit(verify)/TargetModel/layers_3._add_norm/shard_map", "all_reduce_add_norm_mosaic", "all_reduce"),
        ("jit(verify)/TargetModel/layers_3/mlp/pallas_call", "mosaic_gpu_kernel", "verify_gemm"),
        ("jit(verify)/TargetModel/layers_3/pallas_call", "mosaic_gpu_kernel", "verify_attention"),
        ("jit(verify)/TargetModel/layers_3/shard_map/x", "paged_attention_combine", "verify_attention"),
        ("jit(verify)/TargetModel/layers_3/y", "write_kv", "verify_attention"),
        ("jit(verify)/TargetModel/layers_3/rsqrt", "loop_fusion", "verify_other"),
        ("jit(verify)/TargetModel/layers_3._add_norm/pallas_call", "add_norm", "verify_other"),
        ("jit(draft)/DraftModel/layers_0/add_norm/pallas_call", "add_norm", "draft"),
        ("jit(verify)/DraftModel.write_context/layers_1/self_attn/dot_general", "nvjet", "draft_context"),
        ("jit(draft)/DraftModel/layers_0/mlp/dot_general", "nvjet", "draft"),
        ("jit(draft)/DraftModel.tokens/reduce", "reduce", "head"),
        ("jit(commit)/TargetModel.logits/btd,vd->btv/dot_general", "nvjet", "head"),
        ("jit(commit)/reduce", "reduce", "sampling"),
        ("jit(verify)/TargetModel/layers_0/add", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all_reduce"),
        ("jit(greedy_round)/draft/TargetModel.embed/gather", "fusion", "draft"),
        ("jit(greedy_round)/verify/TargetModel.embed/gather", "fusion", "verify_other"),
        ("jit(greedy_round)/verify/DraftModel.write_context/dot_general", "nvjet", "draft_context"),
        ("jit(greedy_round)/commit/keep_exactly/reduce", "fusion", "sampling"),
        ("jit(greedy_round)/commit/reduce", "reduce", "sampling"),
        ("jit(greedy_round)/commit/TargetModel.likeliest/x", "largest_product_kernel", "head"),
        ("", "largest_product_kernel_mosaic_gpu_kernel", "head"),
        ("/commit/", "screened_largest_kernel_mosaic_gpu_kernel", "head"),
        ("/draft/", "largest_of_pieces", "head"),
        ("", "MemcpyD2H", "copies"),
        ("", "unknown", "other"),
    ],
)
def test_parts(scope, name, part):
    module = scope.split("/")[0].replace("(", "_").rstrip(")")
    assert part_of(Kernel(name, module, "op.1", "", 0, 1), scope) == part


def test_products_without_a_name_are_of_the_step_of_what_runs_next():
    scopes = [
        "draft/norm",
        "",
        "draft/add",
        "",
        "verify/write_context/norm",
        "",
        "verify/add",
        "",
        "commit/reduce",
    ]
    scopes = [f"jit(greedy_round)/{scope}" if scope else "" for scope in scopes]
    kernels = [
        Kernel("kernel" if scope else "nvjet", "jit_greedy_round", "op.1", scope, i, i + 1)
        for i, scope in enumerate(scopes)
    ]
    kernels.append(Kernel("MemcpyD2H", "", "", "", 10, 11))
    result = Scopes(kernels).of_all(kernels)
    assert [part_of(kernel, scope) for kernel, scope in zip(kernels, result, strict=True)] == [
        *["draft"] * 3,
        *["draft_context"] * 2,
        *["verify_gemm", "verify_other"],
        *["head", "sampling", "copies"],
    ]


def test_kernels_of_layers_are_of_no_commit():
    names = ["embed", "write_kv__1", "nvjet", "add_norm", "swiglu", "product__2", "largest_product_kernel", "reduce"]
    scopes = {"embed": "jit(greedy_round)/verify/TargetModel.embed/gather", "reduce": "jit(greedy_round)/commit/x"}
    kernels = [Kernel(name, "jit_round", name, scopes.get(name, ""), i, i + 1) for i, name in enumerate(names)]
    assert list(map(part_of, kernels, Scopes(kernels).of_all(kernels))) == [
        *["verify_other", "verify_attention", "verify_gemm", "verify_other", "verify_gemm", "verify_gemm"],
        *["head", "sampling"],
    ]


def test_kernels_of_layers_are_not_of_the_context_after_them():
    layer = ["product", "add_norm", "swiglu_kernel", "product", "paged_attention__1"]
    names = [*layer, "product", "context", "product", "reduce"]
    scopes = {"context": "jit(greedy_round)/verify/write_context/norm", "reduce": "jit(greedy_round)/commit/x"}
    kernels = [Kernel(name, "jit_round", name, scopes.get(name, ""), i, i + 1) for i, name in enumerate(names)]
    assert list(map(part_of, kernels, Scopes(kernels).of_all(kernels))) == [
        *["verify_gemm", "verify_other", "verify_gemm", "verify_gemm", "verify_attention"],
        *["draft_context", "draft_context", "verify_gemm", "sampling"],
    ]


def test_a_kernel_of_the_context_and_what_runs_before_it_are_of_the_context():
    names = ["paged_attention__1", "product", "quantize_rows", "nvjet", "write_context", "write_context__1", "reduce"]
    scopes = {"product": "jit(greedy_round)/verify/TargetModel/layers_3/mlp/dot_general"}
    scopes |= {"reduce": "jit(greedy_round)/commit/x"}
    kernels = [Kernel(name, "jit_round", name, scopes.get(name, ""), i, i + 1) for i, name in enumerate(names)]
    assert list(map(part_of, kernels, Scopes(kernels).of_all(kernels))) == [
        *["verify_attention", "verify_gemm"],
        *["draft_context"] * 4,
        "sampling",
    ]


def test_a_kernel_that_layers_share_is_of_the_step_that_runs_it():
    shared = ("select", "jit(greedy_round)/draft/DraftModel/layers_0.attend/paged_attention/select_n")

    def layers(step, model, number):
        others = [(f"{step}_{i}", f"jit(greedy_round)/{step}/{model}/layers_0/mlp/dot_general") for i in range(5)]
        return [shared, *others] * number

    tokens = ("argmax", "jit(greedy_round)/draft/DraftModel.tokens/reduce")
    embed = ("embed", "jit(greedy_round)/verify/TargetModel.embed/gather")
    commit = [(f"commit_{i}", "jit(greedy_round)/commit/reduce") for i in range(2)]
    run = [*layers("draft", "DraftModel", 2), tokens, embed, *layers("verify", "TargetModel", 6), *commit]
    kernels = [Kernel(name, "jit_greedy_round", name, scope, i, i + 1) for i, (name, scope) in enumerate(run * 3)]
    result = Counter(map(part_of, kernels, Scopes(kernels).of_all(kernels)))
    assert result == {
        "draft": 3 * 2 * 6,
        "head": 3,
        "verify_attention": 3 * 6,
        "verify_gemm": 3 * 6 * 5,
        "verify_other": 3,
        "sampling": 3 * 2,
    }


def test_kernels_that_drafter_and_target_share_are_of_who_runs_them():
    def layers(number):
        return [("dot", "jit(greedy_round)/draft/DraftModel/layers_0/mlp/dot_general"), ("nvjet", "")] * number

    head, argmax = ((name, f"jit(greedy_round)/draft/DraftModel.tokens/{name}") for name in ("dot_general", "reduce"))
    embed = ("gather", "jit(greedy_round)/verify/TargetModel.embed/gather")
    run = [*layers(2), head, ("nvjet", ""), argmax, embed, *layers(6), ("argmax", "jit(greedy_round)/commit/reduce")]
    kernels = [Kernel(name, "jit_greedy_round", name, scope, i, i + 1) for i, (name, scope) in enumerate(run * 3)]
    result = Counter(map(part_of, kernels, Scopes(kernels).of_all(kernels)))
    # The last product before `commit` may be its head.
    assert result == {"draft": 3 * 5, "head": 3 * 3, "verify_gemm": 3 * 11, "verify_other": 3, "sampling": 3}


def test_spans():
    def kernel(module, operation, start, end):
        return Kernel("k", module, operation, "", start, end)

    kernels = [
        kernel("verify", "a", 10, 20),
        kernel("verify", "b", 15, 30),  # beside it
        kernel("", "copy", 31, 90),
        kernel("verify", "c", 32, 40),
        kernel("commit", "a", 45, 50),
        kernel("verify", "a", 57, 60),
        kernel("verify", "a", 61, 62),  # the program again
    ]
    assert spans(kernels) == {"busy_ms": 37, "host_gap_ms": 13, "launch_gap_ms": 2}
    assert spans([kernels[2]])["busy_ms"] == 0


def test_kernels_of_the_first_gpu():
    def plane(name, **lines):
        lines = [SimpleNamespace(name=line.replace("_", " "), events=events) for line, events in lines.items()]
        return SimpleNamespace(name=name, lines=lines)

    def event(kernel, start, **stats):
        return SimpleNamespace(name=kernel, start_ns=start, duration_ns=2, stats=list(stats.items()))

    planes = [
        plane("/host:CPU", python=[event("x", 0, hlo_op="a", hlo_module="b")]),
        plane("/device:GPU:1", Stream_1=[event("other", 1)]),
        plane(
            "/device:GPU:0",
            Stream_2=[event("late", 7, hlo_op="f.1", hlo_module="jit_verify(3)", name="jit(verify)/a")],
            Stream_1=[event("early", 5, tf_op="XlaModule:")],
            XLA_Ops=[event("summary", 5)],
        ),
    ]
    early, late = kernels_of(SimpleNamespace(planes=planes))
    assert kernels_of(SimpleNamespace(planes=[])) == []
    assert early == Kernel("early", "", "", "", 5, 7)
    assert late == Kernel("late", "jit_verify", "f.1", "jit(verify)/a", 7, 9)
