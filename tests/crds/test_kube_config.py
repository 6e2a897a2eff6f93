import base64
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from carpool_core.kube.config import KubeConfigError, Token, load_endpoint, token_file
from carpool_core.settings import KubeSettings

Write = Callable[..., KubeSettings]
CA = ssl.get_default_verify_paths().cafile


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Write:
    def write(cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None, **top: Any) -> KubeSettings:
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
            "clusters": [{"name": "c", "cluster": {"server": "http://api:1234/", **(cluster or {})}}],
            "users": [{"name": "u", "user": user or {}}],
        } | top
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        return KubeSettings(str(tmp_path / "config"))

    return write


def test_token_of_a_kubeconfig(kubeconfig: Write) -> None:
    endpoint = load_endpoint(kubeconfig(user={"token": "secret"}))
    assert (endpoint.server, endpoint.namespace, endpoint.tls) == ("http://api:1234", "team", None)
    assert endpoint.token.at(0) == "secret"


def test_token_file_beside_the_kubeconfig(kubeconfig: Write, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    assert load_endpoint(kubeconfig(user={"tokenFile": "token"})).token.at(0) == "from-file"


def test_https_verifies_by_the_given_authority(kubeconfig: Write) -> None:
    if CA is None:
        pytest.fail("expected a bundle of certificate authorities on this machine")
    data = base64.b64encode(Path(CA).read_bytes()).decode()
    for cluster in ({"certificate-authority": CA}, {"certificate-authority-data": data}):
        tls = load_endpoint(kubeconfig({"server": "https://api", **cluster})).tls
        assert tls is not None
        assert tls.verify_mode is ssl.CERT_REQUIRED
        assert tls.check_hostname


def test_insecure_only_when_it_is_said(kubeconfig: Write) -> None:
    tls = load_endpoint(kubeconfig({"server": "https://api", "insecure-skip-tls-verify": True})).tls
    assert tls is not None
    assert tls.verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"user": {"auth-provider": {"name": "gcp"}}},
            "gets its credentials from `auth-provider`, which kubectl has dropped",
        ),
        ({"user": {"token": "t", "as": "root"}}, "speaks as somebody else"),
        ({"cluster": {"proxy-url": "http://proxy"}}, "sets proxy-url, which"),
        ({"clusters": {"c": {}}}, "expected a list of clusters with names"),
        ({"cluster": {"server": ""}}, "has a cluster without a server"),
        ({"current-context": ""}, "has no current-context"),
        ({"current-context": "there"}, "names the context 'there', which is not among its contexts"),
        ({"clusters": []}, "names the cluster 'c', which is not among its clusters"),
        ({"users": None}, "names the user 'u', which is not among its users"),
        (
            {"cluster": {"server": "https://a", "tls-server-name": "b"}},
            "sets tls-server-name, which",
        ),
        ({"cluster": {"server": "https://a", "certificate-authority": "gone.crt"}}, "cannot load the certificates"),
    ],
)
def test_an_unusable_kubeconfig_says_why(kubeconfig: Write, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KubeConfigError, match=sentence):
        load_endpoint(kubeconfig(**change))


def test_a_missing_kubeconfig_is_named(tmp_path: Path) -> None:
    with pytest.raises(KubeConfigError, match=r"cannot read the kubeconfig .*absent"):
        load_endpoint(KubeSettings(str(tmp_path / "absent")))
    (tmp_path / "broken").write_text("a: [")
    with pytest.raises(KubeConfigError, match=r"cannot read the kubeconfig .*broken"):
        load_endpoint(KubeSettings(str(tmp_path / "broken")))


def test_service_account_of_the_pod(tmp_path: Path) -> None:
    if CA is None:
        pytest.fail("expected a bundle of certificate authorities on this machine")
    (tmp_path / "ca.crt").write_bytes(Path(CA).read_bytes())
    (tmp_path / "token").write_text("projected")
    (tmp_path / "namespace").write_text("carpool-system")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    endpoint = load_endpoint(KubeSettings(), environ, tmp_path)
    assert (endpoint.server, endpoint.namespace) == ("https://[fd00::1]:6443", "carpool-system")
    assert endpoint.token.at(0) == "projected"


def test_where_nothing_is_set_it_is_kubectls_usual_kubeconfig(kubeconfig: Write, tmp_path: Path) -> None:
    """Regression: where kubectl works without KUBECONFIG, `carpool explain` found no cluster."""
    kubeconfig(user={"token": "usual"})
    (tmp_path / ".kube").mkdir()
    (tmp_path / "config").rename(tmp_path / ".kube" / "config")
    assert load_endpoint(KubeSettings(), {"HOME": str(tmp_path)}).token.at(0) == "usual"


def test_a_usual_kubeconfig_that_may_not_be_looked_at(tmp_path: Path) -> None:
    """Regression: a home of somebody else ended in a traceback."""
    # Root may look into every folder, but not even root at a name that is too long.
    home = tmp_path / ("h" * 300)
    with pytest.raises(KubeConfigError, match=r"cannot look at the kubeconfig .*KUBECONFIG"):
        load_endpoint(KubeSettings(), {"HOME": str(home)})


@pytest.mark.parametrize("environ", [{}, {"HOME": "/nonexistent"}])
def test_nowhere_to_go(environ: dict[str, str]) -> None:
    with pytest.raises(KubeConfigError, match="set KUBECONFIG"):
        load_endpoint(KubeSettings(), environ)


def test_a_token_file_is_read_again_each_minute_and_after_a_refusal(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    token = Token(renew=token_file(file))
    assert token.at(1000) == "one"
    file.write_text("two")
    assert token.at(1059) == "one"
    assert token.at(1060) == "two"
    file.write_text("three")
    token.forget()
    assert token.at(1061) == "three"
    file.unlink()
    assert token.at(2000) == "three"  # a moment without the file, while it is swapped, is no reason to fail


def test_a_token_file_that_never_was() -> None:
    with pytest.raises(KubeConfigError, match="cannot read the token file /nonexistent/token"):
        Token(renew=token_file(Path("/nonexistent/token"))).at(0)


def test_several_kubeconfigs_speak_together_and_the_first_is_believed(tmp_path: Path) -> None:
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


def test_of_several_kubeconfigs_one_may_not_be_looked_at(tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 300)
    with pytest.raises(KubeConfigError, match="cannot look at the kubeconfig"):
        load_endpoint(KubeSettings(f"{tmp_path}/a:{too_long}"))


def test_of_several_kubeconfigs_none_is_there(tmp_path: Path) -> None:
    with pytest.raises(KubeConfigError, match="expected a kubeconfig at one of"):
        load_endpoint(KubeSettings(f"{tmp_path}/a:{tmp_path}/b"))
