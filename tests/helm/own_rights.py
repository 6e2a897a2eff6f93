"""What each of Carpool's processes may do by the roles of the chart; a right that is not here is one too many."""

READ = {"get", "list", "watch"}

OWN = {
    "carpool-operator": {
        "carpool.dev/gputrainingjobs": READ | {"delete"},
        "carpool.dev/gputrainingjobs/status": {"update"},
        "carpool.dev/gpunodes": READ,
        "pods": READ | {"create", "delete"},
        "services": {"create", "get"},
        "policy/poddisruptionbudgets": {"create", "get"},
        "events": {"create", "get", "list", "patch"},
    },
    "carpool-scheduler": {
        "carpool.dev/gputrainingjobs": READ,
        "carpool.dev/gpunodes": READ | {"patch"},
        "pods": READ | {"patch", "delete"},
        "pods/status": {"patch"},
        "pods/binding": {"create"},
        "events": {"create", "get", "patch"},
    },
    "carpool-node-agent": {
        "carpool.dev/gpunodes": READ | {"create"},
        "carpool.dev/gpunodes/status": {"patch"},
        "pods": READ,
        "nodes": {"get"},
        "events": {"create", "get", "patch"},
    },
}
