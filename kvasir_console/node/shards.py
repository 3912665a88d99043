"""Fetching a slice: resumable, bounded, checked end to end before the engine sees it.

A download goes to ``<file>.part`` with ``<file>.part.json`` beside it (total size, digest header, ETag), so that a
resumed one continues only the very same bytes; without a digest or ETag it begins anew. The finished file is checked
by ``engine.checkpoint.shard`` against what was asked for, tensor by tensor, and renamed into place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shard import verify_shard, verify_stage
from kvasir_console.errors import ModelError, NetworkError, SystemResourceError, WalletError
from kvasir_console.node.market import Assignment, unreachable

Progress = Callable[[int, int | None], None]
ATTEMPTS = 3
RETRY_PAUSE_S = 1.0
"""Pause after the first failed attempt; it grows by as much after each further one."""
DIGEST_HEADER = "x-kvasir-shard-digest"


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
        WalletError: the gateway refused the token.
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
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if await _cached(target, verify, budget_bytes):
            return target
        part = target.with_name(target.name + ".part")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await _download(client, token, path, query, part, budget_bytes, progress)
                break
            except NetworkError as error:
                if attempt == ATTEMPTS or error.code == "shard_refused":
                    raise
                await asyncio.sleep(attempt * RETRY_PAUSE_S)
        try:
            await asyncio.to_thread(verify, part)
        except ModelError:
            part.unlink(missing_ok=True)
            raise
        finally:
            _note(part).unlink(missing_ok=True)
        os.replace(part, target)
    except OSError as error:
        raise SystemResourceError(
            "slice_not_written",
            f"The slice cannot be kept in {target.parent}: {error.strerror or error}.",
            "Check the disk, or move the cache (KVASIR_CACHE).",
        ) from error
    return target


async def _cached(target: Path, verify: Callable[[Path], None], budget_bytes: int) -> bool:
    """Whether ``target`` is there and good; a bad one is removed."""
    if not target.exists():
        return False
    try:
        await asyncio.to_thread(verify, target)
    except ModelError:
        target.unlink()  # another model under the same name, or a damaged disk: fetch it anew
        return False
    _check_budget(target.stat().st_size, budget_bytes)
    return True


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
    known = _read_note(part)
    begin = part.stat().st_size if known and part.exists() else 0
    headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
    if known and begin == known.total:
        return  # all there; the program ended before it was verified
    if known and begin:
        headers["Range"] = f"bytes={begin}-"
        if known.etag:
            headers["If-Range"] = known.etag
    try:
        async with client.stream("GET", path, params=query, headers=headers) as response:
            _check_status(path, response.status_code, part)
            length = response.headers.get("content-length", "")
            if not re.fullmatch(r"[0-9]{1,15}", length) or not int(length):
                raise NetworkError("no_length", f"The gateway sent {path} without a length.")
            done = begin if response.status_code == 206 else 0
            etag = response.headers.get("etag", "")
            offered = _Note(
                digest=response.headers.get(DIGEST_HEADER, ""),
                etag="" if etag.startswith("W/") else etag,  # a weak one does not promise equal bytes
                total=done + int(length),
            )
            if response.status_code == 206 and not _continues(response, begin, known, offered):
                part.unlink(missing_ok=True)
                raise NetworkError("download_restarted", "The gateway now offers other bytes; it starts again.")
            _check_budget(offered.total, budget_bytes)
            _check_disk(part, int(length))
            _note(part).write_text(json.dumps(asdict(offered)))
            with part.open("ab" if done else "wb") as file:
                async for chunk in response.aiter_raw():  # a chunk size would keep back, and lose, the last bytes
                    done += len(chunk)
                    if done > offered.total:
                        raise NetworkError("too_many_bytes", "The gateway sent more bytes than it announced.")
                    file.write(chunk)
                    progress(done, offered.total)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            if done != offered.total:
                raise NetworkError("download_cut", f"The download stopped at {done} of {offered.total} bytes.")
    except httpx.HTTPError as error:
        raise unreachable(str(client.base_url), error) from error


def _check_status(path: str, status: int, part: Path) -> None:
    if status == 401:
        raise WalletError("token_refused", "The gateway refused this node's token for a download.")
    if status == 416:
        part.unlink(missing_ok=True)
        raise NetworkError("download_restarted", "The partial download no longer fits; it starts again.")
    if status in (429, 502, 503, 504):
        raise NetworkError("shard_unavailable", f"The gateway answered {path} with {status}.")
    if status not in (200, 206):
        raise NetworkError(
            "shard_refused",
            f"The gateway answered {path} with {status}.",
            "The market is asked for another slice.",
        )


def _continues(response: httpx.Response, begin: int, known: _Note | None, offered: _Note) -> bool:
    """Whether a partial answer goes on where the kept bytes end, in the same file."""
    if known is None or not begin or known.total != offered.total:
        return False
    same = known.digest == offered.digest if known.digest else bool(known.etag) and known.etag == offered.etag
    return same and response.headers.get("content-range", "").startswith(f"bytes {begin}-")


def _check_budget(total: int, budget_bytes: int) -> None:
    if total > budget_bytes:
        raise SystemResourceError(
            "slice_too_large",
            f"The slice has {total / 2**20:.0f} MiB; the memory budget is {budget_bytes / 2**20:.0f} MiB.",
            "Raise node.memory_budget_mib or lower node.max_experts.",
        )


def _check_disk(part: Path, missing: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if missing > free:
        raise SystemResourceError(
            "disk_full",
            f"The slice needs {missing / 2**20:.0f} MiB; {free / 2**20:.0f} MiB are free in {part.parent}.",
            "Free some space or move the cache (KVASIR_CACHE).",
        )


@dataclass(frozen=True, slots=True)
class _Note:
    """What is known of a file that is only partly here; kept beside it."""

    digest: str
    etag: str
    total: int


def _note(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_note(part: Path) -> _Note | None:
    """``None`` if nothing proves that more bytes would belong to the same file."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        note = _Note(**json.loads(_note(part).read_text()))
        if (note.digest or note.etag) and type(note.total) is int:
            return note
    return None
