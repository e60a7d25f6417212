"""Host side: page-locked arenas, the store of every bank's bytes, and the ledger of what was allocated."""
