"""Settings: flags win over the environment, the environment over the file; and what is wrong is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from kvtier.config import Config, Share, default_data_dir, default_socket
from kvtier.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Config.model_fields:
        monkeypatch.delenv(f"KVTIER_{name.upper()}", raising=False)


def settings_file(directory: Path, text: str) -> Path:
    path = directory / "kvtier.toml"
    path.write_text(text)
    return path


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings_file(tmp_path, 'device_bytes = "1MiB"\nhost_bytes = "2MiB"\nredis = "none"\n')
    monkeypatch.setenv("KVTIER_DEVICE_BYTES", "3MiB")
    monkeypatch.setenv("KVTIER_HOST_BYTES", "4MiB")
    config = Config.load(path, device_bytes="5MiB", host_bytes=None)
    assert (config.device_bytes, config.host_bytes, config.redis) == (5 << 20, 4 << 20, "none")
    assert config.lease_ttl_s == 15.0


def test_every_setting_can_be_given_in_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = tmp_path / "any.pem"
    pem.touch()
    values: dict[str, Any] = {
        "socket": tmp_path / "a.sock",
        "listen": "127.0.0.1:9461",
        "tls_certificate": pem,
        "tls_key": pem,
        "tls_client_ca": pem,
        "device": "shared-memory",
        "device_bytes": 1000,
        "host_bytes": 2000,
        "max_caches": 3,
        "redis": "redis://far:6379/0",
        "redis_max_bytes": 4000,
        "redis_timeout_s": 0.5,
        "redis_connections": 6,
        "redis_in_flight_bytes": 7000,
        "redis_ttl_s": 8,
        "data_dir": tmp_path / "data",
        "write_policy": "write_through",
        "write_after_hits": 9,
        "lease_ttl_s": 1.5,
        "grace_s": 2.5,
        "drain_s": 3.5,
        "metrics": "off",
        "max_message_bytes": 10_000,
        "log_level": "debug",
    }
    assert set(values) == set(Config.model_fields)
    by_flag = Config.load(**values)
    assert by_flag.model_dump() == values
    toml = "\n".join(
        f"{name} = {value if isinstance(value, int | float) else repr(str(value))}" for name, value in values.items()
    )
    assert Config.load(settings_file(tmp_path, toml)) == by_flag
    for name, value in values.items():
        monkeypatch.setenv(f"KVTIER_{name.upper()}", str(value))
    assert Config.load() == by_flag


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("8GiB", 8 << 30), ("1.5MiB", 3 << 19), ("2GB", 2 * 10**9), ("4096", 4096)]
)
def test_sizes_take_units(text: str, num_bytes: int) -> None:
    assert Config.load(device_bytes=text).device_bytes == num_bytes


@pytest.mark.parametrize(("text", "share"), [("80%", 0.8), (" 12.5 %", 0.125), ("100%", 1.0), ("0.8", 0.8), (0.5, 0.5)])
def test_the_device_pool_takes_a_share_too(text: str | float, share: float) -> None:
    size = Config.load(device_bytes=text).device_bytes
    assert isinstance(size, Share)
    assert size == share


@pytest.mark.parametrize("device", ["auto", "shared-memory", "cuda:3", "GPU-2f6e1c3a-0000-11aa-22bb-aabbccddeeff"])
def test_devices_are_named_as_nvidia_does(device: str) -> None:
    assert Config.load(device=device).device == device


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "a size without sense": ({"device_bytes": "much"}, "device_bytes: "),
    "a share of nothing": ({"device_bytes": "0%"}, "device_bytes: Value error, 0% is no share"),
    "more than there is": ({"device_bytes": "120%"}, "device_bytes: Value error, 120% is no share"),
    "no device memory": ({"device_bytes": 0}, "device_bytes: Value error, Input should be greater than 0"),
    "a device without sense": ({"device": "gpu0"}, "device: Value error, give auto, shared-memory, cuda, cuda:N"),
    "no size": ({"host_bytes": 0}, "host_bytes: Input should be greater than 0"),
    "a time below none": ({"grace_s": -1}, "grace_s: Input should be greater than 0"),
    "no connection": ({"redis_connections": 0}, "redis_connections: Input should be greater than or equal to 1"),
    "a policy that is not": (
        {"write_policy": "write_sometimes"},
        "write_policy: Input should be 'write_back', 'write_through' or 'write_through_selective'",
    ),
    "an unknown setting": ({"device_byte": 1}, "device_byte: Extra inputs are not permitted"),
    "TCP without TLS": ({"listen": "0.0.0.0:1"}, "listen needs tls_certificate, tls_key and tls_client_ca"),
    "a missing file": ({"tls_key": "/no/such.pem"}, "no such file: /no/such.pem"),
    "two faults": (
        {"max_caches": 0, "log_level": "loud"},
        "max_caches: Input should be greater than or equal to 1; log_level",
    ),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_named(case: str) -> None:
    settings, fault = BAD_SETTINGS[case]
    with pytest.raises(ConfigurationError) as refused:
        Config.load(**settings)
    assert fault in str(refused.value)


def test_bad_files_and_environments_are_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="no settings file at .*nowhere.toml"):
        Config.load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigurationError, match="cannot read the settings"):
        Config.load(settings_file(tmp_path, "device_bytes = = 1"))
    with pytest.raises(ConfigurationError, match="devicebytes: Extra inputs are not permitted"):
        Config.load(settings_file(tmp_path, "devicebytes = 1"))
    monkeypatch.setenv("KVTIER_MAX_CACHES", "many")
    with pytest.raises(ConfigurationError, match="max_caches: Input should be a valid integer"):
        Config.load()


def test_defaults_follow_the_users_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    assert Config.load().socket == default_socket() == tmp_path / "run/kvtier.sock"
    assert Config.load().data_dir == default_data_dir() == tmp_path / "share/kvtier"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_socket().parent.parent == Path("/tmp")
    assert isinstance(Config.load().device_bytes, ByteSize)


def test_a_configuration_does_not_change() -> None:
    config = Config.load()
    with pytest.raises(ValueError, match="frozen"):
        config.redis = "none"
