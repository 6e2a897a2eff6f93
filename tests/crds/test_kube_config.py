"""Kubeconfigs, exec plugins and service accounts; the plugin is a real program."""

import base64
import ssl
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from carpool_core.clock import rfc3339
from carpool_core.kube.config import KubeConfigError, Token, load_endpoint
from carpool_core.settings import KubeSettings

Write = Callable[..., KubeSettings]
Install = Callable[..., dict[str, Any]]
VERSION = "client.authentication.k8s.io/v1"
CA = ssl.get_default_verify_paths().cafile or ""


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Write:
    def write(cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None, **top: Any) -> KubeSettings:
        config = {
            "current-context": "here",
            "contexts": [
                {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
                {"name": "there", "context": {"cluster": "other", "user": "u", "namespace": "ops"}},
            ],
            "clusters": [
                {"name": "c", "cluster": {"server": "http://api:1234/", **(cluster or {})}},
                {"name": "other", "cluster": {"server": "http://other"}},
            ],
            "users": [{"name": "u", "user": user or {}}],
        } | top
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        return KubeSettings(str(tmp_path / "config"))

    return write


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Write a plugin that returns this status, counts its calls and keeps its input; return its `exec` section."""

    def write(
        status: Mapping[str, Any] | None, *, version: str = VERSION, exit_code: int = 0, **more: Any
    ) -> dict[str, Any]:
        answer = {"apiVersion": version, "kind": "ExecCredential", "status": status}
        (tmp_path / "answer").write_bytes(msgspec.json.encode(answer))
        program = tmp_path / "plugin"
        program.write_text(
            f'#!/bin/sh\ncd {tmp_path}\necho "$1 $REGION" >> calls\nprintf %s "$KUBERNETES_EXEC_INFO" > input\n'
            f"cat answer\nexit {exit_code}\n"
        )
        program.chmod(0o755)
        section = {"apiVersion": VERSION, "command": "./plugin", "args": ["token"], "interactiveMode": "Never"}
        return {**section, "env": [{"name": "REGION", "value": "north"}], **more}

    return write


def calls(folder: Path) -> int:
    return (folder / "calls").read_text().count("\n")


def test_kubeconfig_gives_server_namespace_and_token(kubeconfig: Write) -> None:
    endpoint = load_endpoint(kubeconfig(user={"token": "secret"}))
    assert (endpoint.server, endpoint.namespace, endpoint.tls) == ("http://api:1234", "team", None)
    assert endpoint.token.at(0) == "secret"


def test_token_file_is_reread_each_minute(kubeconfig: Write, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    token = load_endpoint(kubeconfig(user={"tokenFile": "token"})).token
    assert token.at(0) == "one"
    (tmp_path / "token").write_text("two\n")
    assert [token.at(59), token.at(60)] == ["one", "two"]


def test_server_certificate_is_verified_unless_turned_off(kubeconfig: Write) -> None:
    data = base64.b64encode(Path(CA).read_bytes()).decode()
    for cluster in ({"certificate-authority": CA}, {"certificate-authority-data": data}):
        tls = load_endpoint(kubeconfig({"server": "https://api", **cluster})).tls
        assert tls is not None
        assert tls.verify_mode is ssl.CERT_REQUIRED
        assert tls.check_hostname
        assert tls.get_ca_certs()
    tls = load_endpoint(kubeconfig({"server": "https://api", "insecure-skip-tls-verify": True})).tls
    assert tls is not None
    assert tls.verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"user": {"auth-provider": {"name": "azure"}}}, "has no credentials that Carpool supports"),
        ({"user": {"username": "a"}}, "has no credentials that Carpool supports"),
        ({"user": {"token": "t", "as": "root"}}, "impersonates another user"),
        ({"cluster": {"proxy-url": "http://proxy"}}, "sets proxy-url, which Carpool does not support"),
        ({"cluster": {"server": "https://a", "tls-server-name": "b"}}, "sets tls-server-name, which"),
        ({"cluster": {"server": ""}}, "has a cluster without a server"),
        ({"clusters": {"c": {}}}, "cannot use the kubeconfig .*config"),
        ({"current-context": ""}, "has no current-context.*--context"),
        ({"current-context": "elsewhere"}, "object with name elsewhere in .*contexts"),
        ({"clusters": []}, "object with name c in .*clusters"),
        ({"users": None}, "object with name u in .*users"),
        (
            {"cluster": {"server": "https://a", "certificate-authority": "gone.crt"}},
            r"File does not exist: .*gone\.crt",
        ),
    ],
)
def test_unusable_kubeconfig_is_refused_with_the_reason(
    kubeconfig: Write, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(KubeConfigError, match=sentence):
        load_endpoint(kubeconfig(**change))


def test_missing_or_broken_kubeconfig_is_named(tmp_path: Path) -> None:
    for missing in ("absent", f"a:{tmp_path}/b", "x" * 300):
        with pytest.raises(KubeConfigError, match=f"expected a kubeconfig at .*{missing}, found none"):
            load_endpoint(KubeSettings(f"{tmp_path}/{missing}"))
    for broken in ("a: [", "- a list", ""):
        (tmp_path / "broken").write_text(broken)
        with pytest.raises(KubeConfigError, match=r"cannot use the kubeconfig .*broken"):
            load_endpoint(KubeSettings(str(tmp_path / "broken")))


def test_missing_client_is_named_with_the_way_to_install_it(kubeconfig: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.config.kube_config", None)
    with pytest.raises(KubeConfigError, match=r"pip install '.\[cli\]'"):
        load_endpoint(kubeconfig())


def test_service_account_is_used_in_a_pod(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_bytes(Path(CA).read_bytes())
    (tmp_path / "token").write_text("projected")
    (tmp_path / "namespace").write_text("carpool-system")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    endpoint = load_endpoint(KubeSettings(), environ, tmp_path)
    assert (endpoint.server, endpoint.namespace) == ("https://[fd00::1]:6443", "carpool-system")
    assert endpoint.token.at(0) == "projected"
    (tmp_path / "token").write_text("rotated")
    assert [endpoint.token.at(59), endpoint.token.at(60)] == ["projected", "rotated"]


def test_official_client_is_imported_only_for_kubeconfigs() -> None:
    """Regression guard for the agent's memory: the client takes 40 MB."""
    code = "import sys, carpool_core.kube.client; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("context", "pod", "server"),
    [
        pytest.param(None, {}, "http://api:1234", id="as kubectl does outside of pods"),
        pytest.param("there", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "http://other", id="in a pod, a named context"),
    ],
)
def test_default_kubeconfig_is_used(
    kubeconfig: Write, tmp_path: Path, context: str | None, pod: dict[str, str], server: str
) -> None:
    """Regression: where kubectl works without KUBECONFIG, `carpool explain` found no cluster."""
    kubeconfig()
    (tmp_path / ".kube").mkdir()
    (tmp_path / "config").rename(tmp_path / ".kube" / "config")
    assert load_endpoint(KubeSettings(context=context), {"HOME": str(tmp_path), **pod}).server == server


