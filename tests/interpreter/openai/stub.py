"""A server on loopback that speaks chats and completions, and misbehaves on order."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


class Stub:
    """Writes `text(body)`, in pieces of a word. `orders` come first, one a request: a status, or a word of `answer`."""

    def __init__(self, text: str | Callable[[Body], str] = "fine") -> None:
        self.text: Callable[[Body], str] = text if callable(text) else lambda _: text
        self.orders: list[int | str] = []
        self.always: int | str | None = None
        self.message = "as ordered"
        self.retry_after: str | None = "0"
        self.bodies: list[Body] = []
        self.keys: list[str] = []
        self.running = self.most_running = 0
        self.gone = threading.Event()  # a client went away in the middle of a stream
        self.lock = threading.Lock()
        self.delay_s = 0.0
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stub.lock:
                    stub.bodies.append(body | {"path": self.path})
                    stub.keys.append(self.headers["Authorization"])
                    stub.running += 1
                    stub.most_running = max(stub.running, stub.most_running)
                    order = stub.orders.pop(0) if stub.orders else stub.always
                try:
                    time.sleep(stub.delay_s)
                    stub.answer(self, body, order)
                except (BrokenPipeError, ConnectionResetError):
                    stub.gone.set()
                finally:
                    with stub.lock:
                        stub.running -= 1

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, to: BaseHTTPRequestHandler, body: Body, order: int | str | None) -> None:
        if order == "no response_format" and "response_format" in body:
            order = 400
        if isinstance(order, int):
            _send(to, order, {"error": {"message": self.message, "type": "x"}}, self.retry_after)
        elif order == "hang up":
            to.close_connection = True
            to.connection.close()
        elif order == "no json":
            _raw(to, "data: {what\n\n" if body.get("stream") else "{what")
        elif body.get("echo"):
            _send(to, 200, self._echoed(body, logprobs=order != "no logprobs"), None)
        else:
            self._stream(to, body, order)

    def _stream(self, to: BaseHTTPRequestHandler, body: Body, order: int | str | None) -> None:
        to.send_response(200)
        to.send_header("Content-Type", "text/event-stream")
        to.send_header("Transfer-Encoding", "chunked")
        to.end_headers()
        for count, chunk in enumerate(self._chunks(body, logprobs=order != "no logprobs")):
            if (order, count) in (("cut", 1), ("cut at once", 0)):
                to.close_connection = True
                to.connection.close()
                return
            if order == "end early" and count == 1:
                break
            if order == "slow":
                time.sleep(0.05)
            _chunk(to, f"data: {json.dumps(chunk)}\n\n")
        _chunk(to, "data: [DONE]\n\n")
        _chunk(to, "")

    def _chunks(self, body: Body, *, logprobs: bool) -> Iterator[Body]:
        chat = "messages" in body
        for index in range(body.get("n", 1)):
            tokens = pieces(self.text(body))
            limit = body.get("max_tokens") or body.get("max_completion_tokens")
            text = "".join(tokens[:limit])
            ends = [text.find(stop) for stop in body.get("stop", []) if stop in text]
            finish = "stop" if ends or len(tokens) <= limit else "length"
            told = pieces(text[: min(ends)] if ends else text)
            for piece in told:
                yield _piece(index, piece, chat, None, logprobs and "logprobs" in body)
            yield _piece(index, "", chat, finish, False)
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        yield {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 5}}}

    def _echoed(self, body: Body, *, logprobs: bool) -> Body:
        """The likelier, the more often a token's letters are `a`."""
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            tokens = [*pieces(prompt), " more"]
            offsets = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
            values = [None, *(-1.0 / (1 + token.count("a")) for token in tokens[1:])]
            said = {"tokens": tokens, "token_logprobs": values, "text_offset": offsets, "top_logprobs": None}
            text = prompt + " more"
            choices.append(
                {"index": index, "text": text, "finish_reason": "length", "logprobs": said if logprobs else None}
            )
        return {"choices": choices, "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}}


def pieces(text: str) -> list[str]:
    """The stub's tokens: words with the space before them, and single line ends."""
    return re.findall(r"\n| ?[^ \n]+| ", text)


def _piece(index: int, text: str, chat: bool, finish: str | None, logprobs: bool) -> Body:
    choice: Body = {"index": index, "finish_reason": finish, "logprobs": None}
    if chat:
        choice["delta"] = {"content": text}
        if logprobs:
            top = [{"token": text, "logprob": -0.5, "bytes": None}]
            choice["logprobs"] = {"content": [{"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": top}]}
    else:
        choice["text"] = text
        if logprobs:
            choice["logprobs"] = {"tokens": [text], "token_logprobs": [-0.5], "top_logprobs": [{text: -0.5}]}
    return {"choices": [choice]}


def _send(to: BaseHTTPRequestHandler, status: int, body: Body, retry_after: str | None) -> None:
    data = json.dumps(body).encode()
    to.send_response(status)
    if status >= 400 and retry_after is not None:
        to.send_header("Retry-After", retry_after)
    to.send_header("Content-Type", "application/json")
    to.send_header("Content-Length", str(len(data)))
    to.end_headers()
    to.wfile.write(data)


def _raw(to: BaseHTTPRequestHandler, text: str) -> None:
    to.send_response(200)
    to.send_header("Content-Type", "text/event-stream")
    to.send_header("Content-Length", str(len(text)))
    to.end_headers()
    to.wfile.write(text.encode())


def _chunk(to: BaseHTTPRequestHandler, text: str) -> None:
    data = text.encode()
    to.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    to.wfile.flush()
