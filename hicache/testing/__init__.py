"""The shipped test kit: oracle, fault injection, conformance suites."""
