"""Settings of the board."""

from dataclasses import dataclass, field

from carpool_core.settings import KubeSettings, LogSettings, setting


@dataclass(frozen=True)
class BoardSettings:
    """Settings of the board."""

    host: str = setting(
        "127.0.0.1",
        flag="--host",
        env="CARPOOL_BOARD_HOST",
        help="Address to listen on. On 127.0.0.1 viewers have your own rights. On any other address each request needs "
        "the viewer's bearer token, whose rights count.",
    )
    port: int = setting(
        8044,
        flag="--port",
        env="CARPOOL_BOARD_PORT",
        minimum=0,
        maximum=65535,
        help="TCP port of the pages; 0 takes a free one.",
    )
    site: str = setting(
        "carpool-system/carpool",
        flag="--site",
        env="CARPOOL_SITE",
        help="Installation whose settings decide queue and explanations, as NAMESPACE/NAME. They are read from its "
        "ConfigMap NAME-settings. If empty, the defaults apply.",
        allow_empty=True,
    )
    kube: KubeSettings = field(default_factory=KubeSettings)
    log: LogSettings = field(default_factory=LogSettings)
