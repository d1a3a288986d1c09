# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of the stand-in."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal

from fake_engine.engine import RANKS, SOUND, Engine, Faults, Job, piece

Transport = Literal["whole", "split", "merged"]
LABELS = 'engine="0",model_name="{}"'
KINDS = {"vllm:iteration_tokens_total_count": "vllm:iteration_tokens_total", "vllm:iteration_tokens_total_sum": ""}


class FakeEngine:
    """A server on a free loopback port while the context is open.

    `transport` says how stream bytes reach the socket: an event a write, in pieces of 5 bytes, or all at the end.
    """

    def __init__(
        self,
        *,
        model: str = "fake",
        step_seconds: float = 0.002,
        drafter: int | None = None,
        faults: Faults = SOUND,
        transport: Transport = "whole",
    ) -> None:
        self.model = model
        self.faults = faults
        self.transport = transport
        self._began = time.monotonic_ns()
        self.engine = Engine(step_seconds, drafter, faults)
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeEngine:
        self.engine.start()
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.stop()
        self._server.shutdown()
        self._server.server_close()

    def metrics(self) -> str:
        engine = self.engine
        with engine.lock:
            counters = dict(engine.counters)
            running = 0 if self.faults.idle_gauge else engine.running + self.faults.busy_gauge
            started = engine.started_at
        labels = LABELS.format(self.model)
        values = {f"{name}{{{labels}}}": value for name, value in counters.items()}
        computed = counters["vllm:prompt_tokens_total"]
        values[f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}}'] = computed
        if engine.drafter is not None:
            accepted = counters["vllm:spec_decode_num_accepted_tokens_total"]
            values[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}}'] = accepted
        values[f"vllm:num_requests_running{{{labels}}}"] = float(running)
        values[f"vllm:num_requests_waiting{{{labels}}}"] = 0.0
        values["process_start_time_seconds"] = started
        kept = {name: value for name, value in values.items() if name.split("{")[0] not in self.faults.absent}
        kinds = sorted({name.split("{")[0] for name in kept if name.split("{")[0].endswith("_total")})
        head = [f"# TYPE {name} counter" for name in kinds] + ["# TYPE vllm:iteration_tokens_total histogram"]
        return "\n".join([*head, *(f"{name} {value}" for name, value in kept.items())]) + "\n"

    def workers(self) -> list[dict[str, Any]]:
        """What `qualify_describe` gives per rank."""
        return [self._worker(rank) for rank in range(self.faults.ranks)]

    def _worker(self, rank: int) -> dict[str, Any]:
        core = 0 if self.faults.shared_core else rank
        unread = dict.fromkeys(("versions", "runner", "model_class", "kv_cache", "plugin"))
        return {
            "rank": rank,
            "local_rank": rank,
            "world_size": self.faults.ranks,
            "tensor_parallel": self.faults.ranks,
            "process": {"pid": 100 + rank, "started": self._began},
            "device": {"type": "cpu", "cores": [core], "threads": 1, "unknown": {}},
            **unread,
            "unknown": dict.fromkeys(unread, "the stand-in has none"),
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, fake: FakeEngine) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = fake

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        fake = self.server.fake
        if fake.engine.dead.is_set():
            self._json(503, {"error": {"message": "the engine is dead"}})
        elif self.path == "/health":
            self._send(200, b"", "text/plain")
        elif self.path == "/metrics":
            self._send(200, fake.metrics().encode(), "text/plain")
        elif self.path == "/v1/models":
            name = fake.faults.listed_model or fake.model
            self._json(200, {"object": "list", "data": [{"id": name, "max_model_len": 4096}]})
        else:
            self._json(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        fake = self.server.fake
        if self.path in ("/v1/completions", "/v1/chat/completions"):
            self._generate(body)
        elif self.path == "/reset_prefix_cache":
            self._json(200, {"success": True})
        elif self.path == "/collective_rpc":
            described = body.get("method") == "qualify_describe"
            self._json(200, {"results": fake.workers() if described else [{"rank": rank} for rank in range(RANKS)]})
        else:
            self._json(404, {"error": {"message": "not found"}})

    def _generate(self, body: dict[str, Any]) -> None:
        fake = self.server.fake
        faults, number = fake.faults, fake.engine.number()
        if fake.engine.dead.is_set():
            return self._json(500, {"error": {"message": "EngineDeadError"}})
        if number == faults.refuse:
            return self._json(400, {"error": {"message": "refused by a fault"}})
        if number == faults.fail:
            return self._json(500, {"error": {"message": "failed by a fault"}})
        if number == faults.hang:
            while not fake.engine.dead.wait(0.05):
                if fake.engine._halt:
                    return None
        wanted = body["max_tokens"]
        sampling = "greedy" if body.get("temperature", 1) == 0 else f"seed {body.get('seed')}"
        stop = number == faults.early_stop
        job = fake.engine.submit(number, _prompt(body), sampling, max(1, wanted // 2) if stop else wanted)
        answer = _Answer(fake, body, job, self.path.endswith("chat/completions"), "stop" if stop else "length")
        if body.get("stream"):
            return self._stream(answer, number)
        for _ in answer.steps():
            pass
        if number == faults.drop:
            return self._drop()
        if fake.engine.dead.is_set():
            return self._json(500, {"error": {"message": "EngineDeadError"}})
        return self._json(200, answer.document())

    def _stream(self, answer: _Answer, number: int) -> None:
        fake = self.server.fake
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        held = b""
        for event in answer.events():
            if number in (fake.faults.drop, fake.faults.cut_stream, fake.faults.error_event) and answer.begun:
                break
            data = b"data: " + event.encode() + b"\n\n"
            if fake.transport == "merged":
                held += data
            else:
                self._chunks(data, 5 if fake.transport == "split" else len(data))
        if fake.engine.dead.is_set() or number == fake.faults.drop:
            return self._drop()
        if number == fake.faults.error_event:
            held += b'data: {"error": {"message": "failed by a fault", "code": 500}}\n\ndata: [DONE]\n\n'
        elif number != fake.faults.cut_stream:
            held += b": the end\n\ndata: [DONE]\n\n"
        self._chunks(held, len(held))
        self.wfile.write(b"0\r\n\r\n")
        return None

    def _chunks(self, data: bytes, size: int) -> None:
        for start in range(0, len(data), size or 1):
            part = data[start : start + size]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Answer:
    """One answer in the forms of both endpoints, whole or as events."""

    def __init__(self, fake: FakeEngine, body: dict[str, Any], job: Job, chat: bool, finish: str) -> None:
        self._fake = fake
        self._body = body
        self._job = job
        self._chat = chat
        self._finish = finish
        self.begun = False

    def steps(self) -> Iterator[list[int]]:
        while not self._fake.engine.dead.is_set():
            try:
                ids = self._job.out.get(timeout=0.05)
            except Exception:
                continue
            if ids is None:
                return
            yield ids

    def events(self) -> Iterator[str]:
        if self._chat:
            yield self._pack([self._choice({"delta": {"role": "assistant", "content": ""}}, None)])
        sent = 0
        for ids in self.steps():
            sent += len(ids)
            last = sent >= self._job.wanted
            yield self._pack([self._part(ids, sent - len(ids), self._finish if last else None)])
            self.begun = True
        if not self._fake.faults.no_usage:
            yield self._pack([], usage=self._usage())

    def document(self) -> dict[str, Any]:
        ids = self._job.made
        text = "".join(map(piece, ids))
        part = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        usage = {} if self._fake.faults.no_usage else {"usage": self._usage()}
        return {"model": self._model(), "choices": [self._choice(part, self._finish) | self._extras(ids)], **usage}

    def _part(self, ids: list[int], offset: int, finish: str | None) -> dict[str, Any]:
        lost = self._fake.faults.lose_text
        text = "".join(piece(one) for index, one in enumerate(ids, offset) if not (lost and index == 2))
        part = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._choice(part, finish) | self._extras(ids)

    def _extras(self, ids: list[int]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._body.get("return_token_ids"):
            extras["token_ids"] = ids
        if self._body.get("logprobs"):
            entries = [-1.0] * len(ids)
            extras["logprobs"] = {"content": entries} if self._chat else {"token_logprobs": entries}
        return extras

    def _choice(self, part: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": 0, **part, "finish_reason": finish}

    def _usage(self) -> dict[str, int]:
        made = len(self._job.made) + self._fake.faults.usage_off
        return {"prompt_tokens": len(self._job.prompt), "completion_tokens": made, "total_tokens": made}

    def _model(self) -> str:
        return self._fake.faults.answer_model or self._fake.model

    def _pack(self, choices: list[dict[str, Any]], **more: Any) -> str:
        document = {"model": self._model(), "created": int(time.time()), "choices": choices, **more}
        return json.dumps(document, ensure_ascii=False)


def _prompt(body: dict[str, Any]) -> tuple[int, ...]:
    prompt = body.get("prompt", body.get("messages"))
    return tuple(prompt) if isinstance(prompt, list) and isinstance(prompt[0], int) else tuple(repr(prompt).encode())
