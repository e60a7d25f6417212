"""Prefetching inside other runtimes. Imported only when one of them asks for it."""
