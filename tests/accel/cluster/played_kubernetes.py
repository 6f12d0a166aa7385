"""An API server in this process with the few calls that the actuator makes, and pods that end when a test says so.

It answers as the real one does: 404 with a Status, 409 for a name that is there, 422 for what its rules forbid, and a
Job that is deleted in the foreground is there until its pods have ended.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Object = dict[str, Any]


class PlayedKubernetes:
    """What the server holds."""

    def __init__(self, gpus: dict[str, int], kinds: dict[str, str] | None = None) -> None:
        self.gpus, self.kinds = gpus, kinds or {}
        self.objects: dict[str, Object] = {}
        """By path."""
        self.calls: list[str] = []
        self.deleting: dict[str, int] = {}
        """How often a Job that is deleted is still seen."""
        self.fails = 0
        """Status that every call is answered with; 0 for none."""
        self.url = ""

    def nodes(self) -> Object:
        ready = [{"type": "Ready", "status": "True"}]
        items = [
            {
                "metadata": {
                    "name": name,
                    "labels": {"nvidia.com/gpu.product": self.kinds[name]} if name in self.kinds else {},
                },
                "spec": {},
                "status": {"allocatable": {"nvidia.com/gpu": str(count), "cpu": "3920m"}, "conditions": ready},
            }
            for name, count in self.gpus.items()
        ]
        return {"kind": "NodeList", "apiVersion": "v1", "items": items}

    def answer(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        self.calls.append(f"{method} {path}")
        if self.fails:
            return self.fails, status(self.fails, "failed by the test")
        if path == "/api/v1/nodes":
            return 200, self.nodes()
        if method == "POST":
            return self.create(f"{path}/{body['metadata']['name']}", body)
        if path not in self.objects:
            return 404, status(404, f"{path} not found")
        there = self.objects[path]
        if method == "PATCH":
            spec = body["spec"]
            if spec["parallelism"] != spec["completions"]:
                return 422, status(422, "completions: Invalid value: field is immutable")
            there["spec"].update(spec)
        elif method == "DELETE":
            self.deleting[path] = 2
        elif path in self.deleting:
            self.deleting[path] -= 1
            if not self.deleting[path]:
                self.remove(path)
        return 200, there

    def create(self, path: str, body: Object) -> tuple[int, Object]:
        if path in self.objects:
            return 409, status(409, f"{path} already exists")
        body["metadata"]["uid"] = f"uid-{len(self.calls)}"
        body.setdefault("status", {})
        self.objects[path] = body
        return 201, body

    def remove(self, path: str) -> None:
        """Remove a Job, and what it owns."""
        uid = self.objects.pop(path)["metadata"]["uid"]
        owned = [each for each, body in self.objects.items() if uid in str(body["metadata"].get("ownerReferences"))]
        for each in owned:
            del self.objects[each]
        del self.deleting[path]

    def job(self, name: str) -> Object:
        return self.objects[f"/apis/batch/v1/namespaces/default/jobs/{name}"]

    def ends(self, name: str, condition: str) -> None:
        self.job(name)["status"] = {"conditions": [{"type": condition, "status": "True"}]}


def status(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


@contextmanager
def served(played: PlayedKubernetes) -> Iterator[Any]:
    """Serve it; yield a client."""
    from kubernetes import client

    class Handler(BaseHTTPRequestHandler):
        def handle_one(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else {}
            code, answer = played.answer(self.command, self.path.partition("?")[0], body)
            text = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    for method in ("GET", "POST", "PATCH", "DELETE"):
        setattr(Handler, f"do_{method}", Handler.handle_one)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    played.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield client.ApiClient(client.Configuration(host=played.url, retries=False))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
