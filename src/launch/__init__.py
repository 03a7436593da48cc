"""How a sweep's runs are started: each in a process of its own, kept when a sweep is resumed, or searched for."""
