#!/bin/sh
# Generates the messages of the kubelet's APIs (and their types). Only messages: the few calls are declared in kubelet/wire.py.
# Usage: deviceplugin/protos.sh [PYTHON] [OUTPUT]
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${1:-python3}
output=${2:-$here}
cd "$here"
exec "$python" -m grpc_tools.protoc -I . --python_out="$output" --pyi_out="$output" carpool_deviceplugin/kubelet/protos/*.proto
