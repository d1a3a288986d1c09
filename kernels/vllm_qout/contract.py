# SPDX-License-Identifier: Apache-2.0
"""The operator contract as a suite that runs in any environment with torch: `run`, or this command:

    python -m vllm_qout.contract --device cpu --json OUT

It exits 0 when every case passed, 1 when one failed, 2 when it could not run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_qout import __version__, ops, reference
from vllm_qout.rejections import (
    CAPABILITY_RULE,
    DEVICE_RULE,
    RULES,
    Rejection,
    on_unknown_device,
    rejections,
    valid_inputs,
    value_rejections,
)
from vllm_qout.samples import (
    CONTEXT,
    FUSED,
    HEAD_DIM,
    IN_PLACE,
    OPERATORS,
    TOKEN_BYTES,
    UNWRITTEN,
    Inputs,
    bits,
    make_inputs,
)

KINDS = ("schema", "reject", "numerics", "edge", "allocation")
MUTATED = {FUSED: ["q_out", "k_cache"], CONTEXT: ["k_cache"], IN_PLACE: ["q", "k_cache"]}
CONTEXT_ARGUMENTS = "Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache"
SCHEMAS = {
    FUSED: f"vllm_qout::{FUSED}(Tensor q_in, Tensor kv, Tensor(a!) q_out, Tensor(b!) k_cache, "
    f"{CONTEXT_ARGUMENTS}, float eps, int cache_block_size, bool apply_q_norm=True) -> ()",
    CONTEXT: f"vllm_qout::{CONTEXT}(Tensor kv, Tensor(a!) k_cache, {CONTEXT_ARGUMENTS}, int cache_block_size) -> ()",
    IN_PLACE: f"vllm_qout::{IN_PLACE}(Tensor(a!) q, Tensor kv, Tensor(b!) k_cache, "
    f"{CONTEXT_ARGUMENTS}, float eps, int cache_block_size, bool apply_q_norm=True) -> ()",
}
ALLOCATION_CALLS = 100


class ContractError(Exception):
    """The suite cannot run here; the text names a remedy."""


@dataclass(frozen=True)
class Case:
    """One check: `detail` says what was seen, and why where it failed."""

    id: str
    kind: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Backend:
    """The three operators of one implementation, by name."""

    name: str
    operators: dict[str, Callable[..., None]]
    checks_values: bool  # rejects bad slots and positions itself

    def call(self, operator: str, inputs: Inputs) -> None:
        self.operators[operator](*inputs.arguments(operator))


def load_backend(name: str | None) -> Backend:
    """`None` or 'native': what is registered for the device; 'triton': the Triton functions."""
    if name in (None, "native"):
        registered = {operator: getattr(ops, operator) for operator in OPERATORS}
        return Backend("native", registered, checks_values=True)
    if name != "triton":
        raise ContractError(f"backend: got {name!r}; needs native or triton")
    try:
        module = importlib.import_module("vllm_qout.triton_ops")
    except ImportError as error:
        raise ContractError(f"backend triton: {error}; install triton, or use the native backend") from error
    functions = {operator: getattr(module, operator) for operator in OPERATORS}
    return Backend("triton", functions, checks_values=False)


# --- rejections ---------------------------------------------------------------------------------------


def _snapshot(inputs: Inputs, operator: str) -> list[Tensor]:
    return [_bytes_of(tensor).clone() for tensor in inputs.written(operator)]


def _bytes_of(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.device.type in ("meta", "lazy"):
        return torch.empty(0)  # holds nothing that a kernel could write
    return bits(tensor.detach())


def _rejection_detail(rejection: Rejection, operator: str, call: Callable[[Inputs], None], inputs: Inputs) -> str:
    """Empty where the call is rejected as it must be, else what went wrong."""
    before = _snapshot(inputs, operator)
    try:
        call(inputs)
    except RuntimeError as error:
        message = str(error).splitlines()[0]
    else:
        return "accepted"
    wanted = f"{rejection.argument_in(operator)}: got "
    if wanted not in message or rejection.needs not in message.partition("; needs ")[2]:
        return f"message {message!r} does not name {wanted!r} and {rejection.needs!r}"
    after = _snapshot(inputs, operator)
    if not all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
        return "rejected, but an output changed"
    return ""


def _rejection_case(prefix: str, rejection: Rejection, operator: str, backend: Backend, device: str) -> Case:
    inputs = rejection.change(valid_inputs(device))
    detail = _rejection_detail(rejection, operator, lambda bad: backend.call(operator, bad), inputs)
    name = f"{prefix}-{operator}-{rejection.argument}-{rejection.what}".replace(" ", "-")
    return Case(name, "reject", not detail, detail or f"names {rejection.argument} and {rejection.needs!r}")


def _capability_cases() -> Iterator[Case]:
    for card in ((7, 5), (6, 1)):
        try:
            torch.ops.vllm_qout.check_capability(*card)
            detail = "accepted"
        except RuntimeError as error:
            detail = "" if "needs compute capability 8.0" in str(error) else str(error)
        name = f"rule{CAPABILITY_RULE:02}-capability-{card[0]}.{card[1]}"
        yield Case(name, "reject", not detail, detail or "names the capability and the need")


def _device_cases() -> Iterator[Case]:
    """The checks alone: torch functionalizes the lazy device's inputs before any kernel of ours."""
    rejection = Rejection(
        DEVICE_RULE, "lazy device", OPERATORS, "k_cache", "a device with an implementation", on_unknown_device
    )
    for operator in OPERATORS:
        check = getattr(torch.ops.vllm_qout, f"check_{operator}")
        inputs = rejection.change(valid_inputs("cpu"))

        def call(bad: Inputs, check: Callable[..., None] = check, operator: str = operator) -> None:
            check(*bad.arguments(operator))

        detail = _rejection_detail(rejection, operator, call, inputs)
        name = f"rule{DEVICE_RULE:02}-{operator}-lazy-device"
        yield Case(name, "reject", not detail, detail or "names the device and the need")


