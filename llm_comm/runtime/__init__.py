"""Set-up and supervision of one group of ranks: rendezvous, shared memory, device, watchdog, statistics."""
