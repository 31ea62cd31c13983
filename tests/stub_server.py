"""A small OpenAI-compatible server of the toy target, with faults on order. Answers as vLLM's /v1/completions does."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtp_train.engine.engine import Engine
from mtp_train.engine.sequences import Request

Fault = Callable[[tuple[int, ...], int], str]  # (prompt, how often it came before) -> fault, or ""


class StubServer:
    """Serves `engine` under the name `toy` until `close`."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.limit = engine.limit
        self.fault: Fault = lambda prompt, before: ""
        self.key = ""  # that requests must bring, as with vLLM's --api-key
        self.bodies: list[dict[str, Any]] = []
        self.seen: Counter[tuple[int, ...]] = Counter()
        self.lock = threading.Lock()
        self.closing = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not self.allowed():
                    return
                card = {"id": "toy", "max_model_len": stub.limit}
                self.reply(200, {"data": [card]} if self.path == "/v1/models" else {})

            def do_POST(self) -> None:
                if not self.allowed():
                    return
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(*stub.answer(body))

            def allowed(self) -> bool:
                """Whether the key is right; if not, it is quoted in the answer, as some servers do."""
                brought = self.headers.get("Authorization", "")
                if stub.key and brought != f"Bearer {stub.key}":
                    self.close_connection = True
                    self.reply(401, {"error": f"wrong key: {brought}"})
                    return False
                return True

            def reply(self, status: int, value: Any) -> None:
                if status == 0:  # the connection breaks
                    return
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = body["prompt"]
        ids = tuple(
            self.tokenizer.encode(prompt, add_special_tokens=False)
            if isinstance(prompt, str)
            else prompt
        )
        with self.lock:
            self.bodies.append(body)
            fault = self.fault(ids, self.seen[ids])
            self.seen[ids] += 1
            if fault.isdigit():
                message = f"prompt of {len(ids)} tokens, no"
                return int(fault), {"error": {"message": message}}
            if fault == "not JSON":
                return 200, b"<html>"
            if fault == "break":
                return 0, None
            if fault == "hang":
                self.lock.release()
                self.closing.wait(20)
                self.lock.acquire()
                return 0, None
            stop = frozenset(body.get("stop_token_ids", ()))
            (done,) = self.engine.generate([Request("x", ids, body["max_tokens"], stop)])
        return 200, damaged(fault, ids, done.tokens, done.finish)

    def close(self) -> None:
        self.closing.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def damaged(fault: str, prompt: tuple[int, ...], tokens: tuple[int, ...], finish: str) -> Any:
    """The answer's JSON, with a fault in it."""
    choice: dict[str, Any] = {
        "text": "not read",
        "finish_reason": "abort" if fault == "abort" else finish,
        "token_ids": list(tokens),
        "prompt_token_ids": list(prompt),
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
    if fault == "no ids":
        choice |= {"token_ids": None, "prompt_token_ids": None}
    if fault == "other prompt":
        choice["prompt_token_ids"] = [*prompt, 1]
    if fault == "other count":
        usage["prompt_tokens"] += 1
    if fault == "lost token":
        choice["token_ids"] = list(tokens[:-1])
    if fault == "no end":
        choice["finish_reason"] = "stop"
    if fault == "two choices":
        return {"choices": [choice, choice], "usage": usage}
    return {"choices": [choice], "usage": usage}