def reject_cases(backend: Backend, device: str) -> Iterator[Case]:
    """Every rule, every operator that it concerns, every way to break it."""
    for rejection in rejections(device):
        for operator in rejection.operators:
            yield _rejection_case(f"rule{rejection.rule:02}", rejection, operator, backend, device)
    yield from _device_cases()
    yield from _capability_cases()
    if not backend.checks_values:
        return
    previous = ops.set_debug(True)
    try:
        for rejection in value_rejections():
            for operator in rejection.operators:
                yield _rejection_case("value", rejection, operator, backend, device)
    finally:
        ops.set_debug(previous)


# --- numerics and edges -------------------------------------------------------------------------------


def _first_bad(wrong: Tensor) -> str:
    return f"{int(wrong.sum())} wrong, the first at {wrong.nonzero()[0].tolist()}"


def _query_detail(inputs: Inputs, query_bytes: Tensor) -> str:
    """Judge `q_out` bytes [R, P, 1024]: values, zero padding, untouched rows."""
    rows, heads, _ = inputs.q_in.shape
    if (query_bytes[rows:] != UNWRITTEN).any():
        return "rows past the last query row were written"
    if query_bytes[:rows, heads:].any():
        return "padding heads are not +0.0"
    exact = reference.query(inputs.q_in, inputs.position_ids, inputs.cos_sin_cache, inputs.eps, inputs.apply_q_norm)
    got = query_bytes[:rows, :heads].contiguous().view(torch.bfloat16).double()
    wrong = ~((got - exact).abs() <= reference.rounding_bound(exact, reference.rotation_magnitude(exact)))
    return f"query: {_first_bad(wrong)}" if wrong.any() else ""


