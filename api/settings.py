"""Every limit and default of the service, in one place.

Each can be set by an environment variable: ``AUTOSHARD_SERVE_`` and the field's name in capitals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import platformdirs
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses and names that only this machine reaches."""


def default_database() -> str:
    """SQLite in the user's state folder."""
    folder = Path(platformdirs.user_state_dir("autoshard"))
    return f"sqlite:///{folder / 'service.db'}"


class Limits(BaseSettings):
    """What one request may ask for, and how much one caller may ask.

    Counts of a model (``layers``, ``hidden``, ...) are checked before anything is built.
    """

    model_config = SettingsConfigDict(env_prefix="AUTOSHARD_SERVE_", frozen=True, extra="forbid")

    body_bytes: int = Field(8 * 2**20, ge=1024, description="largest request body")
    json_depth: int = Field(64, ge=4, description="deepest nesting of a body")
    devices: int = Field(65_536, ge=1)
    layers: int = Field(512, ge=1, description="repeated blocks of a config")
    hidden: int = Field(262_144, ge=1, description="largest width that a config may name")
    vocabulary: int = Field(4_194_304, ge=1)
    experts: int = Field(1024, ge=1)
    graph_nodes: int = Field(200_000, ge=1, description="operators of a graph, repeats unfolded")
    seq_len: int = Field(16_777_216, ge=1)
    global_batch: int = Field(16_777_216, ge=1)
    trials: int = Field(10_000, ge=1)
    sweep_points: int = Field(1000, ge=1, description="points of one sweep")
    validate_devices: int = Field(4, ge=1, description="most processes of a validation by running")
    queued_jobs: int = Field(1000, ge=1, description="jobs that may wait, of all callers")
    jobs_per_key: int = Field(500, ge=1, description="unfinished jobs of one key")
    requests_per_minute: int = Field(600, ge=1, description="of one key; of one address without")
    jobs_per_day: int = Field(10_000, ge=1, description="of one key")
    wait_s: float = Field(60.0, gt=0, description="longest that a request waits for its job")
    job_s: float = Field(600.0, gt=0, description="longest that one job may run")
    job_bytes: int = Field(4 * 2**30, ge=2**28, description="most memory of one job's process")
    streams: int = Field(256, ge=1, description="event streams open at a time")
    body_s: float = Field(30.0, gt=0, description="longest that a request body may take to arrive")
    buffered_bytes: int = Field(
        2**28, ge=1024, description="memory of all request bodies that are being received"
    )


class Settings(BaseSettings):
    """How the service runs."""

    model_config = SettingsConfigDict(env_prefix="AUTOSHARD_SERVE_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    database: str = Field(default_factory=default_database, description="SQLAlchemy URL")
    workers: int = Field(1, ge=0, description="worker processes; 0: they are started elsewhere")
    lease_s: float = Field(15.0, gt=0, description="a job runs again after so much silence")
    drain_s: float = Field(10.0, ge=0, description="longest wait for running work at SIGTERM")
    attempts: int = Field(50, ge=1, description="times that a job is begun before it is given up")
    require_keys: bool | None = Field(
        None, description="None: keys are asked for unless only this machine can reach the service"
    )
    hosts: tuple[str, ...] = Field(
        (), description="names that it is called by besides loopback ones, for a proxy in front"
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="auto: text on a terminal, JSON lines elsewhere"
    )
    limits: Limits = Field(default_factory=lambda: Limits())

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return self.host in LOOPBACK

    @property
    def keys_required(self) -> bool:
        """Whether a request needs a key."""
        return not self.loopback if self.require_keys is None else self.require_keys
