"""The plan floor, tested on Python lists."""