def _cache_detail(inputs: Inputs, before: Tensor) -> str:
    """Judge every byte of the storage: codes and scales exactly, rotated dims within one rounding."""
    slots = inputs.slot_mapping
    rows = torch.nonzero(slots >= 0).flatten()
    expected = inputs.but(storage=before).storage.clone()
    view = expected.as_strided(inputs.k_cache.shape, inputs.k_cache.stride(), inputs.k_cache.storage_offset())
    kv, positions = inputs.kv[rows], inputs.position_ids[rows]
    reference.insert(kv, view, slots[rows], positions, inputs.cos_sin_cache, inputs.cache_block_size)
    data, _ = reference.record_views(inputs.k_cache, slots[rows], inputs.cache_block_size)
    rope = data[:, reference.PLAIN_DIM :] + inputs.k_cache.storage_offset()
    exact = reference.rotate(kv.double(), positions, inputs.cos_sin_cache)[:, reference.PLAIN_DIM :]
    got = inputs.storage[rope].contiguous().view(torch.bfloat16).double()
    wrong = ~((got - exact).abs() <= reference.rounding_bound(exact, reference.rotation_magnitude(exact)))
    if wrong.any():
        return f"rotated context: {_first_bad(wrong)}"
    expected[rope] = inputs.storage[rope]
    wrong = expected != inputs.storage
    return f"cache bytes: {_first_bad(wrong)}" if wrong.any() else ""


def scenario_detail(backend: Backend, inputs: Inputs) -> str:
    """Empty where the fused operator agrees with the reference and the two others agree with it."""
    before = inputs.storage.clone()
    layout = (inputs.k_cache.shape, inputs.k_cache.stride(), inputs.k_cache.storage_offset())
    in_place = inputs.but(q_in=inputs.q_in.clone(), storage=before.clone())
    in_place = in_place.but(k_cache=in_place.storage.as_strided(*layout))
    context = inputs.but(storage=before.clone())
    context = context.but(k_cache=context.storage.as_strided(*layout))
    for operator, case in ((FUSED, inputs), (IN_PLACE, in_place), (CONTEXT, context)):
        backend.call(operator, case)
    rows, heads, _ = inputs.q_in.shape
    query_bytes = inputs.q_out.view(torch.uint8)
    detail = _query_detail(inputs, query_bytes) or _cache_detail(inputs, before)
    if detail:
        return detail
    if not torch.equal(bits(in_place.q_in), query_bytes[:rows, :heads].contiguous()):
        return "the in-place query differs from the fused one"
    if not torch.equal(in_place.storage, inputs.storage):
        return "the cache of the in-place operator differs from the fused one"
    if not torch.equal(context.storage, inputs.storage):
        return "the cache of the KV-only operator differs from the fused one"
    return ""


def numerics_inputs(device: str) -> Iterator[tuple[str, Inputs]]:
    """Random calls over the supported shapes."""
    for heads, padded in ((1, 8), (8, 8), (16, 16), (20, 32), (63, 64), (64, 64), (16, 64), (65, 128), (128, 128)):
        name = f"{heads} of {padded} heads"
        yield name, make_inputs(rows=9, heads=heads, padded_heads=padded, device=device, seed=heads)
    for rows in (1, 2, 48, 129):
        yield f"{rows} rows", make_inputs(rows=rows, heads=6, padded_heads=8, device=device, seed=rows)
    many = make_inputs(rows=1025, heads=2, padded_heads=8, inserts=1000, device=device, seed=3)
    yield "1025 rows, 1000 slots", many
    for eps in (1e-5, 0.0):
        yield f"eps {eps}", make_inputs(rows=5, heads=3, padded_heads=8, eps=eps, device=device, seed=4)
    plain = make_inputs(rows=5, heads=3, padded_heads=8, apply_q_norm=False, device=device, seed=5)
    yield "no norm", plain


def _group_row(device: str, *groups: list[float]) -> Tensor:
    """One context row [1, 512]: the given values open each group of 64, zeros fill the rest."""
    row = torch.zeros(1, HEAD_DIM, dtype=torch.bfloat16)
    for index, values in enumerate(groups):
        row[0, index * 64 : index * 64 + len(values)] = torch.tensor(values, dtype=torch.bfloat16)
    return row.to(device)


def _quantised(device: str, *groups: list[float]) -> Inputs:
    inputs = make_inputs(rows=1, heads=1, padded_heads=8, device=device)
    return inputs.but(kv=_group_row(device, *groups))