@pytest.mark.parametrize("environ", [{}, {"HOME": "/nonexistent"}, {"HOME": "/" + "h" * 300}])
def test_error_without_kubeconfig_names_the_variable(environ: dict[str, str]) -> None:
    """The last case is a home that may not be read: it once ended in a traceback."""
    with pytest.raises(KubeConfigError, match="set KUBECONFIG"):
        load_endpoint(KubeSettings(), environ)


def test_first_of_several_kubeconfigs_wins(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "token").write_text("from afar")
    files = [tmp_path / "gone", tmp_path / "near", tmp_path / "far" / "config"]
    clusters = [{"name": "c", "cluster": {"server": "http://near"}}]
    contexts = [{"name": "here", "context": {"cluster": "c", "user": "u"}}]
    files[1].write_text(yaml.safe_dump({"clusters": clusters, "current-context": "here"}))
    others = [{"name": "c", "cluster": {"server": "http://far"}}]
    users = [{"name": "u", "user": {"tokenFile": "token"}}]
    far = {"clusters": others, "contexts": contexts, "users": users, "current-context": "elsewhere"}
    files[2].write_text(yaml.safe_dump(far))
    endpoint = load_endpoint(KubeSettings(":".join(map(str, files))))
    assert endpoint.server == "http://near"
    assert endpoint.token.at(0) == "from afar"


