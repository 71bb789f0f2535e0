"""Facts: one module a subject. Each reads a Host into a frozen dataclass of facts and never raises for a gap."""