def _scale_sweep(device: str, first: float) -> Inputs:
    """Rows whose group maxima are `first` * 2^j for every j that bf16 and the floor allow."""
    exponents = range(-20, 118)
    inputs = make_inputs(rows=len(exponents), heads=1, padded_heads=8, device=device)
    kv = inputs.kv.clone()
    kv[:, 0] = torch.tensor([first * 2.0**j for j in exponents], dtype=torch.bfloat16)
    kv[:, 1:64] = 0
    return inputs.but(kv=kv)


def _slots(device: str, *values: int) -> Inputs:
    inputs = make_inputs(rows=6, heads=2, padded_heads=8, device=device)
    slots = inputs.slot_mapping.clone()
    slots[: len(values)] = torch.tensor(values, dtype=torch.int64)
    return inputs.but(slot_mapping=slots)


def _table(device: str, cosine: float, sine: float) -> Inputs:
    inputs = make_inputs(rows=4, heads=2, padded_heads=8, device=device)
    table = inputs.cos_sin_cache.clone()
    table[:, :32], table[:, 32:] = cosine, sine
    return inputs.but(cos_sin_cache=table)


def _positions(device: str, *values: int) -> Inputs:
    inputs = make_inputs(rows=len(values), heads=2, padded_heads=8, device=device)
    return inputs.but(position_ids=torch.tensor(values, device=device))


def _query_filled(device: str, value: float) -> Inputs:
    inputs = make_inputs(rows=2, heads=2, padded_heads=8, device=device)
    return inputs.but(q_in=torch.full_like(inputs.q_in, value))


def edge_inputs(device: str) -> Iterator[tuple[str, Inputs]]:
    """Calls at the limits of the contract."""

    def small(rows: int = 6, **options: Any) -> Inputs:
        return make_inputs(rows=rows, heads=3, padded_heads=8, device=device, **options)

    page = 37440  # 64 records, rounded up to 576
    last = make_inputs(rows=6, heads=2, padded_heads=8).k_cache.shape[0] * 64 - 1
    yield "no rows", small(rows=0)
    yield "no slots", small(inserts=0)
    yield "fewer slots than rows", small(inserts=2)
    yield "no rows of q_out to spare", small(spare_rows=0)
    yield "block size 32", small(block_size=32)
    yield "block size 256", small(block_size=256)
    yield "rounded pages", small(rows=130, block_stride=page)
    yield "pages of five layers from the middle", small(rows=130, block_stride=5 * page, offset=2 * page)
    yield "first slot -1", _slots(device, -1)
    yield "last slot -1", _slots(device, 3, 4, 5, 6, 7, -1)
    yield "every slot -1", _slots(device, *[-1] * 6)
    yield "first and last slot of the cache", _slots(device, 0, last, -1, 63, 64, 65)
    yield "group maxima 448 * 2^j", _scale_sweep(device, 448.0)
    yield "group maxima 450 * 2^j", _scale_sweep(device, 450.0)
    yield "below the floor, zeros, an outlier", _quantised(device, [5e-5, -1e-6], [], [3e4] + [1e-5] * 63, [-0.0] * 64)
    yield (
        "ties, carries and subnormals",
        _quantised(
            device,
            [448.0, 17.0, 19.0, -17.0, 7.9375, -7.9375, 447.0, 1.0625],
            [448.0, 2.0**-9, 1.5 * 2.0**-9, 2.0**-10, -(2.0**-10), 2.5 * 2.0**-9, 2.0**-6],
        ),
    )
    yield "first and last position, shuffled", _positions(device, 511, 0, 17, 511, 3)
    yield "identity rotation", _table(device, 1.0, 0.0)
    yield "quarter turn", _table(device, 0.0, 1.0)
    yield "zero query", _query_filled(device, 0.0)
    yield "negative zero query", _query_filled(device, -0.0)


def _overflowing_query_detail(backend: Backend, device: str) -> str:
    """The sum of squares overflows, so the reciprocal is 0 and so is every output."""
    inputs = _query_filled(device, 3e38)
    backend.call(FUSED, inputs)
    rows, heads, _ = inputs.q_in.shape
    got = inputs.q_out[:rows, :heads]
    return "" if bool((got == 0).all()) else f"got {got.flatten()[0].item()}; needs zeros"


