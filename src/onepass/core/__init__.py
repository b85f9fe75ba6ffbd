"""From a Python call to a launch: contracts, validation, registration with torch, and the fast path in C."""
