"""Exit 0 if the daemon at HOST:PORT serves, by gRPC's health protocol: for containers and load balancers.

The second argument bounds the wait in seconds. Says why on stderr otherwise.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def main(address: str = "127.0.0.1:7380", timeout_s: str = "2") -> int:
    """Return the exit status."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=float(timeout_s)
            )
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        print(f"{address}: not serving", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
