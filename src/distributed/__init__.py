"""Several processes that train together: launch checks, rendezvous, agreement between ranks."""
