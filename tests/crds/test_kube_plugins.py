"""Credentials from a plugin, as the clouds' kubeconfigs have them; the plugin is a real program."""

import base64
import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from carpool_core.clock import rfc3339
from carpool_core.kube.config import KubeConfigError, Plugin, load_endpoint
from carpool_core.settings import KubeSettings

VERSION = "client.authentication.k8s.io/v1"
NOW = datetime(2026, 1, 1, tzinfo=UTC)

Install = Callable[..., dict[str, Any]]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Write a plugin that answers so, counts its calls and keeps what it was told; return its `exec`."""

    def write(
        status: Mapping[str, Any] | None, *, version: str = VERSION, ends: int = 0, **more: Any
    ) -> dict[str, Any]:
        answer = {"apiVersion": version, "kind": "ExecCredential", "status": status}
        (tmp_path / "answer").write_bytes(msgspec.json.encode(answer))
        program = tmp_path / "plugin"
        program.write_text(
            f'#!/bin/sh\ncd {tmp_path}\necho "$1 $REGION" >> calls\nprintf %s "$KUBERNETES_EXEC_INFO" > told\n'
            f"cat answer\nexit {ends}\n"
        )
        program.chmod(0o755)
        said = {"apiVersion": VERSION, "command": "./plugin", "args": ["token"], "interactiveMode": "Never"}
        return {**said, "env": [{"name": "REGION", "value": "north"}], **more}

    return write


def settings(folder: Path, plugin: Mapping[str, Any], **cluster: Any) -> KubeSettings:
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://api", **cluster}}],
        "users": [{"name": "u", "user": {"exec": plugin}}],
    }
    (folder / "config").write_text(yaml.safe_dump(config))
    return KubeSettings(str(folder / "config"))


def test_its_token_is_asked_for_once_until_the_server_refuses_it(install: Install, tmp_path: Path) -> None:
    token = load_endpoint(settings(tmp_path, install({"token": "secret"}))).token
    assert [token.at(0), token.at(1e9)] == ["secret", "secret"]
    assert (tmp_path / "calls").read_text() == "token north\n"
    install({"token": "another"})
    token.forget()
    assert token.at(1e9) == "another"


def test_a_token_is_renewed_when_its_time_is_over(install: Install, tmp_path: Path) -> None:
    said = install({"token": "one", "expirationTimestamp": rfc3339(NOW + timedelta(minutes=15))})
    plugin = Plugin(said, {}, tmp_path / "config", lambda: NOW)
    assert plugin.renew() == ("one", 900.0)


def test_one_that_fails_is_left_alone_for_a_minute_however_often_the_server_refuses(
    install: Install, tmp_path: Path
) -> None:
    token = load_endpoint(settings(tmp_path, install({"token": "old"}))).token
    assert token.at(0) == "old"
    install(None, ends=1)
    for second in (10, 20, 69):
        token.forget()
        assert token.at(second) == "old"
    assert (tmp_path / "calls").read_text().count("\n") == 2
    install({"token": "new"})
    assert token.at(70) == "new"


def test_beside_a_kubeconfig_named_from_here(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(tmp_path, install({"token": "t"}))
    monkeypatch.chdir(tmp_path)
    assert load_endpoint(KubeSettings("config")).token.at(0) == "t"


def test_it_is_told_of_the_cluster_where_it_asks_for_that(install: Install, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("PEM")
    extensions = [{"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}]
    cluster = {"certificate-authority": "ca.crt", "extensions": extensions}
    load_endpoint(settings(tmp_path, install({"token": "t"}, provideClusterInfo=True), **cluster))
    told = msgspec.json.decode((tmp_path / "told").read_bytes())
    authority = base64.b64encode(b"PEM").decode()
    expected = {"server": "http://api", "certificate-authority-data": authority, "config": {"audience": "x"}}
    assert told == {
        "apiVersion": VERSION,
        "kind": "ExecCredential",
        "spec": {"interactive": False, "cluster": expected},
    }


def test_its_certificate_is_used(install: Install, tmp_path: Path) -> None:
    said = install({"clientCertificateData": "no certificate", "clientKeyData": "no key"})
    with pytest.raises(KubeConfigError, match="cannot load the certificates") as caught:
        load_endpoint(settings(tmp_path, said, server="https://api"))
    assert isinstance(caught.value.__cause__, ssl.SSLError)  # from loading it: this is no certificate


@pytest.mark.parametrize(
    ("status", "how", "sentence"),
    [
        (None, {}, "found ExecCredential of client.authentication.k8s.io/v1$"),
        ({}, {}, "found neither a token nor a certificate"),
        ({"token": "t"}, {"version": "v2"}, "found ExecCredential of v2"),
        ({"token": 7}, {}, "found Expected `str`, got `int`"),
        ({"token": "t", "expirationTimestamp": "soon"}, {}, "found Invalid isoformat"),
        ({"token": "t"}, {"ends": 3}, "failed: .*exit status 3"),
        ({"token": "t"}, {"command": "./gone", "installHint": "get it from us"}, "which is not there: get it from us"),
        ({"token": "t"}, {"apiVersion": "v1alpha1"}, "found ./plugin of v1alpha1: renew it"),
        ({"token": "t"}, {"command": None}, "found no command"),
        ({"token": "t"}, {"interactiveMode": "Always"}, "run this in a terminal"),
    ],
)
def test_one_that_gives_no_credential_says_why(
    install: Install, tmp_path: Path, status: Mapping[str, Any] | None, how: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(KubeConfigError, match=sentence):
        load_endpoint(settings(tmp_path, install(status, **how)))
