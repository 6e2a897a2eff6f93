"""The kubelet's APIs: messages that are generated from the protos, clients and servers from their descriptors."""

from types import SimpleNamespace
from typing import Any

import grpc  # type: ignore[import-untyped]
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass


def client(channel: Any, service: ServiceDescriptor) -> Any:
    """Return an object with a function for each method of the service."""

    def function(method: MethodDescriptor) -> Any:
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        return make(
            f"/{service.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )

    return SimpleNamespace(**{method.name: function(method) for method in service.methods})


def serve(server: Any, service: ServiceDescriptor, servicer: object) -> None:
    """Let a server answer a service; the servicer has a function for each of its methods."""

    def handler(method: MethodDescriptor) -> Any:
        is_stream = method.server_streaming
        make = grpc.unary_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
        return make(
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )

    handlers = {method.name: handler(method) for method in service.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
