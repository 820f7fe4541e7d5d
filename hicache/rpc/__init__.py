"""Generated protocol code and what both ends of the wire share."""
