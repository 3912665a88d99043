"""Configuration: who wins, and what is refused with which hint."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console import config
from kvasir_console.config import Config
from kvasir_console.errors import ConfigError, ExitCode

WALLET = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def refusal(file: Path | None = None, env=None, flags=None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config.load(file, env or {}, flags or {})
    assert caught.value.exit_code is ExitCode.USAGE
    return caught.value


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(file):
    assert config.load(file, {}).node.max_experts == 64
    file.write_text("[node]\nmax_experts = 1\n")
    assert config.load(file, {}).node.max_experts == 1
    environment = {"KVASIR_NODE_MAX_EXPERTS": "2"}
    assert config.load(file, environment).node.max_experts == 2
    assert config.load(file, environment, {"node.max_experts": "3"}).node.max_experts == 3


def test_a_higher_level_only_replaces_what_it_names(file):
    file.write_text('[node]\nname = "box"\nretry_s = 3\n[engine]\nthreads = 2\n')
    loaded = config.load(file, {"KVASIR_NODE_RETRY_S": "4.5"}, {"engine.device": "cuda"})
    assert (loaded.node.name, loaded.node.retry_s) == ("box", 4.5)
    assert (loaded.engine.threads, loaded.engine.device) == (2, "cuda")


def test_no_file_is_an_empty_file(file):
    assert config.load(file, {}) == config.load(None, {}) == Config()


SECRET_URLS = ("postgresql://kvasir:hunter2@db/kvasir", "postgresql://kvasir@/kvasir?host=/run&password=hunter2")


@pytest.mark.parametrize("url", SECRET_URLS)
def test_a_databases_password_stands_in_a_private_file_only(file, url):
    for error in (
        refusal(env={"KVASIR_GATEWAY_DATABASE": url}),
        refusal(flags={"gateway.database": url}),
    ):
        assert error.code == "password_exposed"
        assert "hunter2" not in str(error)
    file.write_text(f'[gateway]\ndatabase = "{url}"\n')
    file.chmod(0o640)
    assert refusal(file).code == "config_exposed"
    assert "hunter2" not in str(refusal(file))
    file.chmod(0o600)
    assert config.load(file, {}).gateway.database == url


@pytest.mark.parametrize(
    "url", ["sqlite:////var/lib/kvasir.sqlite", "postgresql://kvasir@db:5433/kvasir?sslmode=require"]
)
def test_a_database_without_a_password_may_be_named_anywhere(file, url):
    assert config.load(None, {"KVASIR_GATEWAY_DATABASE": url}).gateway.database == url
    assert config.load(None, {}, {"gateway.database": url}).gateway.database == url
    file.write_text(f'[gateway]\ndatabase = "{url}"\n')
    file.chmod(0o644)
    assert config.load(file, {}).gateway.database == url


def test_variables_of_other_programs_and_of_paths_are_left_alone():
    environment = {"PATH": "/bin", "KVASIR_HOME": "/h", "KVASIR_CACHE": "/c", "KVASIR_TEST_CACHE": "/t", "KVASIRX": "1"}
    assert config.load(None, environment) == Config()


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("[node]\nmax_expert = 1", "unknown_key", "'max_experts'"),
        ("[nod]\nname = 'x'", "unknown_section", "'node'"),
        ("[wallet]\nrpcurl = 'x'", "unknown_key", "'rpc_url'"),
        ("[node]\nzzzzqqq = 1", "unknown_key", "max_experts, max_slices, memory_budget_mib"),
        ("node = 3", "config_not_a_table", ""),
        ("[node\n", "config_malformed", "line"),
        ("[node]\nmax_experts = '1'", "wrong_type", ""),
        ("[node]\nmax_experts = 1.0", "wrong_type", ""),
        ("[node]\nmax_experts = true", "wrong_type", ""),
        ("[node]\nauto_claim = 1", "wrong_type", ""),
        ("[node]\nname = 1", "wrong_type", ""),
        ("[node]\npoll_s = '1'", "wrong_type", ""),
        ("[node]\npoll_s = true", "wrong_type", ""),
        ("[node]\npoll_s = nan", "bad_value", "0.1 to 120"),
        ("[node]\npoll_s = 121", "bad_value", "0.1 to 120"),
        ("[node]\nmemory_budget_mib = -1", "bad_value", "at least 0"),
        ("[node]\nserve = 'expert'", "bad_value", "'experts'"),
        ("[wallet]\nkdf = 'fast'", "bad_value", "'interactive'"),
        ("[gateway]\nport = 65536", "bad_value", "65535"),
        ("[engine]\ndispatch_timeout_s = inf", "bad_value", ""),
    ],
)
def test_a_wrong_file_is_refused_with_the_next_step(file, text, code, hint):
    file.write_text(text)
    error = refusal(file)
    assert error.code == code
    assert hint in error.hint
    assert str(file) in error.message


@pytest.mark.parametrize(
    ("name", "text", "code", "hint"),
    [
        ("KVASIR_NODE_MAX_EXPRTS", "1", "unknown_key", "'max_experts'"),
        ("KVASIR_NODES_NAME", "1", "unknown_section", "'node'"),
        ("KVASIR_PASSPHRASE", "hunter2hunter2", "unknown_section", ""),
        ("KVASIR_HOMES", "/x", "unknown_section", ""),
        ("KVASIR_NODE", "1", "unknown_key", "name, serve"),
        ("KVASIR_NODE_MAX_EXPERTS", "many", "wrong_type", ""),
        ("KVASIR_NODE_MAX_EXPERTS", "0", "bad_value", "at least 1"),
        ("KVASIR_NODE_AUTO_CLAIM", "maybe", "wrong_type", ""),
        ("KVASIR_NODE_POLL_S", "nan", "bad_value", ""),
        ("KVASIR_GATEWAY_MODELS", "x", "not_settable", ""),
    ],
)
def test_a_wrong_variable_is_refused_by_name(name, text, code, hint):
    error = refusal(env={name: text})
    assert error.code == code
    assert name in error.message
    assert hint in error.hint
    assert "hunter2" not in str(error)


@pytest.mark.parametrize(
    ("dotted", "code"),
    [("node.nam", "unknown_key"), ("nodename", "unknown_section"), ("node", "unknown_key"), ("", "unknown_section")],
)
def test_a_wrong_flag_is_refused(dotted, code):
    error = refusal(flags={dotted: "x"})
    assert error.code == code
    assert error.hint


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_takes_the_usual_words(value):
    for text in ("true", "YES", "1") if value else ("false", "No", "0"):
        assert config.load(None, {"KVASIR_NODE_AUTO_CLAIM": text}).node.auto_claim is value


def test_a_whole_number_serves_where_a_decimal_one_is_meant(file):
    file.write_text("[node]\npoll_s = 5\n")
    assert type(config.load(file, {}).node.poll_s) is float


def test_served_models_are_read(file):
    file.write_text(
        '[[gateway.models]]\nid = "moe"\npath = "/m.gguf"\n'
        '[[gateway.models]]\nid = "ring"\npath = "/r.gguf"\nplacement = "ring"\n'
        f'ring = [["{WALLET}", 0, 15], ["{WALLET}", 15, 30, "first", "second"]]\n'
    )
    moe, ring = config.load(file, {}).gateway.models
    assert (moe.id, moe.path, moe.placement, moe.ring) == ("moe", "/m.gguf", "trunk", ())
    assert ring.ring == ((WALLET, 0, 15), (WALLET, 15, 30))
    assert ring.replicas == ((), ("first", "second"))


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ("'text'", "wrong_type"),
        ("{id = 'a'}", "served_model_incomplete"),
        ("{id = 'a', path = '/x', placement = 'moon'}", "served_model_incomplete"),
        ("{id = 'a', path = 3}", "wrong_type"),
        ("{id = 'a', paths = '/x'}", "unknown_key"),
        ("{id = 'a', path = '/x', ring = 5}", "wrong_type"),
        ("{id = 'a', path = '/x', ring = ['w', 0, 1]}", "wrong_type"),
        ("{id = 'a', path = '/x', ring = [['w', 0]]}", "wrong_type"),
        ("{id = 'a', path = '/x', ring = [['w', 0, 1.5]]}", "wrong_type"),
        ("{id = 'a', path = '/x', ring = [['w', 0, 1, 2]]}", "wrong_type"),
        ("{id = 'a', path = '/x', replicas = [['w']]}", "unknown_key"),
        ("{id = 'a', path = '/x'}, {id = 'a', path = '/y'}", "served_model_twice"),
    ],
)
def test_a_wrong_served_model_is_refused(file, entry, code):
    file.write_text(f"[gateway]\nmodels = [{entry}]\n")
    assert refusal(file).code == code


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert refusal(tmp_path).code == "config_unreadable"
    (tmp_path / "latin").write_bytes(b"[node]\nname = '\xe9'\n")
    assert refusal(tmp_path / "latin").code == "config_malformed"


def test_every_default_is_a_legal_value(tmp_path):
    """What a person copies out of the documentation is accepted."""
    document = {
        section: {key: value for key, value in values.items() if key != "models"}
        for section, values in dataclasses.asdict(Config()).items()
    }
    (tmp_path / "all.toml").write_text(tomlkit.dumps(document))
    assert config.load(tmp_path / "all.toml", {}) == Config()


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=12), max_size=3))
def test_no_text_in_flags_or_environment_breaks_the_reader(values):
    for arguments in ({"env": {f"KVASIR_{key}": text for key, text in values.items()}}, {"env": {}, "flags": values}):
        with contextlib.suppress(ConfigError):
            assert isinstance(config.load(None, **arguments), Config)


def test_values_that_contradict_each_other_are_refused(file):
    """Each is right by itself."""
    for flags, words in (
        ({"network.redial_min_s": "61"}, ("redial_min_s (61)", "redial_max_s (60)")),
        ({"network.redial_max_s": "4"}, ("redial_min_s (5)", "redial_max_s (4)")),
        ({"gateway.tls_cert": "chain.pem"}, ("gateway.tls_key is not set",)),
        ({"gateway.tls_key": "key.pem"}, ("gateway.tls_cert is not set",)),
    ):
        error = refusal(flags=flags)
        assert error.code == "bad_value"
        assert [word for word in words if word not in error.message] == []
    config.load(None, {}, {"network.redial_min_s": "61", "network.redial_max_s": "61"})
