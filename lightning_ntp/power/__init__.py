"""Power of GPUs when a replica has lost one: :mod:`.control` decides how much each gets, without a driver; everything
else here writes limits and clocks, in one process, and puts them back whatever happens.
"""
