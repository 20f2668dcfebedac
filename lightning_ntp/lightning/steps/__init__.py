"""An optimizer step as a transaction: the snapshot it goes back to, and all that has to go back with it."""
