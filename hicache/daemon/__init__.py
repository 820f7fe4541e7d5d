"""hicache serve: one store shared by many replicas over gRPC."""
