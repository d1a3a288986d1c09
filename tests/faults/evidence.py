# SPDX-License-Identifier: Apache-2.0
"""Faults in the evidence of a real run: the engine that ran, how it served, and what went wrong in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from qualify.claims.model import ClaimId
from qualify.reasons import ReasonCode
from qualify.receipt.canonical import canonical

from faults.lab import Lab, Tamper, Tree
from faults.model import Fault, Group, Verdict, Verdicts, error, failed, inconclusive, invalid, not_run, verdicts

CODE = ReasonCode
PINS, CONTRACT, SERVE = ClaimId.PINS, ClaimId.OP_CONTRACT, ClaimId.SERVE_TP
MEMORY, KV, LOAD, ERRORS = (
    ClaimId.MEMORY_ADMISSION,
    ClaimId.KV_RESTORE,
    ClaimId.THROUGHPUT_SUSTAINED,
    ClaimId.SERVICE_ERRORS,
)
CONTROL, COLD, RESTART, SPECULATIVE = (
    "boots/01-control",
    "boots/02-cold",
    "boots/03-restart",
    "boots/04-speculative",
)
BOOTS = (CONTROL, COLD, RESTART, SPECULATIVE)
SERVED = (CONTROL, SPECULATIVE)
WITH_KV = (CONTROL, COLD, RESTART)
WITH_CACHE = (COLD, RESTART)

Edit = Callable[[Any, Tree], object]


def fault(group: Group, name: str, change: Tamper, expected: Verdicts) -> Fault:
    """Judge the whole run again with changed evidence."""

    def act(lab: Lab) -> Verdicts:
        return verdicts(lab.derive(lab.tampered(name, change)))

    return Fault(group, name, act, expected)


def on(path: str, change: Edit) -> Tamper:
    """Edit one JSON file."""
    return lambda tree: tree.edit(path, lambda value: change(value, tree))


def of_a_boot(file: str, change: Edit, boots: tuple[str, ...] = BOOTS) -> Tamper:
    """Edit this file of a boot drawn by lot from those that have it."""

    def act(tree: Tree) -> None:
        paths = [f"{boot}/{file}" for boot in boots]
        on(tree.random.choice([path for path in paths if path in tree.files]), change)(tree)

    return act


def put(**values: Any) -> Edit:
    return lambda value, tree: value.update(values)


# pins


def a_worker(change: Callable[[dict[str, Any]], object], *places: str) -> Tamper:
    """Change one rank of one boot, at a place in its report."""

    def edit(workers: Any, tree: Tree) -> None:
        found = tree.random.choice(workers)
        for place in places:
            found = found[place]
        change(found)

    return of_a_boot("workers.json", edit)


def preload(record: Any, tree: Tree) -> None:
    engine = next(process for process in record["processes"] if process["role"] == "engine")
    engine["environment"]["LD_PRELOAD"] = "/opt/hook.so"


PINNED = (
    (
        "a package is not the locked one",
        on("engine.json", put(lockMismatches=["numpy: 2.0.0"])),
        failed(CODE.LOCK_MISMATCH),
    ),
    ("an installed file was edited", on("engine.json", put(filesModified=["vllm/x.py"])), failed(CODE.CODE_MODIFIED)),
    ("installed without a lock", on("engine.json", put(lockDigest=None)), inconclusive(CODE.ENVIRONMENT_INCOMPLETE)),
    (
        "a package was exchanged behind the engine's digest",
        on(
            "engine.json", lambda engine, tree: tree.random.choice(engine["distributions"]).update(filesDigest="0" * 64)
        ),
        failed(CODE.DIGEST_MISMATCH),
    ),
    ("no file was compared", on("engine.json", put(filesChecked=0)), error(CODE.ENVIRONMENT_INCOMPLETE)),
    (
        "a worker runs another engine version",
        a_worker(lambda versions: versions.update(vllm="0.31.0"), "versions"),
        failed(CODE.VERSION_MISMATCH, CODE.RANKS_DISAGREE),
    ),
    (
        "a worker has another build of torch",
        a_worker(lambda versions: versions.update(torch="2.13.0+xpu"), "versions"),
        failed(CODE.RANKS_DISAGREE),
    ),
    (
        "a worker's versions are not visible",
        a_worker(lambda report: report.update(versions=None)),
        failed(CODE.ENVIRONMENT_INCOMPLETE, CODE.RANKS_DISAGREE),
    ),
    ("other code is loaded before the engine", of_a_boot("boot.json", preload), failed(CODE.CODE_MODIFIED)),
    ("the model is of another seed", on("model.json", put(seed=4321)), failed(CODE.DIGEST_MISMATCH)),
)


# op.contract


def fail_a_case(report: Any, tree: Tree) -> None:
    case = tree.random.choice(report["cases"])
    case.update(passed=False, detail="differs")
    report["counts"]["failed"] = 1
    report["passed"] = False


def hide_a_failed_case(report: Any, tree: Tree) -> None:
    tree.random.choice(report["cases"])["passed"] = False


def lose_a_rule(report: Any, tree: Tree) -> None:
    rule = f"rule{tree.random.randrange(1, 41):02}"
    report["cases"] = [
        case for case in report["cases"] if not (case["kind"] == "reject" and case["id"].startswith(rule))
    ]
    report["counts"]["total"] = len(report["cases"])


def lose_a_kind(report: Any, tree: Tree) -> None:
    report["cases"] = [case for case in report["cases"] if case["kind"] != "allocation"]
    report["counts"]["total"] = len(report["cases"])


def repeat_a_case(report: Any, tree: Tree) -> None:
    report["cases"].append(tree.random.choice(report["cases"]))
    report["counts"]["total"] += 1


def unmark_mutation(report: Any, tree: Tree) -> None:
    name = tree.random.choice(sorted(report["schemas"]))
    report["schemas"][name] = report["schemas"][name].replace("(a!)", "")


def another_torch(report: Any, tree: Tree) -> None:
    report["environment"]["torch"] = "2.12.0+cpu"


PROMISED = (
    ("a case of the operator's contract failed", fail_a_case, failed(CODE.OP_CASE_FAILED)),
    (
        "a failed case is not in the suite's counts",
        hide_a_failed_case,
        failed(CODE.OP_CASE_FAILED, CODE.COUNTER_MISMATCH),
    ),
    ("a bad input was not tried", lose_a_rule, error(CODE.EVIDENCE_MISSING)),
    ("no allocation was tried", lose_a_kind, failed(CODE.EVIDENCE_MISSING)),
    ("a case is counted twice", repeat_a_case, failed(CODE.PARSE_FAILED)),
    ("a schema hides a mutated argument", unmark_mutation, failed(CODE.OP_SCHEMA_MISMATCH)),
    ("the suite ran in another environment", another_torch, failed(CODE.VERSION_MISMATCH)),
    ("the suite ran on another device", put(device="cuda:0"), failed(CODE.OP_CASE_FAILED)),
)


# serve.tp


def one_rank(workers: Any, tree: Tree) -> None:
    """World size 1 where 2 was promised."""
    del workers[1:]
    workers[0].update(worldSize=1, tensorParallel=1)


def share_a_core(workers: Any, tree: Tree) -> None:
    workers[1]["device"]["cores"] = list(workers[0]["device"]["cores"])


def share_a_process(workers: Any, tree: Tree) -> None:
    workers[1]["process"] = dict(workers[0]["process"])


def a_request(
    change: Callable[[dict[str, Any]], object], of: Callable[[dict[str, Any]], bool] = lambda _: True
) -> Tamper:
    """Change the answer of one served request."""

    def edit(served: Any, tree: Tree) -> None:
        change(tree.random.choice([request for request in served["requests"] if of(request)])["answer"])

    return of_a_boot("serve.json", edit, SERVED)


def streamed(request: dict[str, Any]) -> bool:
    return bool(request["stream"])


def cut(answer: dict[str, Any]) -> None:
    answer.update(error="the stream ended without its end mark", finishReason=None, done=False)


def double_text(answer: dict[str, Any]) -> None:
    """Chunks arrived twice, and the counts do not show it."""
    answer["text"] += answer["text"][-9:]


def double_tokens(answer: dict[str, Any]) -> None:
    """Chunks arrived twice with their token ids."""
    answer["text"] += answer["text"]
    answer["tokenIds"] += answer["tokenIds"]


def move_a_greedy_answer(served: Any, tree: Tree) -> None:
    again = next(request for request in served["requests"] if request["name"] == "completion-again")
    ids = again["answer"]["tokenIds"]
    ids[-1] = ids[-1] + 1


def repeat_one_token(served: Any, tree: Tree) -> None:
    for request in served["requests"]:
        answer = request["answer"]
        if request["endpoint"].endswith("/chat/completions"):
            answer["tokenIds"] = [answer["tokenIds"][0]] * len(answer["tokenIds"])


def drop_the_chat(served: Any, tree: Tree) -> None:
    served["requests"] = [one for one in served["requests"] if "chat" not in one["endpoint"]]


RANKS_GONE = {
    SERVE: failed(CODE.WORLD_SIZE_MISMATCH, CODE.RANK_MISSING),
    PINS: failed(CODE.RANK_MISSING),
    MEMORY: failed(CODE.RANK_MISSING),
    KV: error(CODE.EVIDENCE_MISSING),
}
RANK_ORDER = failed(CODE.RANK_MISSING)

PROMISED_RANKS: tuple[tuple[str, Tamper, Verdicts], ...] = (
    ("world size 1 for 2", of_a_boot("workers.json", one_rank, WITH_KV), RANKS_GONE),
    ("a rank left no report", of_a_boot("workers.json", lambda workers, tree: workers.pop(), WITH_KV), RANKS_GONE),
    (
        "a rank reports a smaller world",
        a_worker(lambda report: report.update(worldSize=1)),
        {SERVE: failed(CODE.WORLD_SIZE_MISMATCH)},
    ),
    (
        "reports of two ranks are swapped",
        of_a_boot("workers.json", lambda workers, tree: workers.reverse()),
        {SERVE: RANK_ORDER, PINS: RANK_ORDER, MEMORY: RANK_ORDER},
    ),
    ("two ranks on one core", of_a_boot("workers.json", share_a_core), {SERVE: failed(CODE.DEVICE_SHARED)}),
    (
        "two ranks are one process",
        of_a_boot("workers.json", share_a_process, WITH_KV),
        {SERVE: failed(CODE.WORLD_SIZE_MISMATCH), KV: error(CODE.EVIDENCE_MISSING)},
    ),
    (
        "a rank's device is not visible",
        a_worker(lambda report: report.update(device=None)),
        {SERVE: error(CODE.ENVIRONMENT_INCOMPLETE)},
    ),
)

ANSWERED: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("another model is listed", of_a_boot("serve.json", put(models=["other"]), SERVED), failed(CODE.WRONG_MODEL)),
    ("an answer names another model", a_request(lambda answer: answer.update(model="other")), failed(CODE.WRONG_MODEL)),
    (
        "a usage count is one too high",
        a_request(lambda answer: answer.update(completionTokens=answer["completionTokens"] + 1)),
        failed(CODE.USAGE_MISMATCH),
    ),
    (
        "an answer has no usage",
        a_request(lambda answer: answer.update(completionTokens=None)),
        failed(CODE.USAGE_MISMATCH),
    ),
    (
        "a token was counted and not delivered",
        a_request(lambda answer: answer["tokenIds"].pop(), lambda request: not request["greedy"] and streamed(request)),
        failed(CODE.USAGE_MISMATCH),
    ),
    ("a stream was cut", a_request(cut, streamed), failed(CODE.STREAM_BROKEN)),
    ("a stream repeated text", a_request(double_text, streamed), failed(CODE.STREAM_BROKEN)),
    (
        "a stream lost text",
        a_request(lambda answer: answer.update(text=answer["text"][:-1]), streamed),
        failed(CODE.STREAM_BROKEN),
    ),
    (
        "a stream repeated chunks with their tokens",
        a_request(double_tokens, lambda request: streamed(request) and not request["greedy"]),
        failed(CODE.USAGE_MISMATCH),
    ),
    (
        "a request was refused",
        a_request(lambda answer: answer.update(status=400, error="refused", finishReason=None)),
        failed(CODE.REQUEST_FAILED),
    ),
    (
        "an answer ended early",
        a_request(lambda answer: answer.update(finishReason="stop")),
        failed(CODE.REQUEST_FAILED),
    ),
    (
        "a greedy answer moved",
        of_a_boot("serve.json", move_a_greedy_answer, SERVED),
        inconclusive(CODE.OUTPUT_NOT_REPRODUCED),
    ),
    (
        "every chat answer repeats one token",
        of_a_boot("serve.json", repeat_one_token, SERVED),
        inconclusive(CODE.OUTPUT_DEGENERATE),
    ),
    ("no chat was asked", of_a_boot("serve.json", drop_the_chat, SERVED), error(CODE.EVIDENCE_MISSING)),
)


def no_token_ids(served: Any, tree: Tree) -> None:
    for request in served["requests"]:
        request["answer"]["tokenIds"] = None


# service.errors

FATAL = "(EngineCore pid=7) ERROR {time} [core.py:1] EngineCore encountered a fatal error.\n"
TIME = re.compile(r"INFO (\d\d-\d\d \d\d:\d\d:\d\d) ")
STARTED = "Application startup complete"


def relog(tree: Tree, path: str, content: bytes) -> None:
    """Another log, as if its process had written it."""
    folder, _, name = path.rpartition("/")
    tree.write(path, content)

    def count(record: Any) -> None:
        process = next(one for one in record["processes"] if f"{one['role']}.log.gz" == name)
        process["logLines"] = content.count(b"\n")

    tree.edit(f"{folder}/boot.json", count)


def fatal_while_serving(tree: Tree) -> None:
    """Directly behind the line that says it serves."""
    path = f"{tree.random.choice(BOOTS)}/engine.log.gz"
    lines = tree.bytes(path).decode().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if STARTED in line) + 1
    time = [found[1] for line in lines[:at] if (found := TIME.search(line))][-1]
    relog(tree, path, "".join([*lines[:at], FATAL.format(time=time), *lines[at:]]).encode())


def error_in_the_cache_log(tree: Tree) -> None:
    path = f"{COLD}/cache.log.gz"
    text = tree.bytes(path).decode()
    time = re.search(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),", text)
    assert time is not None
    relog(tree, path, text.encode() + f"[{time[1]},100] LMCache ERROR: a store failed (x.py:1:y)\n".encode())


def no_ready_line(tree: Tree) -> None:
    tree.replace(f"{tree.random.choice(BOOTS)}/engine.log.gz", STARTED, "Application startup")


def log_of_another_boot(tree: Tree) -> None:
    """A log that says the same, of a process that this boot did not start."""
    path = f"{tree.random.choice(BOOTS)}/engine.log.gz"
    tree.write(path, re.sub(rb"(Started server process \[)\d+", rb"\g<1>7", tree.bytes(path)))


def end_the_log_early(tree: Tree) -> None:
    """At a line end behind the ready line: nothing says that the engine was asked to stop."""
    path = f"{tree.random.choice(BOOTS)}/engine.log.gz"
    before_stop, _, _ = tree.bytes(path).partition(b"[shutdown]")
    relog(tree, path, before_stop.rpartition(b"\n")[0] + b"\n")


def cut_behind_the_start(file: str, mark: bytes, boots: tuple[str, ...]) -> Tamper:
    """Whole lines are gone: all behind the one that says it serves."""

    def change(tree: Tree) -> None:
        path = f"{tree.random.choice(boots)}/{file}"
        lines = tree.bytes(path).splitlines(keepends=True)
        at = max(index for index, line in enumerate(lines) if mark in line)
        tree.write(path, b"".join(lines[: at + 1]))

    return change


def cut_the_log_file(tree: Tree) -> None:
    path = f"{tree.random.choice(SERVED)}/engine.log.gz"
    tree.files[path] = tree.files[path][: len(tree.files[path]) // 2]


def second_start(tree: Tree) -> None:
    """The log of an engine that was started again behind our back, without a requested stop between."""
    path = f"{tree.random.choice(SERVED)}/engine.log.gz"
    before_stop, _, _ = tree.bytes(path).partition(b"[shutdown]")
    relog(tree, path, before_stop.rpartition(b"\n")[0] + b"\n" + tree.bytes(path))


def an_exchange(**values: Any) -> Tamper:
    def change(tree: Tree) -> None:
        path = f"{tree.random.choice(BOOTS)}/requests.jsonl"
        lines = tree.bytes(path).decode().splitlines()
        index = tree.random.choice([i for i, line in enumerate(lines) if json.loads(line)["phase"] != "start"])
        lines[index] = json.dumps({**json.loads(lines[index]), **values})
        tree.write(path, ("\n".join(lines) + "\n").encode())

    return change


def burst(status: int) -> Tamper:
    """The last five answers of a boot."""

    def change(tree: Tree) -> None:
        path = f"{tree.random.choice(BOOTS)}/requests.jsonl"
        lines = tree.bytes(path).decode().splitlines()
        bad = [json.dumps({**json.loads(line), "status": status, "error": "x"}) for line in lines[-5:]]
        tree.write(path, ("\n".join([*lines[:-5], *bad]) + "\n").encode())

    return change


def lose_last_phase(tree: Tree) -> None:
    """Whole lines are gone: all from the first request under load."""
    path = f"{tree.random.choice(SERVED)}/requests.jsonl"
    lines = tree.bytes(path).decode().splitlines(keepends=True)
    first = next(index for index, line in enumerate(lines) if json.loads(line)["phase"] == "throughput")
    tree.write(path, "".join(lines[:first]).encode())


def requests_of_another_boot(tree: Tree) -> None:
    one, other = tree.random.sample(BOOTS, 2)
    tree.write(f"{one}/requests.jsonl", tree.bytes(f"{other}/requests.jsonl"))


def a_request_of_another_boot(tree: Tree) -> None:
    """One line among those of the boot itself."""
    one, other = tree.random.sample(BOOTS, 2)
    stranger = tree.random.choice(tree.bytes(f"{other}/requests.jsonl").splitlines(keepends=True))
    tree.write(f"{one}/requests.jsonl", tree.bytes(f"{one}/requests.jsonl") + stranger)


def cut_an_exchange(tree: Tree) -> None:
    path = f"{tree.random.choice(BOOTS)}/requests.jsonl"
    tree.write(path, tree.bytes(path)[:-20])


def ended(outcome: str) -> Tamper:
    def change(record: Any, tree: Tree) -> None:
        record["outcome"] = outcome
        tree.random.choice(record["processes"])["outcome"] = outcome

    return of_a_boot("boot.json", change)


SERVICE: tuple[tuple[str, Tamper, Verdicts], ...] = (
    ("a fatal line while serving", fatal_while_serving, {ERRORS: failed(CODE.SERVICE_ERROR)}),
    ("an error in the cache server's log", error_in_the_cache_log, {ERRORS: failed(CODE.SERVICE_ERROR)}),
    ("the ready line is missing", no_ready_line, {ERRORS: invalid(CODE.EVIDENCE_MISSING)}),
    ("the log is of another boot", log_of_another_boot, {ERRORS: invalid(CODE.EVIDENCE_MISSING)}),
    ("the log ends before the stop", end_the_log_early, {ERRORS: invalid(CODE.EVIDENCE_MISSING)}),
    (
        "the log lost the lines behind its start",
        cut_behind_the_start("engine.log.gz", STARTED.encode(), BOOTS),
        {ERRORS: invalid(CODE.EVIDENCE_MISSING)},
    ),
    (
        "the cache server's log lost the lines behind its start",
        cut_behind_the_start("cache.log.gz", b"Started server process", WITH_CACHE),
        {ERRORS: invalid(CODE.EVIDENCE_MISSING)},
    ),
    ("the log holds a second start", second_start, {ERRORS: failed(CODE.SERVICE_ERROR)}),
    (
        "the log file is cut",
        cut_the_log_file,
        {ERRORS: error(CODE.PARSE_FAILED), MEMORY: error(CODE.PARSE_FAILED)},
    ),
    ("one answer was a 500", an_exchange(status=500, error="x"), {ERRORS: failed(CODE.SERVICE_ERROR)}),
    ("one request got no answer", an_exchange(status=None, error="ReadTimeout"), {ERRORS: failed(CODE.SERVICE_ERROR)}),
    ("a burst of 503", burst(503), {ERRORS: failed(CODE.SERVICE_ERROR)}),
    ("a burst of 400", burst(400), {ERRORS: error(CODE.CLIENT_ERROR)}),
    ("the list of requests ends early", lose_last_phase, {ERRORS: invalid(CODE.EVIDENCE_MISSING)}),
    (
        "the list of requests is of another boot",
        requests_of_another_boot,
        {ERRORS: error(CODE.EVIDENCE_MISSING)},
    ),
    (
        "a request of another boot is listed",
        a_request_of_another_boot,
        {ERRORS: error(CODE.EVIDENCE_MISSING)},
    ),
    ("the list of requests is cut", cut_an_exchange, {ERRORS: error(CODE.PARSE_FAILED)}),
    (
        "the engine was not ready in time",
        of_a_boot(
            "boot.json", put(outcome="notReady", readySeconds=None, stopRequestedSeconds=None, stoppedSeconds=300.0)
        ),
        {ERRORS: failed(CODE.START_TIMEOUT)},
    ),
    ("a process died", ended("died"), {ERRORS: failed(CODE.CRASHED)}),
    ("a process had to be killed", ended("killed"), {ERRORS: failed(CODE.UNCLEAN_STOP)}),
    (
        "a process outlived its boot",
        of_a_boot("boot.json", put(leftovers=["process x (pid 7)"])),
        {ERRORS: failed(CODE.LEFTOVER)},
    ),
)


# the run


def run_ended(outcome: str) -> Tamper:
    """A run that ended before its last boot."""

    def change(tree: Tree) -> None:
        tree.edit("run.json", lambda run: run.update(outcome=outcome))
        for path in [path for path in tree.files if path.startswith(SPECULATIVE)]:
            tree.remove(path)

    return change


def boot_gone(tree: Tree) -> None:
    for path in [path for path in tree.files if path.startswith(SPECULATIVE)]:
        tree.remove(path)


def workers_of_another_boot(tree: Tree) -> None:
    one, other = tree.random.sample(WITH_KV, 2)
    tree.write(f"{one}/workers.json", tree.bytes(f"{other}/workers.json"))


def everywhere(verdict: Verdict) -> Verdicts:
    return dict.fromkeys((PINS, SERVE, MEMORY, LOAD, ERRORS), verdict)


WHOLE: tuple[tuple[str, Tamper, Verdicts], ...] = (
    ("a boot left no evidence", boot_gone, everywhere(error(CODE.EVIDENCE_MISSING))),
    ("the run failed before its last boot", run_ended("failed"), everywhere(not_run(CODE.CRASHED))),
    ("the run was interrupted before its last boot", run_ended("interrupted"), everywhere(not_run(CODE.INTERRUPTED))),
    (
        "the engine's environment left no evidence",
        lambda tree: tree.remove("engine.json"),
        dict.fromkeys((PINS, CONTRACT), error(CODE.EVIDENCE_MISSING)),
    ),
    (
        "the workers' reports are of another boot",
        workers_of_another_boot,
        dict.fromkeys((PINS, SERVE, MEMORY, KV), error(CODE.EVIDENCE_MISSING)),
    ),
    (
        "the answers are of another boot",
        of_a_boot("serve.json", put(boot="cold"), SERVED),
        {SERVE: error(CODE.EVIDENCE_MISSING)},
    ),
    (
        "the answers carry no token ids",
        of_a_boot("serve.json", no_token_ids, SERVED),
        {SERVE: inconclusive(CODE.NOT_SUPPORTED)},
    ),
)

FAULTS: tuple[Fault, ...] = (
    *(fault(Group.ENGINE, name, change, {PINS: verdict}) for name, change, verdict in PINNED),
    *(
        fault(Group.ENGINE, name, on("contract.json", change), {CONTRACT: verdict})
        for name, change, verdict in PROMISED
    ),
    *(fault(Group.ENGINE, name, change, expected) for name, change, expected in PROMISED_RANKS),
    *(fault(Group.ENGINE, name, change, {SERVE: verdict}) for name, change, verdict in ANSWERED),
    *(fault(Group.ENGINE, name, change, expected) for name, change, expected in SERVICE),
    *(fault(Group.ENGINE, name, change, expected) for name, change, expected in WHOLE),
)


def untouched(lab: Lab) -> Verdicts:
    """The claims of the run, derived again, are those of its receipt, and all pass."""
    again = {claim.id: canonical(claim) for claim in lab.untouched}
    told = {claim.id: canonical(claim) for claim in lab.receipt.predicate.claims}
    differing = {claim: Verdict("differs", frozenset()) for claim in again if again[claim] != told[claim]}
    return {**verdicts(lab.untouched), **differing}


GOOD = {"the untouched evidence": untouched}
