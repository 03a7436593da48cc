"""Several processes that train as one: what they need to be started, and that they agree, before the first step."""
