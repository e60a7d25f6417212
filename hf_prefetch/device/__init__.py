"""Device side: the slots that expert banks rotate through."""