def test_token_is_reread_after_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_bytes(Path(CA).read_bytes())
    file = tmp_path / "token"
    file.write_text("one")
    token = load_endpoint(KubeSettings(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path).token
    assert token.at(1000) == "one"
    file.write_text("two")
    token.forget()
    assert token.at(1001) == "two"
    file.unlink()
    assert token.at(2000) == "two"


def test_unreadable_first_token_is_an_error() -> None:
    def read(_: bool) -> str:
        raise KubeConfigError("cannot read")

    with pytest.raises(KubeConfigError, match="cannot read"):
        Token(read).at(0)


# Exec plugins


def test_plugin_runs_again_only_after_a_refusal(kubeconfig: Write, install: Install, tmp_path: Path) -> None:
    token = load_endpoint(kubeconfig(user={"exec": install({"token": "secret"})})).token
    assert [token.at(0), token.at(1e9)] == ["secret", "secret"]
    assert (tmp_path / "calls").read_text() == "token north\n"
    install({"token": "another"})
    token.forget()
    assert token.at(1e9) == "another"


def test_expired_plugin_token_is_renewed(kubeconfig: Write, install: Install) -> None:
    past, future = (rfc3339(datetime.now(UTC) + timedelta(hours=hours)) for hours in (-1, 1))
    token = load_endpoint(kubeconfig(user={"exec": install({"token": "one", "expirationTimestamp": past})})).token
    install({"token": "two", "expirationTimestamp": future})
    assert token.at(0) == "two"
    install({"token": "three"})
    assert token.at(100) == "two"


def test_failing_plugin_pauses_a_minute(kubeconfig: Write, install: Install, tmp_path: Path) -> None:
    token = load_endpoint(kubeconfig(user={"exec": install({"token": "old"})})).token
    assert token.at(0) == "old"
    install(None, exit_code=1)
    for second in (10, 20, 69):
        token.forget()
        assert token.at(second) == "old"
    assert calls(tmp_path) == 2
    install({"token": "new"})
    assert token.at(70) == "new"


def test_plugin_path_is_relative_to_the_kubeconfig(
    kubeconfig: Write, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig(user={"exec": install({"token": "t"})})
    monkeypatch.chdir(tmp_path)
    assert load_endpoint(KubeSettings("config")).token.at(0) == "t"


def test_plugin_gets_the_cluster_on_request(kubeconfig: Write, install: Install, tmp_path: Path) -> None:
    extensions = [{"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}]
    user = {"exec": install({"token": "t"}, provideClusterInfo=True, env=None, installHint=None)}  # nulls as AWS writes
    load_endpoint(kubeconfig({"server": "http://api", "extensions": extensions}, user))
    spec = msgspec.json.decode((tmp_path / "input").read_bytes())["spec"]
    assert spec["interactive"] is False
    assert (spec["cluster"]["server"], spec["cluster"]["config"]) == ("http://api", {"audience": "x"})


def test_plugin_may_return_a_certificate(kubeconfig: Write, install: Install) -> None:
    user = {"exec": install({"clientCertificateData": "no certificate", "clientKeyData": "no key"})}
    with pytest.raises(KubeConfigError, match="cannot load the certificates") as caught:
        load_endpoint(kubeconfig({"server": "https://api"}, user))
    assert isinstance(caught.value.__cause__, ssl.SSLError)  # the certificate was loaded, and is none


@pytest.mark.parametrize(
    ("status", "change", "sentence"),
    [
        ({}, {}, "missing token or clientCertificateData"),
        ({"clientCertificateData": "c"}, {}, "missing clientKeyData"),
        ({"token": "t"}, {"version": "v2"}, "version v2 does not match"),
        ({"token": "t"}, {"exit_code": 3}, "process returned 3"),
        ({"token": "t"}, {"command": "./gone", "installHint": "get it from us"}, r"\./gone.*; get it from us$"),
        ({"token": "t"}, {"command": None}, "Expected key command"),
    ],
)
def test_plugin_without_credentials_is_an_error_with_the_reason(
    kubeconfig: Write, install: Install, status: Mapping[str, Any] | None, change: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(KubeConfigError, match=sentence):
        load_endpoint(kubeconfig(user={"exec": install(status, **change)}))
