"""Fetching a slice: resumable, bounded, checked end to end before the engine sees it.

A download goes to ``<file>.part`` with ``<file>.part.json`` beside it (URL, total size, digest header), so that a
resumed one continues only the very same bytes. The finished file is checked by ``engine.checkpoint.shard`` against
what was asked for, tensor by tensor, and renamed into place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shard import verify_shard, verify_stage
from kvasir_console.errors import ModelError, NetworkError, SystemResourceError
from kvasir_console.node.market import Assignment, unreachable

Progress = Callable[[int, int | None], None]
ATTEMPTS = 3
DIGEST_HEADER = "x-kvasir-shard-digest"
_CHUNK_BYTES = 256 * 1024


def expert_shard_file(directory: Path, assignment: Assignment) -> Path:
    """The cache path of an expert shard (contract section 5)."""
    name = f"L{assignment.layer}_e{assignment.begin:03d}-{assignment.end:03d}.gguf"
    return directory / assignment.model / name


def stage_file(directory: Path, model: str, begin: int, end: int) -> Path:
    return directory / model / f"layers_{begin:03d}-{end:03d}.gguf"


async def fetch_expert_shard(
    client: httpx.AsyncClient,
    token: str,
    directory: Path,
    assignment: Assignment,
    *,
    budget_bytes: int,
    progress: Progress,
) -> Path:
    """The verified shard of an assignment, from the cache or the gateway.

    Raises:
        NetworkError: the gateway cannot be reached or cut the download short three times.
        ModelError: the bytes are not what was asked for; the file is removed.
        SystemResourceError: it would not fit the memory budget or the disk.
    """
    target = expert_shard_file(directory, assignment)
    path = f"/api/proxy/models/{assignment.model}/expert-shard"
    query = {
        "layer": str(assignment.layer),
        "expert_begin": str(assignment.begin),
        "expert_end": str(assignment.end),
    }

    def verify(file: Path) -> None:
        with Checkpoint.open(file) as checkpoint:
            verify_shard(
                checkpoint,
                model=assignment.model,
                layer=assignment.layer,
                begin=assignment.begin,
                end=assignment.end,
                n_embd=assignment.n_embd,
            )

    return await _fetch(client, token, path, query, target, verify, budget_bytes, progress)


async def fetch_stage(
    client: httpx.AsyncClient,
    token: str,
    directory: Path,
    *,
    model: str,
    model_digest: str,
    begin: int,
    end: int,
    budget_bytes: int,
    progress: Progress,
) -> Path:
    """The verified window of layers [begin, end) that a signed plan assigned."""
    target = stage_file(directory, model, begin, end)
    query = {"layer_begin": str(begin), "layer_end": str(end)}

    def verify(file: Path) -> None:
        with Checkpoint.open(file) as checkpoint:
            verify_stage(checkpoint, model=model, begin=begin, end=end, model_digest=bytes.fromhex(model_digest))

    path = f"/api/proxy/models/{model}/stage"
    return await _fetch(client, token, path, query, target, verify, budget_bytes, progress)


async def _fetch(
    client: httpx.AsyncClient,
    token: str,
    path: str,
    query: dict[str, str],
    target: Path,
    verify: Callable[[Path], None],
    budget_bytes: int,
    progress: Progress,
) -> Path:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if target.exists():
        try:
            await asyncio.to_thread(verify, target)
            return target
        except ModelError:
            target.unlink()  # another model under the same name, or a damaged disk: fetch it anew
    part = target.with_name(target.name + ".part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await _download(client, token, path, query, part, budget_bytes, progress)
            break
        except NetworkError as error:
            if attempt == ATTEMPTS or error.code == "shard_refused":
                raise
            await asyncio.sleep(attempt)
    try:
        await asyncio.to_thread(verify, part)
    except ModelError:
        part.unlink(missing_ok=True)
        raise
    finally:
        _note(part).unlink(missing_ok=True)
    os.replace(part, target)
    return target


async def _download(
    client: httpx.AsyncClient,
    token: str,
    path: str,
    query: dict[str, str],
    part: Path,
    budget_bytes: int,
    progress: Progress,
) -> None:
    """Bring ``part`` to its full length, continuing what is there if the server still has the same bytes."""
    note = _read_note(part)
    begin = part.stat().st_size if note and part.exists() else 0
    headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
    if begin and note:
        headers["Range"] = f"bytes={begin}-"
        if note.get("etag"):
            headers["If-Range"] = note["etag"]
    try:
        async with client.stream("GET", path, params=query, headers=headers) as response:
            if response.status_code == 416:
                part.unlink(missing_ok=True)
                raise NetworkError("download_restarted", "The partial download no longer fits; it starts again.")
            if response.status_code not in (200, 206):
                raise NetworkError(
                    "shard_refused",
                    f"The gateway answered {path} with {response.status_code}.",
                    "The market is asked for another slice.",
                )
            digest = response.headers.get(DIGEST_HEADER, "")
            resumed = response.status_code == 206 and note is not None and note.get("digest") == digest
            if response.status_code == 206 and not resumed:
                part.unlink(missing_ok=True)
                raise NetworkError("download_restarted", "The gateway now offers other bytes; it starts again.")
            length = int(response.headers.get("content-length", "0") or 0)
            total = length + (begin if resumed else 0)
            if not length:
                raise NetworkError("no_length", f"The gateway sent {path} without a length.")
            _check_room(part, total, budget_bytes)
            etag = response.headers.get("etag", "")
            _note(part).write_text(json.dumps({"digest": digest, "etag": etag, "total": total}))
            done = begin if resumed else 0
            with part.open("ab" if resumed else "wb") as file:
                async for chunk in response.aiter_raw(_CHUNK_BYTES):
                    done += len(chunk)
                    if done > total:
                        raise NetworkError("too_many_bytes", "The gateway sent more bytes than it announced.")
                    file.write(chunk)
                    progress(done, total)
                file.flush()
                os.fsync(file.fileno())
            if done != total:
                raise NetworkError("download_cut", f"The download stopped at {done} of {total} bytes.")
    except httpx.HTTPError as error:
        raise unreachable(str(client.base_url), error) from error


def _check_room(part: Path, total: int, budget_bytes: int) -> None:
    if total > budget_bytes:
        raise SystemResourceError(
            "slice_too_large",
            f"The slice has {total / 2**20:.0f} MiB; the memory budget is {budget_bytes / 2**20:.0f} MiB.",
            "Raise node.memory_budget_mib or lower node.max_experts.",
        )
    free = shutil.disk_usage(part.parent).free
    if total > free:
        raise SystemResourceError(
            "disk_full",
            f"The slice needs {total / 2**20:.0f} MiB; {free / 2**20:.0f} MiB are free in {part.parent}.",
            "Free some space or move the cache (KVASIR_CACHE).",
        )


def _note(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_note(part: Path) -> dict[str, str] | None:
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(_note(part).read_text())
        if isinstance(note, dict):
            return note
    return None
