"""Several processes that train as one: ranks, launch checks, agreement, sharding."""
