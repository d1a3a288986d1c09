# SPDX-License-Identifier: Apache-2.0
"""torch.compile keeps exactly the declared mutations, and the pass that undoes functionalization adds no copy."""

import operator

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.utils import run_and_get_code
from vllm_qout import ops
from vllm_qout.functionalization import mutated_results, restore_mutation

FUSED = torch.ops.vllm_qout.fused_qnorm_rope_kv_insert.default
KV_ONLY = torch.ops.vllm_qout.kv_rope_insert.default
IN_PLACE = torch.ops.vllm_qout.qnorm_rope_kv_insert_.default
OPERATORS = (FUSED, KV_ONLY, IN_PLACE)
BLOCK_SIZE = 64


def shared_inputs(rows, seed=0):
    random = torch.Generator().manual_seed(seed)
    kv = torch.randn(rows, 512, generator=random).bfloat16()
    cache = torch.zeros(3, BLOCK_SIZE * 584, dtype=torch.uint8)
    positions = torch.randint(0, 20, (rows,), generator=random)
    table = torch.randn(20, 64, generator=random)
    q = torch.randn(rows, 3, 512, generator=random).bfloat16()
    return q, kv, cache, torch.arange(rows), positions, table


def fused_arguments(rows, seed=0):
    q, kv, cache, *indices = shared_inputs(rows, seed)
    q_out = torch.ones(rows, 8, 512, dtype=torch.bfloat16)
    return q, kv, q_out, cache, *indices


def in_place_arguments(rows, seed=0):
    return shared_inputs(rows, seed)


def fused_call(q, kv, q_out, cache, slots, positions, table):
    """The caller-owned contract inside a graph: work before it, and a reader of what it wrote."""
    ops.fused_qnorm_rope_kv_insert(q * 2, kv, q_out, cache, slots, positions, table, 1e-6, BLOCK_SIZE)
    return q_out.float().sum(dim=1)


def in_place_call(q, kv, cache, slots, positions, table):
    """The in-place contract inside a graph."""
    ops.qnorm_rope_kv_insert_(q, kv, cache, slots, positions, table, 1e-6, BLOCK_SIZE)
    return q.float().sum(dim=1)


# What the code has to allocate besides: the doubled query and the result.
ALLOCATIONS = {FUSED: 2, IN_PLACE: 1}

CONTRACTS = [
    pytest.param(fused_call, fused_arguments, FUSED, id="caller-owned"),
    pytest.param(in_place_call, in_place_arguments, IN_PLACE, id="in-place"),
]


@pytest.fixture(autouse=True)
def first_functionalization():
    """vLLM selects auto-functionalization v1."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(enable_auto_functionalized_v2=False):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("op", "names"),
    [(FUSED, ["q_out", "k_cache"]), (KV_ONLY, ["k_cache"]), (IN_PLACE, ["q", "k_cache"])],
)
def test_mutated_arguments_come_from_the_schema(op, names):
    """The registered schema declares what each operator writes; after functionalization result 0 is None."""
    assert ops.mutated_arguments(op) == names
    assert mutated_results(op) == dict(enumerate(names, start=1))


STOCK = {
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert": ["q", "k_cache"],
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert": ["q_fp8", "k_cache"],
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": ["k_cache"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", STOCK)
def test_mutated_arguments_of_stock_operators(name):
    """The same derivation holds for vLLM's operators, where its CUDA library is there."""
    pytest.importorskip("vllm._C_stable_libtorch")
    assert ops.mutated_arguments(getattr(torch.ops._C, name)) == STOCK[name]


def traced(function, arguments, restore=()):
    """The graph that a compiler receives, after `restore_mutation` of the given operators, and a runnable."""
    graphs = []

    def compiler(module, _):
        before = [node.target for node in module.graph.nodes]
        restore_mutation(module.graph, restore)
        module.graph.lint()
        module.recompile()
        graphs.append((before, module.graph))
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        result = compiled(*arguments)
    ((before, graph),) = graphs
    return before, graph, result


def same(left, right):
    return all(torch.equal(a.contiguous().view(-1), b.contiguous().view(-1)) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("function", "arguments", "op"), CONTRACTS)
def test_functionalization_keeps_exactly_the_declared_mutations(function, arguments, op):
    """The functional graph writes back the declared arguments and no other input."""
    _, graph, _ = traced(function, arguments(4))
    node = next(node for node in graph.nodes if node.target is auto_functionalized)
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    written_back = {user.args[0]: user.args[1] for user in graph.nodes if user.target is torch.ops.aten.copy_.default}
    names = mutated_results(op)
    assert set(results) == set(names)
    assert written_back == {node.kwargs[names[index]]: result for index, result in results.items()}


@pytest.mark.parametrize(("function", "arguments", "op"), CONTRACTS)
def test_the_pass_leaves_a_direct_call_and_no_copy(function, arguments, op):
    """After the pass the operator is called on the caller's tensors: no functionalized call, clone or copy."""
    before, graph, result = traced(function, arguments(4), OPERATORS)
    assert auto_functionalized in before
    targets = [node.target for node in graph.nodes]
    assert targets.count(op) == 1
    forbidden = {auto_functionalized, torch.ops.aten.clone.default, torch.ops.aten.copy_.default}
    assert not forbidden & set(targets)
    call = next(node for node in graph.nodes if node.target is op)
    assert all(call.kwargs[name].op == "placeholder" for name in ops.mutated_arguments(op))

    eager = arguments(4)
    assert torch.equal(result, function(*eager))


