"""Ranks that join a running fit: a dead one that was started again, a spare, one that an operator adds."""