def _far_block_detail(backend: Backend, device: str) -> str:
    """A block more than 2^31 bytes from the first; the memory between is never touched."""
    inputs = make_inputs(rows=4, heads=1, padded_heads=8, device=device)
    width, stride = 64 * TOKEN_BYTES, (1 << 31) + 1024
    storage = torch.empty(stride + width, dtype=torch.uint8, device=device)
    slots = torch.tensor([0, 64, 127, 63], device=device)
    far = inputs.but(k_cache=storage.as_strided((2, width), (stride, 1)), storage=storage[:0], slot_mapping=slots)
    backend.call(FUSED, far)
    got = reference.read_records(far.k_cache, slots, 64)
    expected = reference.record(inputs.kv, inputs.position_ids, inputs.cos_sin_cache)
    exact = list(range(reference.PLAIN_DIM)) + list(range(reference.DATA_BYTES, TOKEN_BYTES))
    return "" if torch.equal(got[:, exact], expected[:, exact]) else "records of the far block differ"


def _guard_detail(backend: Backend, device: str) -> str:
    """GPU only: bad slots and positions touch no foreign memory; the good rows are right."""
    inputs = make_inputs(rows=8, heads=2, padded_heads=8, device=device, block_stride=37440, offset=37440)
    slots, positions = inputs.slot_mapping.clone(), inputs.position_ids.clone()
    slots[:5] = torch.tensor([-2, inputs.k_cache.shape[0] * 64, 1 << 62, -(1 << 62), 1 << 33])
    positions[:3] = torch.tensor([512, -1, 1 << 62])
    before = inputs.storage.clone()
    backend.call(FUSED, inputs.but(slot_mapping=slots, position_ids=positions))
    torch.cuda.synchronize()
    kept = torch.where(torch.arange(8, device=device) < 5, -1, slots)
    return _cache_detail(inputs.but(slot_mapping=kept), before)


def _checked(name: str, kind: str, check: Callable[[], str]) -> Case:
    """Run one check; whatever it raises fails its case, not the suite."""
    try:
        detail = check()
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
    return Case(name.replace(" ", "-"), kind, not detail, detail or "agrees with the reference")


def agreement_cases(backend: Backend, device: str) -> Iterator[Case]:
    """Numerics and edges: all three operators against the reference and each other."""
    for kind, generate in (("numerics", numerics_inputs), ("edge", edge_inputs)):
        for name, inputs in generate(device):

            def check(inputs: Inputs = inputs) -> str:
                return scenario_detail(backend, inputs)

            yield _checked(name, kind, check)
    yield _checked("overflowing query", "edge", lambda: _overflowing_query_detail(backend, device))
    yield _checked("block past 2^31 bytes", "edge", lambda: _far_block_detail(backend, device))
    if torch.device(device).type == "cuda":
        yield _checked("guarded addresses", "edge", lambda: _guard_detail(backend, device))


# --- allocation and schema ----------------------------------------------------------------------------