@pytest.mark.parametrize(("function", "arguments", "op"), CONTRACTS)
def test_the_restored_graph_writes_what_eager_writes(function, arguments, op):
    """Running the restored graph leaves the caller's tensors as eager does."""
    compiled_arguments, eager = arguments(4), arguments(4)
    traced(function, compiled_arguments, OPERATORS)
    function(*eager)
    assert same(compiled_arguments, eager)


@pytest.mark.parametrize("reads_old", [False, True])
def test_a_call_whose_old_value_is_read_later_stays_functional(reads_old):
    """Where a later node still reads a tensor as it was before the call, undoing would change what it sees."""
    graph = torch.fx.Graph()
    kv, cache, slots, positions, table = (graph.placeholder(name) for name in ("kv", "c", "s", "p", "t"))
    call = graph.call_function(
        auto_functionalized,
        (KV_ONLY,),
        {
            "kv": kv,
            "k_cache": cache,
            "slot_mapping": slots,
            "position_ids": positions,
            "cos_sin_cache": table,
            "cache_block_size": BLOCK_SIZE,
        },
    )
    new = graph.call_function(operator.getitem, (call, 1))
    graph.output((graph.call_function(torch.sum, (cache,)) if reads_old else None, new))
    assert restore_mutation(graph, OPERATORS) == (0 if reads_old else 1)
    arguments = shared_inputs(3)[1:]
    old, written = torch.fx.GraphModule({}, graph)(*[each.clone() for each in arguments])
    eager = [each.clone() for each in arguments]
    ops.kv_rope_insert(*eager, BLOCK_SIZE)
    assert torch.equal(written, eager[1])
    assert old is None or old == arguments[1].sum()


@pytest.fixture
def variants():
    """Operators with mutated arguments in another order, one more of them, and a result besides."""
    with torch.library._scoped_library("vllm_qout_variants", "DEF") as library:
        library.define("reordered(Tensor x, Tensor(a!) second, Tensor(b!) first) -> ()")
        library.define("with_result(Tensor(a!) a, Tensor x, Tensor(b!) b, Tensor(c!) c) -> Tensor")

        def reordered(x, second, first):
            second.add_(x)
            first.mul_(x)

        def with_result(a, x, b, c):
            for index, tensor in enumerate((a, b, c), start=1):
                tensor.add_(x, alpha=index)
            return x + 1

        library.impl("reordered", reordered, "CompositeExplicitAutograd")
        library.impl("with_result", with_result, "CompositeExplicitAutograd")
        yield torch.ops.vllm_qout_variants


def test_reordered_and_added_mutations_still_map(variants):
    """Names follow the schema, wherever the mutated arguments stand and however many there are."""
    op = variants.reordered.default
    assert mutated_results(op) == {1: "second", 2: "first"}

    def function(x, second, first):
        op(x, second, first)
        return second - first

    def arguments():
        return tuple(torch.arange(4.0) + offset for offset in (1, 2, 3))

    ours, eager = arguments(), arguments()
    _, graph, result = traced(function, ours, (op,))
    assert not any(node.target is auto_functionalized for node in graph.nodes)
    assert torch.equal(result, function(*eager))
    assert same(ours, eager)


def test_a_result_besides_mutations_is_result_0(variants):
    """An operator that also returns something has its own result first, then the mutated arguments."""
    op = variants.with_result.default
    assert mutated_results(op) == {1: "a", 2: "b", 3: "c"}

    def function(x, a, b, c):
        return op(a, x, b, c) * 2, b + c

    def arguments():
        return tuple(torch.arange(4.0) + offset for offset in range(4))

    ours, eager = arguments(), arguments()
    _, graph, result = traced(function, ours, (op,))
    assert not any(node.target is auto_functionalized for node in graph.nodes)
    assert same(result, function(*eager))
    assert same(ours, eager)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op._schema.name)
def test_opcheck(op):
    """torch's own checks of schema, fake implementation, autograd registration and dynamic tracing pass."""
    arguments = {
        FUSED: (*fused_arguments(4), 1e-6, BLOCK_SIZE),
        KV_ONLY: (*shared_inputs(4)[1:], BLOCK_SIZE),
        IN_PLACE: (*in_place_arguments(4), 1e-6, BLOCK_SIZE),
    }
    torch.library.opcheck(op, arguments[op])


@pytest.mark.parametrize("restore", [False, True], ids=["plain", "restored"])
@pytest.mark.parametrize(("function", "arguments", "op"), CONTRACTS)
def test_inductor_equals_eager_for_any_row_count(function, arguments, op, restore, tmp_path, monkeypatch):
    """Code from inductor gives eager's results and writes for every N and copies no written argument."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch(
        post_grad_custom_pre_pass=(lambda graph: restore_mutation(graph, OPERATORS)) if restore else None,
        force_disable_caches=True,
    ):
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        for rows in (5, 2, 9):
            ours, eager = arguments(rows, seed=rows), arguments(rows, seed=rows)
            with torch.no_grad():
                if rows == 5:
                    result, (code,) = run_and_get_code(compiled, *ours)
                else:
                    result = compiled(*ours)
            torch.testing.assert_close(result, function(*eager))
            assert same(ours, eager)
    assert code.count("= empty_strided_cpu(") == ALLOCATIONS[op]
