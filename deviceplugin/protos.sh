#!/bin/sh
# Generates the messages, their types and the gRPC stubs of the kubelet's APIs.
# Usage: deviceplugin/protos.sh [PYTHON] [OUTPUT]
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${1:-python3}
output=${2:-$here}
cd "$here"
exec "$python" -m grpc_tools.protoc -I . --python_out="$output" --pyi_out="$output" --grpc_python_out="$output" carpool_deviceplugin/protos/*.proto
