"""Configuration: flag > environment > file > default, every key known by name.

The file is TOML (``Paths.config_file``). An environment variable is ``KVASIR_<SECTION>_<KEY>``. A key that does not
exist is refused with the nearest one that does, so a misspelt limit never silently means "no limit"; a value that
makes no sense is refused too.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import parse_qsl, urlsplit

from kvasir_console.errors import ConfigError

RESERVED_ENVIRONMENT = frozenset({"KVASIR_HOME", "KVASIR_CACHE", "KVASIR_KERNELS", "KVASIR_TEST_CACHE"})
"""Variables that move files (``paths``, and the test suite's checkpoints); they are no settings."""


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    gateway: str = "https://gate.kvasir-ai.net"
    """The one destination this node dials. Plain http and ws are accepted for loopback hosts only."""
    ca_file: str = ""
    """PEM file with an extra certificate authority to trust (empty: the system's)."""
    request_timeout_s: float = 20.0
    redial_min_s: float = 5.0
    redial_max_s: float = 60.0


@dataclass(frozen=True, slots=True)
class NodeConfig:
    name: str = ""
    """Part of the worker id; empty means this machine's host name."""
    serve: str = "auto"
    """``auto`` (a plan's window if one names this wallet, else experts), ``experts``, ``ring`` or ``nothing``."""
    model: str = ""
    """Serve only this model (empty: whatever the market offers)."""
    max_experts: int = 64
    """Most experts to take in one assignment."""
    max_slices: int = 1
    """Most layers to hold experts of; more than one where the gateway speaks dispatch v3."""
    memory_budget_mib: int = 0
    """Most memory for weights (0: half of what is free)."""
    poll_s: float = 45.0
    """Market poll and coverage heartbeat; the gateway forgets a node after 120 s."""
    retry_s: float = 15.0
    direct: bool = False
    """Edges of a ring may go straight to a neighbour that listens, past the relay; both then learn each other's
    address."""
    direct_listen: str = ""
    """``HOST:PORT`` on which neighbours are listened for (empty: nothing listens)."""
    direct_address: str = ""
    """``HOST:PORT`` under which they reach it (empty: as ``direct_listen``)."""
    auto_claim: bool = False
    """Claim as soon as the gateway's minimum is reached, while the wallet is unlocked."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    device: str = "cpu"
    """Where layers are held and computed, as torch names it: ``cpu``, ``cuda``, ``cuda:1``, ``mps``."""
    expert_device: str = ""
    """Where routed experts are, if not there: ``cpu`` keeps them in memory beside a small accelerator."""
    threads: int = 0
    """Compute threads (0: one for each physical core)."""
    kernels: str = "auto"
    """``auto`` (compiled where that can be had and is not slower), ``native`` (compiled, or refuse to load), ``eager``
    (plain torch) or ``reference`` (exact single precision, slow)."""
    kv_type: str = "f32"
    """A cached key or value: ``f32``, ``f16``, ``bf16`` or ``q8_0``, smaller and a little less exact in this order."""
    kv_budget_mib: int = 0
    """Most memory for the keys and values of one model's requests; who does not fit in it waits (0: half of what is
    free when the model is loaded; models of one gateway share that half)."""
    context_length: int = 0
    """Longest request in tokens (0: the model's own, capped at 8192)."""
    dispatch_timeout_s: float = 10.0
    """How long the router waits for a remote expert before it computes the pairs itself."""

    @property
    def kv_budget_bytes(self) -> int:
        """``kv_budget_mib`` in bytes."""
        return self.kv_budget_mib * 2**20


@dataclass(frozen=True, slots=True)
class WalletConfig:
    rpc_url: str = "https://api.devnet.solana.com"
    rpc_auth_file: str = ""
    """File with the value of the ``Authorization`` header for the RPC (the embedded ledger needs one)."""
    rpc_fallbacks: str = ""
    """More RPCs of the same cluster, separated by spaces, for when the first does not answer. They get no header."""
    commitment: str = "confirmed"
    """When a transaction counts: ``processed``, ``confirmed`` or ``finalized`` (some 13 s later, and never undone)."""
    priority_micro_lamports: int = 0
    """Offered for each compute unit on top of the fee (0: nothing); a transfer asks for 200,000 units at most."""
    mint: str = "6cuJAmqtMuGzJ7s7eWQSqfJvEFRUdTiYR3cuMmiNoCPQ"
    kdf: str = "moderate"
    """Cost of the vault's argon2id: ``interactive`` (64 MiB), ``moderate`` (256 MiB) or ``sensitive`` (1 GiB)."""
    idle_lock_s: float = 0.0
    """Lock the wallet of a running node after so many seconds without a signature (0: never)."""
    keyring: bool = False
    """Let ``wallet unlock`` and its kin ask the desktop's key ring for the passphrase, once it was kept there."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    id: str = ""
    path: str = ""
    placement: str = "trunk"
    """``trunk`` (this machine computes every layer and may dispatch experts) or ``ring`` (a plan's stages do)."""
    ring: tuple[tuple[str, int, int], ...] = ()
    """For a ring: (wallet, first layer, end layer) of each stage, in order."""
    replicas: tuple[tuple[str, ...], ...] = ()
    """For a ring: by stage, the wallets that stand by for it. In the file they follow the stage's layers."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    host: str = "127.0.0.1"
    port: int = 8791
    tls_cert: str = ""
    tls_key: str = ""
    upstream: str = ""
    """Be a public front only, and pass everything on to the gateway at this ``https://host:port`` in the LAN."""
    database: str = ""
    """SQLAlchemy URL (empty: SQLite in the data directory). One with a password only in a file of mode 0600."""
    models: tuple[ServedModel, ...] = ()
    target_replicas: int = 2
    minimum_claim_micro_kvr: int = 1_000_000
    bonus_wallets: str = ""
    """Wallets whose nodes host the network's gateway, separated by spaces: their work counts one and a half times."""
    settlement_poll_s: float = 30.0
    service_token_file: str = ""
    """File with the machine-to-machine token; made on first start when empty."""
    max_requests: int = 8
    """Requests of one model that run at once; as many as ``max_waiting`` more wait for their turn."""
    max_waiting: int = 16
    standby_grace_s: float = 60.0
    """How long the node of a ring's window may be gone before a wallet that stands by for it takes over (0: for ever).
    Requests wait for 120 s, what the standby takes to load included."""
    dispatch_wire: str = "v3"
    """Wire asked of workers that speak it: ``v3``, ``v2`` (f32, exact), ``v2f16`` or ``v1``."""
    dispatch_dtype: str = "f32"
    """What ``v3`` writes hidden states in: ``f32`` (exact), ``f16``, ``bf16`` or ``int8`` (a quarter of the bytes)."""
    dispatch: str = "always"
    """When experts are computed by workers: ``always`` (whenever one holds them) or ``elastic`` (under load only)."""
    dispatch_busy_streams: int = 4
    """So many streams at once are load."""
    dispatch_hot_experts: int = 0
    """So many of a layer's most wanted experts are always computed here."""
    dispatch_trial_pairs: int = 32
    """Pairs of a new worker that are all computed here too, before it is trusted and paid."""
    dispatch_check_share: float = 0.01
    """Part of a trusted worker's pairs that are computed a second time."""

    def dispatch_policy(self) -> dict[str, Any]:
        """The ``dispatch_*`` settings as an engine's ``load`` takes them."""
        return {
            "dispatch": self.dispatch,
            "busy_streams": self.dispatch_busy_streams,
            "hot_experts": self.dispatch_hot_experts,
            "trial_pairs": self.dispatch_trial_pairs,
            "check_share": self.dispatch_check_share,
        }


@dataclass(frozen=True, slots=True)
class Config:
    network: NetworkConfig = field(default_factory=NetworkConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    wallet: WalletConfig = field(default_factory=WalletConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)


def load(
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Config:
    """Read the configuration.

    Args:
        file: TOML file; one that does not exist counts as empty.
        env: environment, default ``os.environ``.
        flags: ``"section.key"`` to text, as given by ``--set section.key=value``.

    Raises:
        ConfigError: unreadable file, unknown section or key (with the nearest name), or a value of the wrong type.
    """
    env = os.environ if env is None else env
    tables: dict[str, dict[str, Any]] = {section.name: {} for section in fields(Config)}
    for section, table in ({} if file is None else _read(file)).items():
        _check_name(section, tables, "section", str(file))
        if not isinstance(table, dict):
            raise ConfigError("config_not_a_table", f"{file}: [{section}] must be a table of keys and values.")
        for key, value in table.items():
            where = f"{file} [{section}]"
            _check_name(key, _types(section), "key", where)
            tables[section][key] = _coerce(_types(section)[key], value, f"{where} {key}")
            if f"{section}.{key}" in _MAY_HOLD_PASSWORDS and has_password(value) and file is not None:
                _check_private(file, f"{where} {key}")
            _check_value(f"{section}.{key}", tables[section][key], where)
    for variable, dotted in set_by_environment(env).items():
        section, _, key = dotted.partition(".")
        _set_from_text(tables, section, key, env[variable], f"environment variable {variable}")
    for dotted, text in (flags or {}).items():
        section, _, key = dotted.partition(".")
        _set_from_text(tables, section, key, text, f"flag --set {dotted}")
    loaded = Config(**{section.name: _SECTIONS[section.name](**tables[section.name]) for section in fields(Config)})
    _check_together(loaded)
    return loaded


def set_by_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of ``env`` that are settings, with the name ``section.key`` of each."""
    names = (name for name in env if name.startswith("KVASIR_") and name not in RESERVED_ENVIRONMENT)
    return {name: ".".join(name.removeprefix("KVASIR_").lower().split("_", 1)) for name in names}


def value_of(config: Config, name: str) -> Any:
    """The value of ``section.key``; ``None`` if there is no such setting."""
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key) if section in _SECTIONS and key in _types(section) else None


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError("config_unreadable", f"{file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config_malformed", f"{file} is not TOML: {error}.", "Correct that line.") from error


def _types(section: str) -> dict[str, Any]:
    return get_type_hints(_SECTIONS[section])


def _check_name(name: str, known: Mapping[str, Any], what: str, source: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"It is one of: {', '.join(known)}."
    if not name:
        raise ConfigError(f"unknown_{what}", f"{source} names no {what}.", hint)
    raise ConfigError(f"unknown_{what}", f"{source}: there is no {what} named {name!r}.", hint)


def _check_value(name: str, value: Any, source: str) -> None:
    """``name`` is ``section.key``."""
    choices = _CHOICES.get(name)
    if choices and value not in choices:
        raise ConfigError(
            "bad_value", f"{source}: {name} cannot be {value!r}.", f"It is one of: {', '.join(map(repr, choices))}."
        )
    if type(value) in (int, float):
        low, high = _BOUNDS.get(name, (0, math.inf))
        if not low <= value <= high or value == math.inf:  # NaN compares false
            limit = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise ConfigError("bad_value", f"{source}: {name} cannot be {value!r}.", f"It must be {limit}.")


def _check_together(loaded: Config) -> None:
    """What values that are right by themselves can still get wrong about each other."""
    network, gateway = loaded.network, loaded.gateway
    if network.redial_min_s > network.redial_max_s:
        raise ConfigError(
            "bad_value",
            f"network.redial_min_s ({network.redial_min_s:g}) is more than network.redial_max_s "
            f"({network.redial_max_s:g}).",
            "Lower the one or raise the other.",
        )
    if bool(gateway.tls_cert) != bool(gateway.tls_key):
        missing = "gateway.tls_key" if gateway.tls_cert else "gateway.tls_cert"
        raise ConfigError("bad_value", f"TLS needs a certificate and its key: {missing} is not set.", "Set both.")


def _set_from_text(tables: Mapping[str, dict[str, Any]], section: str, key: str, text: str, source: str) -> None:
    _check_name(section, tables, "section", source)
    _check_name(key, _types(section), "key", source)
    if f"{section}.{key}" in _MAY_HOLD_PASSWORDS and has_password(text):
        raise ConfigError(
            "password_exposed",
            f"{source} holds a password, where other programs can see it.",
            "Set it in the configuration file (mode 0600), or leave the password to PostgreSQL's own ~/.pgpass.",
        )
    tables[section][key] = _from_text(section, key, text, source)
    _check_value(f"{section}.{key}", tables[section][key], source)


def _coerce(wanted: Any, value: Any, where: str) -> Any:
    if wanted is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if wanted in (int, float, str, bool):
        if type(value) is not wanted:
            raise ConfigError("wrong_type", f"{where} must be a {wanted.__name__}, not {type(value).__name__}.")
        return value
    return _served_models(value, where)


def _served_models(value: Any, where: str) -> tuple[ServedModel, ...]:
    if not isinstance(value, list):
        raise ConfigError("wrong_type", f"{where} must be an array of tables ([[gateway.models]]).")
    known = {each.name: each for each in dataclasses.fields(ServedModel)}
    models: list[ServedModel] = []
    for entry in value:
        if not isinstance(entry, dict):
            raise ConfigError("wrong_type", f"{where} must be an array of tables ([[gateway.models]]).")
        for key in entry:
            _check_name(key, known, "key", where)
        if "replicas" in entry:
            raise ConfigError("unknown_key", f"{where}: wallets that stand by follow a stage's layers in ring.")
        texts = {key: _coerce(str, text, f"{where} {key}") for key, text in entry.items() if key != "ring"}
        stages = _ring(entry.get("ring", []), where)
        replicas = tuple(stage[3:] for stage in stages)
        model = ServedModel(**texts, ring=tuple(stage[:3] for stage in stages), replicas=replicas)
        if not model.id or not model.path or model.placement not in ("trunk", "ring"):
            raise ConfigError(
                "served_model_incomplete",
                f"{where}: a model needs id, path and placement (trunk or ring).",
            )
        if model.id in (other.id for other in models):
            raise ConfigError("served_model_twice", f"{where}: there are two models with the id {model.id!r}.")
        models.append(model)
    return tuple(models)


def _ring(value: Any, where: str) -> tuple[tuple[Any, ...], ...]:
    """(wallet, first layer, end layer, wallets that stand by ...) of each stage."""
    stages = value if isinstance(value, list) else [value]
    for stage in stages:
        types = [type(part) for part in stage] if isinstance(stage, list) else []
        if types[:3] != [str, int, int] or any(kind is not str for kind in types[3:]):
            raise ConfigError(
                "wrong_type",
                f"{where}: each stage of a ring is [wallet, first layer, end layer], and wallets that stand by for it.",
            )
    return tuple(tuple(stage) for stage in stages)


def _from_text(section: str, key: str, text: str, source: str) -> Any:
    wanted = _types(section)[key]
    try:
        if wanted is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if wanted in (int, float, str):
            return wanted(text)
    except (KeyError, ValueError) as error:
        raise ConfigError("wrong_type", f"{source}: {text!r} is not a {wanted.__name__}.") from error
    raise ConfigError("not_settable", f"{source}: {section}.{key} can only be set in the file.")


def has_password(url: str) -> bool:
    """Whether a database's URL holds a password, before its host or among its options."""
    parts = urlsplit(url)
    return parts.password is not None or any(name.lower() == "password" for name, _ in parse_qsl(parts.query))


def _check_private(file: Path, where: str) -> None:
    if file.stat().st_mode & 0o077:
        raise ConfigError(
            "config_exposed", f"{where} holds a password, and others may read it.", f"Close it with: chmod 600 '{file}'"
        )


_MAY_HOLD_PASSWORDS = ("gateway.database",)
_CHOICES: dict[str, tuple[str, ...]] = {
    "engine.kernels": ("auto", "native", "eager", "reference"),
    "engine.kv_type": ("f32", "f16", "bf16", "q8_0"),
    "node.serve": ("auto", "experts", "ring", "nothing"),
    "wallet.commitment": ("processed", "confirmed", "finalized"),
    "wallet.kdf": ("interactive", "moderate", "sensitive"),
    "gateway.dispatch_wire": ("v1", "v2", "v2f16", "v3"),
    "gateway.dispatch_dtype": ("f32", "f16", "bf16", "int8"),
    "gateway.dispatch": ("always", "elastic"),
}
# Least and most; a number without an entry must not be negative.
_BOUNDS: dict[str, tuple[float, float]] = {
    "network.request_timeout_s": (0.1, 3600),
    "network.redial_min_s": (0.1, 3600),
    "network.redial_max_s": (0.1, 3600),
    "node.max_experts": (1, math.inf),
    "node.max_slices": (1, 8),
    "node.poll_s": (0.1, 120),
    "node.retry_s": (0.1, 3600),
    "engine.dispatch_timeout_s": (0.01, 3600),
    "wallet.priority_micro_lamports": (0, 50_000_000),
    "gateway.dispatch_busy_streams": (1, 65535),
    "gateway.dispatch_check_share": (0, 1),
    "gateway.port": (0, 65535),
    "gateway.max_requests": (1, 65535),
    "gateway.max_waiting": (0, 65535),
    "gateway.settlement_poll_s": (0.1, 3600),
    "gateway.standby_grace_s": (0, 86400),
}
_SECTIONS: dict[str, Any] = {
    "network": NetworkConfig,
    "node": NodeConfig,
    "engine": EngineConfig,
    "wallet": WalletConfig,
    "gateway": GatewayConfig,
}