def _host_allocations(call: Callable[[], object]) -> int:
    """Bytes that torch's CPU allocator handed out during a call."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    return sum(abs(event.self_cpu_memory_usage) for event in profile.events() or [])


def _device_allocations(call: Callable[[], object]) -> int:
    """Allocations, segments and retries that the CUDA caching allocator counted during a call."""
    counters = ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries")

    def total() -> int:
        statistics = torch.cuda.memory_stats()
        return sum(int(statistics.get(counter, 0)) for counter in counters)

    before = total()
    call()
    torch.cuda.synchronize()
    return total() - before


def allocation_cases(backend: Backend, device: str) -> Iterator[Case]:
    """No call allocates or moves a buffer; the control shows that the counter can see one."""
    on_gpu = torch.device(device).type == "cuda"
    measure = _device_allocations if on_gpu else _host_allocations
    control = measure(lambda: torch.empty(1 << 16, device=device))
    yield Case("control", "allocation", control > 0, f"the counter moved by {control} for one tensor")
    for operator in OPERATORS:
        inputs = make_inputs(rows=16, heads=5, padded_heads=8, device=device)
        backend.call(operator, inputs)
        addresses = [tensor.data_ptr() for tensor in inputs.written(operator)]

        def calls(operator: str = operator, inputs: Inputs = inputs) -> None:
            for _ in range(ALLOCATION_CALLS):
                backend.call(operator, inputs)

        seen = measure(calls)
        moved = addresses != [tensor.data_ptr() for tensor in inputs.written(operator)]
        detail = f"the counter moved by {seen} in {ALLOCATION_CALLS} calls"
        yield Case(operator, "allocation", seen == 0 and not moved, detail)


def schema_cases() -> Iterator[Case]:
    """The registered schemas are the promised ones, and so are the arguments they declare written."""
    for operator in OPERATORS:
        registered = getattr(torch.ops.vllm_qout, operator)
        schema = str(registered.default._schema)
        yield Case(operator, "schema", schema == SCHEMAS[operator], schema)
        mutated = ops.mutated_arguments(registered)
        yield Case(f"{operator}-mutated", "schema", mutated == MUTATED[operator], ", ".join(mutated))


# --- report -------------------------------------------------------------------------------------------


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def environment(device: str) -> dict[str, Any]:
    """What the cases ran in; a value that does not apply is null."""
    on_gpu = torch.device(device).type == "cuda"
    card = torch.cuda.get_device_capability(device) if on_gpu else None
    return {
        "vllm_qout": __version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "compute_capability": ".".join(map(str, card)) if card else None,
        "library_sha256": _digest(ops.LIBRARY),
        "cuda_library_sha256": _digest(ops.CUDA_LIBRARY) if ops.CUDA_LOADED else None,
    }


def _counts(cases: list[Case]) -> dict[str, Any]:
    kinds = Counter(case.kind for case in cases)
    failed = sum(not case.passed for case in cases)
    rules = {case.id[:6] for case in cases if case.id.startswith("rule")}
    return {
        "total": len(cases),
        "passed": len(cases) - failed,
        "failed": failed,
        "rules": len(rules),
        "by_kind": {kind: kinds[kind] for kind in KINDS},
    }


def complete(counts: dict[str, Any]) -> bool:
    """Whether every kind had a case and every rule its own; an empty run is never complete."""
    kinds: dict[str, int] = counts["by_kind"]
    return bool(counts["rules"] == RULES and all(kinds.get(kind) for kind in KINDS))


def run(device: str = "cpu", backend: str | None = None) -> dict[str, Any]:
    """All cases on `device`, as a JSON-able report; raises ContractError where it cannot run."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ContractError(f"device {device}: torch sees no GPU; use --device cpu, or check nvidia-smi")
    chosen = load_backend(backend)
    on_gpu = torch.device(device).type == "cuda"
    # torch.ldexp, which the reference uses, launches on the current device, not on that of its tensors.
    with torch.cuda.device(device) if on_gpu else nullcontext():
        cases = [
            *schema_cases(),
            *reject_cases(chosen, device),
            *agreement_cases(chosen, device),
            *allocation_cases(chosen, device),
        ]
    counts = _counts(cases)
    return {
        "suite": "vllm_qout.contract",
        "device": device,
        "backend": chosen.name,
        "environment": environment(device),
        "schemas": {operator: str(getattr(torch.ops.vllm_qout, operator).default._schema) for operator in OPERATORS},
        "cases": [asdict(case) for case in cases],
        "counts": counts,
        "passed": complete(counts) and counts["failed"] == 0,
    }


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="vllm_qout.contract", description="Run the operator contract suite.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--backend", default=None, choices=["native", "triton"], help="default: native")
    parser.add_argument("--json", type=Path, default=None, metavar="OUT", help="write the report to this file")
    options = parser.parse_args(arguments)
    try:
        report = run(options.device, options.backend)
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    except (ContractError, OSError) as error:
        sys.stderr.write(f"vllm_qout.contract: {error}\n")
        return 2
    for case in report["cases"]:
        if not case["passed"]:
            sys.stdout.write(f"FAILED {case['kind']} {case['id']}: {case['detail']}\n")
    counts = report["counts"]
    verdict = "passed" if report["passed"] else "failed"
    sys.stdout.write(
        f"contract {verdict}: {counts['passed']} of {counts['total']} cases on {options.device}, "
        f"{counts['rules']} rules\n"
    )
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
