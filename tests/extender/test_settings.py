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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--policy", "best"], "policy 'best' is unknown; choose one of least-slowdown, most-available-memory"),
        ([], "CARPOOL_EXTENDER_TLS_CERT: expected a PEM file, found nothing"),
    ],
)
def test_the_command_refuses_what_cannot_work(tmp_path, arguments, expected):
    config = tmp_path / "kubeconfig"
    config.write_text(
        '{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c",'
        '"user":"u"}}],"clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:1"}}],'
        '"users":[{"name":"u","user":{"token":"t"}}]}'
    )
    result = CliRunner().invoke(extender, [*arguments, "--kubeconfig", str(config)])
    assert result.exit_code == 1
    assert expected in result.output
