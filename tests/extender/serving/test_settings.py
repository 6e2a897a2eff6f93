"""Settings, and how the command refuses wrong ones."""

import pytest
from carpool_core.settings import SettingsError, load
from carpool_extender.commands import extender
from carpool_extender.settings import ExtenderSettings, TlsSettings
from click.testing import CliRunner


def test_the_environment_is_read():
    environ = {"CARPOOL_EXTENDER_PORT": "1", "CARPOOL_POLICY": "most-available-memory", "CARPOOL_EXTENDER_TLS_KEY": "k"}
    found = load(ExtenderSettings, environ)
    assert (found.port, found.policy, str(found.tls.key), found.host) == (1, "most-available-memory", "k", "127.0.0.1")


def test_tls_is_not_optional(tmp_path):
    with pytest.raises(SettingsError, match="CARPOOL_EXTENDER_TLS_CERT: expected a PEM file, found nothing"):
        TlsSettings().files()
    with pytest.raises(SettingsError, match="found no file at"):
        TlsSettings(cert=tmp_path / "c").files()


KUBECONFIG = (
    '{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c",'
    '"user":"u"}}],"clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:1"}}],'
    '"users":[{"name":"u","user":{"token":"t"}}]}'
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--policy", "best"], "policy 'best' is unknown; choose one of least-slowdown, most-available-memory"),
        (["--most-sm-active", "1.5"], "expected a largest SM activity above 0 and up to 1, found 1.5"),
        (["--most-sm-active", "nan"], "expected a largest SM activity above 0 and up to 1, found nan"),
        (["--most-joint-sm-active", "0"], "expected a largest joint SM activity above 0 and up to 1, found 0"),
        (["--least-free-mib", "-1"], "expected a least free memory of 0 to 1,073,741,824 MiB, found -1"),
        (["--least-free-mib", "9" * 23], "expected a least free memory of 0 to 1,073,741,824 MiB, found 99,999,9"),
        (["--most-jobs", "0"], "expected 1 to 1,024 jobs on a GPU at most, found 0"),
        (["--slots-per-gpu", "0"], "expected a number from 1 to 128, found 0"),
        (["--candidates", "0"], "expected a number from 1 on, found 0"),
        (["--bind-timeout-seconds", "nan"], "expected a number from 1 to 3600, found nan"),
        (["--metrics-port", "65536"], "expected a number from 0 to 65535, found 65536"),
        (["--metrics-port", "{taken}"], "CARPOOL_METRICS_PORT: expected a free port at 0.0.0.0, found {taken}: "),
        (
            ["--port", "{taken}"],
            "CARPOOL_EXTENDER_PORT: expected an address of this host and a free port, found 127.0.0.1 and {taken}: ",
        ),
        (["--prediction-key", "/nowhere"], "CARPOOL_PREDICTION_KEY: expected a file with a key, cannot read /nowhere"),
        (["--tls-cert", ""], "CARPOOL_EXTENDER_TLS_CERT: expected a PEM file, found no file at ."),
        (
            ["--tls-key", "{folder}/stranger.key"],
            "its private key, and a CA, each in PEM, found {folder}/server.crt, {folder}/stranger.key and {folder}/ca",
        ),
        (["--client-ca", "{folder}/ca.key"], "{folder}/server.key and {folder}/ca.key: "),
        (["--kubeconfig", "/nowhere"], "cannot read the kubeconfig /nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_refuses_what_cannot_work(tmp_path, certificates, taken, arguments, expected):
    """Regression: some of it was a traceback, some ran and placed nobody, and what was refused ended with 1."""
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    files = {"--tls-cert": "server.crt", "--tls-key": "server.key", "--client-ca": "ca.crt"}
    usual = ["--kubeconfig", str(tmp_path / "kubeconfig"), "--port", "0", "--metrics-port", "0"]
    usual += [part for flag, name in files.items() for part in (flag, str(certificates / name))]
    given = [part.format(taken=taken, folder=certificates) for part in arguments]
    result = CliRunner().invoke(extender, [*usual, *given])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)  # and no traceback
    assert expected.format(taken=taken, folder=certificates) in result.output
