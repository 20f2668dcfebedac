"""A job on eight simulated GPUs that loses one, and gives what is left of its replica more power."""
