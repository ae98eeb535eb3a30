"""Settings of the daemon: the only place that reads the environment and settings files.

Every setting has one name: `device_bytes` in a TOML file, `KVTIER_DEVICE_BYTES` in the environment, `--device-bytes` on
the command line. The command line wins over the environment, and the environment over the file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, PlainValidator, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvtier.errors import ConfigurationError

Bytes = Annotated[ByteSize, Field(gt=0)]


class Share(float):
    """A part of the memory that is free: above 0, at most 1."""

    def __str__(self) -> str:
        return f"{100 * self:g}%"


_DEVICE = re.compile(r"auto|shared-memory|cuda(:\d+)?|(GPU|MIG)-[0-9a-fA-F-]+")
_PERCENTAGE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_FRACTION = re.compile(r"0?\.\d+")


def _bytes_or_share(value: object) -> ByteSize | Share:
    text = str(value).strip()
    if percentage := _PERCENTAGE.fullmatch(text):
        share = Share(float(percentage[1]) / 100)
        if not 0 < share <= 1:
            raise ValueError(f"{share} is no share; give more than 0% and at most 100%")
        return share
    if _FRACTION.fullmatch(text) and float(text):
        return Share(float(text))
    try:
        return _BYTES.validate_python(value)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from error


_BYTES = TypeAdapter(Bytes)
BytesOrShare = Annotated[ByteSize | Share, PlainValidator(_bytes_or_share)]
Seconds = Annotated[float, Field(gt=0)]


def default_socket() -> Path:
    """`kvtier.sock` in the user's runtime directory, or in a directory of its own under /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvtier.sock" if runtime else Path(f"/tmp/kvtier-{os.getuid()}/kvtier.sock")


def default_data_dir() -> Path:
    """Where the embedded Redis lives."""
    return Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local/share")) / "kvtier"


class Config(BaseSettings):
    """What `kvtier serve` does, and with how much of the machine."""

    model_config = SettingsConfigDict(env_prefix="KVTIER_", extra="forbid", frozen=True)

    socket: Path = Field(default_factory=default_socket, description="Unix socket to serve on.")
    listen: str | None = Field(None, description="Serve TCP too, on HOST:PORT. Needs the three --tls files.")
    tls_certificate: Path | None = Field(None, description="The daemon's certificate chain (PEM).")
    tls_key: Path | None = Field(None, description="The daemon's private key (PEM).")
    tls_client_ca: Path | None = Field(None, description="Clients must show a certificate of this authority (PEM).")

    device: str = Field(
        "auto",
        description="Where device pools may lie: cuda (the GPUs that workers run on), cuda:1, the UUID of a GPU, "
        "shared-memory, or auto: cuda if there is a GPU.",
    )
    device_bytes: BytesOrShare = Field(
        ByteSize(1 << 30),
        description="Memory of the device pools on a GPU: 8GiB, or 80% of what is free when the first worker attaches.",
    )
    host_bytes: Bytes = Field(ByteSize(4 << 30), description="Memory of the host pool.")
    max_caches: int = Field(
        1, ge=1, description="Models (fingerprints) that share the pools; each gets an equal part of their memory."
    )
    redis: str = Field("embedded", description="Far tier: 'embedded', 'none', or a URL such as redis://host:6379/0.")
    redis_max_bytes: Bytes = Field(ByteSize(4 << 30), description="Memory of the embedded Redis.")
    redis_timeout_s: Seconds = Field(1.0, description="Deadline of a call to Redis.")
    redis_connections: int = Field(4, ge=1, description="Connections to Redis, and calls in flight.")
    redis_in_flight_bytes: Bytes = Field(ByteSize(64 << 20), description="Bytes in flight to and from Redis.")
    redis_ttl_s: int | None = Field(None, ge=1, description="Pages leave Redis after this time; never, if not given.")
    data_dir: Path = Field(default_factory=default_data_dir, description="Directory of the embedded Redis.")

    write_policy: Literal["write_back", "write_through", "write_through_selective"] = Field(
        "write_back", description="When pages are copied below the device: on eviction, on commit, or after some hits."
    )
    write_after_hits: int = Field(2, ge=1, description="Hits after which write_through_selective writes a page.")
    lease_ttl_s: Seconds = Field(15.0, description="A worker silent for this long loses its leases.")
    grace_s: Seconds = Field(5.0, description="Time before pages that a lost worker may still write are used again.")
    drain_s: Seconds = Field(30.0, description="Time to write pages to Redis on shutdown.")

    metrics: str = Field("127.0.0.1:9460", description="Address of the Prometheus endpoint /metrics, or 'off'.")
    max_message_bytes: Bytes = Field(ByteSize(16 << 20), description="Largest gRPC message; 4 bytes a token.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What to log.")

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            raise ValueError("give auto, shared-memory, cuda, cuda:N, or the UUID of a GPU as nvidia-smi prints it")
        return device

    @model_validator(mode="after")
    def _check_tls(self) -> Config:
        files = (self.tls_certificate, self.tls_key, self.tls_client_ca)
        if self.listen and not all(files):
            raise ValueError(
                "listen needs tls_certificate, tls_key and tls_client_ca: over TCP the daemon speaks mutual TLS only"
            )
        if missing := [str(file) for file in files if file and not file.is_file()]:
            raise ValueError(f"no such file: {', '.join(missing)}")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(init_settings, InitSettingsSource)
        settings_file = init_settings.init_kwargs.pop("settings_file", None)
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings]
        if settings_file is not None:
            sources.append(TomlConfigSettingsSource(settings_cls, settings_file))
        return tuple(sources)

    @classmethod
    def load(cls, settings_file: Path | None = None, **overrides: Any) -> Config:
        """Settings from overrides (those not None), the environment and a TOML file; raises `ConfigurationError`."""
        if settings_file is not None and not settings_file.is_file():
            raise ConfigurationError(f"no settings file at {settings_file}")
        given = {name: value for name, value in overrides.items() if value is not None}
        given["settings_file"] = settings_file
        try:
            return cls(**given)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc'])) or 'settings'}: {fault['msg']}" for fault in error.errors()]
            raise ConfigurationError("; ".join(faults)) from error
        except ValueError as error:
            raise ConfigurationError(f"cannot read the settings: {error}") from error
