# SPDX-License-Identifier: Apache-2.0
"""Undoes torch.compile's functionalization of the operators, so that nothing they write is copied.

vLLM 0.32.0 does not compile the region that calls them; this is for graphs that do. It handles
`auto_functionalized` (v1, which vLLM selects), whose results are the operator's own, or one None, followed by
its mutated arguments in schema order.
"""

import operator
from collections.abc import Collection, Mapping
from typing import cast

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from vllm_qout.ops import mutated_arguments


def mutated_results(op: torch._ops.OpOverload) -> Mapping[int, str]:
    """Which mutated argument each result of `auto_functionalized(op, ...)` is, by result index."""
    first = max(1, len(op._schema.returns))
    return dict(enumerate(mutated_arguments(op), start=first))


def restore_mutation(graph: fx.Graph, operators: Collection[torch._ops.OpOverload]) -> int:
    """Replaces functionalized calls of `operators` by direct ones, in place; returns how many.

    A call stays as it is where the value before the mutation is read later.
    """
    restored = 0
    for node in list(graph.nodes):
        if node.target is auto_functionalized and node.args[0] in operators and _old_values_are_dead(node):
            _restore(graph, node)
            restored += 1
    return restored


# fx types arguments as a wide union; these two are what a functionalized call holds.
def _operator(node: fx.Node) -> torch._ops.OpOverload:
    return cast(torch._ops.OpOverload, node.args[0])


def _tensor(node: fx.Node, name: str) -> fx.Node:
    return cast(fx.Node, node.kwargs[name])


def _results(node: fx.Node) -> Mapping[int, fx.Node]:
    return {cast(int, user.args[1]): user for user in node.users if user.target is operator.getitem}


def _is_copy_to(node: fx.Node, target: fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default and node.args[0] is target


def _old_values_are_dead(node: fx.Node) -> bool:
    for name in mutated_results(_operator(node)).values():
        before = _tensor(node, name)
        if any(user > node and not _is_copy_to(user, before) for user in before.users):
            return False
    return True


def _restore(graph: fx.Graph, node: fx.Node) -> None:
    op = _operator(node)
    names = mutated_results(op)
    with graph.inserting_before(node):
        call = graph.call_function(op, kwargs=dict(node.kwargs))
    for index, result in _results(node).items():
        if index in names:
            written = _tensor(node, names[index])
            result.replace_all_uses_with(written)
            _erase_self_copies(graph, written)
        else:
            result.replace_all_uses_with(_own_result(graph, call, op, index))
        graph.erase_node(result)
    graph.erase_node(node)


def _own_result(graph: fx.Graph, call: fx.Node, op: torch._ops.OpOverload, index: int) -> fx.Node:
    if len(op._schema.returns) == 1:
        return call
    with graph.inserting_after(call):
        return graph.call_function(operator.getitem, (call, index))


def _erase_self_copies(graph: fx.Graph, written: fx.Node) -> None:
    # `copy_(x, x)`: what the write-back of an input becomes once its new value is the input itself.
    for user in list(written.users):
        if _is_copy_to(user, written) and user.args[1] is written:
            user.replace_all_uses_with(written)
            graph.erase_node(user)
