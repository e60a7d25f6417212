"""Decisions: what comes next, which way a call takes, and the scheduler that carries it out."""
