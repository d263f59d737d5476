"""A server on 127.0.0.1 that speaks the Hub's HTTP API for kernel repositories, as far as downloads need it.

There are no users, no permissions, no Git LFS and no uploads: `Hub.commit` is what an upload leaves. All
state is in memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Repository:
    branches: dict[str, str] = field(default_factory=dict)  # the newest commit of each
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # files by path


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    endpoint: str = ""

    def commit(self, repo: str, branch: str, files: dict[str, bytes]) -> str:
        repository = self.repositories.setdefault(repo, Repository())
        commit = hashlib.sha1(branch.encode() + b"".join(files.values())).hexdigest()
        repository.commits[commit] = files
        repository.branches[branch] = commit
        return commit

    @contextmanager
    def serve(self) -> Iterator[Hub]:
        handler = type("HubHandler", (Handler,), {"hub": self})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            self.endpoint = f"http://127.0.0.1:{server.server_port}"
            thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


class Failure(Exception):
    """An answer of 404. `code` is the Hub's name of the error."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the output of the tests free of requests."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        try:
            for pattern, answer in ROUTES.items():
                if match := re.fullmatch(pattern, path):
                    groups = {
                        name: unquote(value or "") for name, value in match.groupdict().items()
                    }
                    return answer(self, **groups)
            raise Failure("EntryNotFound", f"no route {self.command} {path}")
        except Failure as failure:
            body = json.dumps({"error": failure.message}).encode()
            self.send(404, body, {"X-Error-Code": failure.code})

    do_HEAD = do_GET

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, content: Any) -> None:
        self.send(200, json.dumps(content).encode(), {})

    def files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]]:
        if repo not in self.hub.repositories:
            raise Failure("RepoNotFound", f"Repository {repo} not found")
        repository = self.hub.repositories[repo]
        commit = repository.branches.get(revision.removeprefix("refs/heads/"), revision)
        if commit not in repository.commits:
            raise Failure("RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def refs(self, repo: str) -> None:
        self.files(repo, "main")
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in self.hub.repositories[repo].branches.items()
        ]
        self.send_json({"branches": branches, "converts": [], "tags": []})

    def information(self, repo: str, revision: str) -> None:
        commit, _ = self.files(repo, revision or "main")
        self.send_json({"id": repo, "sha": commit, "private": False})

    def organization(self, name: str) -> None:
        self.send_json({"name": name, "trustedKernelPublisher": False})

    def tree(self, repo: str, revision: str, folder: str) -> None:
        _, files = self.files(repo, revision)
        recursive = "recursive=true" in urlsplit(self.path).query.lower()
        top = PurePosixPath(folder)
        entries: dict[PurePosixPath, dict[str, Any]] = {}
        for name, content in files.items():
            path = PurePosixPath(name)
            if top in path.parents:
                entries[path] = {"type": "file", "size": len(content), "oid": oid_of(content)}
            for parent in (parent for parent in path.parents if top in parent.parents):
                entries[parent] = {"type": "directory", "oid": oid_of(bytes(parent))}
        self.send_json(
            [
                {"path": str(path), **entry}
                for path, entry in sorted(entries.items())
                if recursive or path.parent == top
            ]
        )

    def resolve(self, repo: str, revision: str, path: str) -> None:
        commit, files = self.files(repo, revision)
        if path not in files:
            raise Failure("EntryNotFound", f"{path} does not exist on {revision}")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{oid_of(files[path])}"'}
        self.send(200, files[path], headers)


def oid_of(content: bytes) -> str:
    """The name of a blob in Git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


ROUTES: dict[str, Callable[..., None]] = {
    f"/api/kernels/{REPOSITORY}/refs": Handler.refs,
    f"/api/kernels/{REPOSITORY}(/revision/(?P<revision>[^/]+))?": Handler.information,
    r"/api/organizations/(?P<name>[\w.-]+)/overview": Handler.organization,
    f"/api/kernels/{REPOSITORY}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?": Handler.tree,
    f"/kernels/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)": Handler.resolve,
}
