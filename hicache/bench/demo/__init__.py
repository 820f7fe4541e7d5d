"""`make demo`: two replicas share one daemon, on recorded traffic; every number shown is also asserted."""
