"""Several processes that train together: rendezvous, agreement between ranks."""
