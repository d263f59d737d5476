"""A server on 127.0.0.1 that speaks the Hub's HTTP API for kernel repositories.

It has what huggingface_hub and `kernels` call to publish and load a kernel: repositories, branches, commits,
Git LFS, file trees and downloads. There are no users, no permissions and no Xet. All state is in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from threading import Lock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = r"(?P<repo>[\w.-]+/[\w.-]+)"
LFS_SUFFIXES = (".so",)
FIRST_COMMIT = "0" * 40


@dataclass(frozen=True)
class File:
    """Of a commit. `lfs` is what the LFS pointer holds: the digest and the size that the client gave."""

    content: bytes = b""
    lfs: tuple[str, int] | None = None

    @property
    def oid(self) -> str:
        """The name of a blob in Git."""
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repository:
    branches: dict[str, str] = field(default_factory=lambda: {"main": FIRST_COMMIT})
    commits: dict[str, dict[str, File]] = field(default_factory=lambda: {FIRST_COMMIT: {}})

    def commit_of(self, revision: str) -> str | None:
        commit = self.branches.get(revision.removeprefix("refs/heads/"), revision)
        return commit if commit in self.commits else None


@dataclass
class Hub:
    """The state of the server, and the faults that it makes."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # of LFS, by SHA-256
    uploads: int = 0
    dropped_uploads: int = 0  # the next uploads, whose connection is closed
    store: Callable[[bytes], bytes] = bytes  # what is stored of an upload
    verifies: bool = True  # whether a wrong size is reported after an upload
    lock: Lock = field(default_factory=Lock)
    endpoint: str = ""

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
    """An answer other than 200. `code` is the Hub's name of the error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message


ROUTES: list[tuple[str, re.Pattern[str], str]] = []


def route(method: str, path: str) -> Callable:
    def add(function: Callable) -> Callable:
        ROUTES.append((method, re.compile(path), function.__name__))
        return function

    return add


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the output of the tests free of requests."""

    def answer(self) -> None:
        path = urlsplit(self.path).path
        try:
            for method, pattern, name in ROUTES:
                match = pattern.fullmatch(path)
                if match and self.command == method:
                    groups = {key: unquote(value or "") for key, value in match.groupdict().items()}
                    with self.hub.lock:
                        result = getattr(self, name)(**groups)
                    if result is not None:
                        self.send(200, json.dumps(result).encode())
                    return
            raise Failure(404, "EntryNotFound", f"no route {self.command} {path}")
        except Failure as failure:
            body = json.dumps({"error": failure.message}).encode()
            self.send(failure.status, body, {"X-Error-Code": failure.code})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        """Of a length that is known, or in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def repository(self, repo: str) -> Repository:
        if repo not in self.hub.repositories:
            raise Failure(404, "RepoNotFound", f"Repository {repo} not found")
        return self.hub.repositories[repo]

    def files(self, repo: str, revision: str) -> tuple[str, dict[str, File]]:
        repository = self.repository(repo)
        commit = repository.commit_of(revision)
        if commit is None:
            raise Failure(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    # -- Repositories and branches -------------------------------------------------------------

    @route("POST", "/api/repos/create")
    def create_repository(self) -> dict | None:
        asked = json.loads(self.body())
        if asked.get("type") != "kernel":
            raise Failure(400, "BadRequest", "This server has kernel repositories only")
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repositories:
            url = f"{self.hub.endpoint}/kernels/{name}"
            self.send(409, json.dumps({"error": "You already created this", "url": url}).encode())
            return None
        self.hub.repositories[name] = Repository()
        return {"url": f"{self.hub.endpoint}/kernels/{name}"}

    @route("GET", f"/api/kernels/{REPOSITORY}/refs")
    def refs(self, repo: str) -> dict:
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in self.repository(repo).branches.items()
        ]
        return {"branches": branches, "converts": [], "tags": []}

    @route("POST", f"/api/kernels/{REPOSITORY}/branch/(?P<branch>[^/]+)")
    def create_branch(self, repo: str, branch: str) -> dict:
        start = json.loads(self.body() or b"{}").get("startingPoint", "main")
        commit, _ = self.files(repo, start)
        self.repository(repo).branches[branch] = commit
        return {}

    @route("GET", f"/api/kernels/{REPOSITORY}(/revision/(?P<revision>[^/]+))?")
    def information(self, repo: str, revision: str) -> dict:
        commit, _ = self.files(repo, revision or "main")
        return {"id": repo, "sha": commit, "private": False}

    @route("GET", r"/api/organizations/(?P<name>[\w.-]+)/overview")
    def organization(self, name: str) -> dict:
        return {"name": name, "trustedKernelPublisher": False}

    # -- Uploads -------------------------------------------------------------------------------

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self) -> dict:
        self.body()
        return {"errors": [], "warnings": []}

    @route("POST", f"/api/kernels/{REPOSITORY}/preupload/(?P<revision>[^/]+)")
    def upload_modes(self, repo: str, revision: str) -> dict:
        asked = json.loads(self.body())["files"]
        _, files = self.files(repo, revision)
        modes = []
        for path in (entry["path"] for entry in asked):
            known = files.get(path)
            oid = known and (known.lfs[0] if known.lfs else known.oid)
            mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
            modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": modes}

    @route("POST", rf"/kernels/{REPOSITORY}\.git/info/lfs/objects/batch")
    def lfs_batch(self, repo: str) -> dict:
        self.repository(repo)
        objects = json.loads(self.body())["objects"]
        for entry in (entry for entry in objects if entry["oid"] not in self.hub.objects):
            url = f"{self.hub.endpoint}/lfs/{entry['oid']}"
            entry["actions"] = {"upload": {"href": url}, "verify": {"href": f"{url}/verify"}}
        return {"transfer": "basic", "objects": objects}

    @route("PUT", "/lfs/(?P<oid>[0-9a-f]{64})")
    def upload(self, oid: str) -> dict | None:
        self.hub.uploads += 1
        if self.hub.dropped_uploads:
            self.hub.dropped_uploads -= 1
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return None
        self.hub.objects[oid] = self.hub.store(self.body())
        return {}

    @route("POST", "/lfs/(?P<oid>[0-9a-f]{64})/verify")
    def verify_upload(self, oid: str) -> dict:
        expected, size = json.loads(self.body())["size"], len(self.hub.objects[oid])
        if self.hub.verifies and size != expected:
            raise Failure(
                400, "BadRequest", f"The object has {size} bytes, {expected} were announced"
            )
        return {}

    @route("POST", f"/api/kernels/{REPOSITORY}/commit/(?P<revision>[^/]+)")
    def commit(self, repo: str, revision: str) -> dict:
        content = self.body()
        parent, files = self.files(repo, revision)
        files = dict(files)
        for line in content.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Failure(400, "BadRequest", f"There is no LFS object {value['oid']}")
                files[value["path"]] = File(lfs=(value["oid"], value["size"]))
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        commit = hashlib.sha1(parent.encode() + content).hexdigest()
        repository = self.repository(repo)
        repository.commits[commit] = files
        repository.branches[revision] = commit
        return {"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{commit}", "commitOid": commit}

    # -- Downloads -----------------------------------------------------------------------------

    @route("GET", f"/api/kernels/{REPOSITORY}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?")
    def tree(self, repo: str, revision: str, folder: str) -> list:
        _, files = self.files(repo, revision)
        recursive = "recursive=true" in urlsplit(self.path).query.lower()
        top = PurePosixPath(folder)
        entries = {}
        for name, file in files.items():
            path = PurePosixPath(name)
            if top not in path.parents:
                continue
            entries[path] = {"type": "file", "size": len(file.content), "oid": file.oid}
            if file.lfs:
                oid, size = file.lfs
                entries[path] |= {
                    "size": size,
                    "lfs": {"oid": oid, "size": size, "pointerSize": 130},
                }
            for parent in path.parents:
                if top in parent.parents:
                    oid = hashlib.sha1(bytes(parent)).hexdigest()
                    entries[parent] = {"type": "directory", "oid": oid}
        return [
            {"path": str(path), **entry}
            for path, entry in sorted(entries.items())
            if recursive or path.parent == top
        ]

    @route("HEAD", f"/kernels/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
    @route("GET", f"/kernels/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
    def resolve(self, repo: str, revision: str, path: str) -> None:
        commit, files = self.files(repo, revision)
        if path not in files:
            raise Failure(404, "EntryNotFound", f"{path} does not exist on {revision}")
        file = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file.oid}"'}
        content = file.content
        if file.lfs:
            oid, size = file.lfs
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(size)}
            content = self.hub.objects[oid]
        self.send(200, content, headers)
